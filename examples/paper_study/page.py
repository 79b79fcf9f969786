"""The study's page, and its tables as files."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commtrace.analyses.report.html.page import Drawing, Page, PageSection, PageTable, Tile, drawing, render
from commtrace.formatting import format_bytes, format_count, format_plural, is_known
from commtrace.formatting import format_duration as duration
from commtrace.output_files import atomic_write

from .experiments import facts
from .parts import Experiment, Options, Section

if TYPE_CHECKING:
    import pandas as pd

PAGE: Final = "study.html"
DATA: Final = "data"
PAPER: Final = (
    "Demystifying the Communication Characteristics for Distributed Transformer Models (Anthony et al., "
    "arXiv 2408.10197)"
)
_MOST_ROWS: Final = 40
_FEW: Final = 6
_LONG: Final = 32
"""Letters from which a word may be broken."""


@dataclass(frozen=True)
class Study:
    """A study as it stands: what was asked for, what is done, what failed, and what there is to see."""

    options: Options
    wanted: Mapping[str, Sequence[Experiment]]
    """By part."""
    done: Mapping[str, Mapping[str, Path]]
    sections: Mapping[str, Sequence[Section]]
    """By part."""
    failures: Mapping[str, str]
    """Why an experiment failed, by its key."""

    @property
    def every(self) -> list[Section]:
        """The sections of all parts."""
        return [one for some in self.sections.values() for one in some]

    @property
    def missing(self) -> list[Experiment]:
        """Those that are not done."""
        return [one for name, some in self.wanted.items() for one in some if one.key not in self.done[name]]

    def costs(self) -> Iterator[tuple[str, int, float, float]]:
        """Of each part: how many experiments are done, and their wall and CPU seconds."""
        for name, places in self.done.items():
            told = [facts(place) for place in places.values()]
            yield name, len(told), sum(one["wall_seconds"] for one in told), sum(one["cpu_seconds"] for one in told)


def write(directory: Path, study: Study) -> None:
    """Write the page and the tables; those of an earlier time are replaced. Raises OutputError."""
    data = directory / DATA
    data.mkdir(exist_ok=True)
    for section in study.every:
        for name, table in section.tables.items():
            _write_table(data, name, table)
    with atomic_write(directory / PAGE, force=True) as part:
        part.write_text(page(study), encoding="utf-8")


def _write_table(data: Path, name: str, table: pd.DataFrame) -> None:
    with atomic_write(data / f"{name}.csv", force=True) as part:
        table.to_csv(part, index=False)
    if find_spec("pyarrow") is not None:
        with atomic_write(data / f"{name}.parquet", force=True) as part:
            table.to_parquet(part, index=False)


def page(study: Study) -> str:
    """The page, which needs no other file."""
    failed = [f"failed: {one.title}: {study.failures[one.key]}" for one in study.missing if one.key in study.failures]
    missing = [one.title for one in study.missing if one.key not in study.failures]
    asked = sum(map(len, study.wanted.values()))
    return render(
        Page(
            title="The communication of transformer training",
            subtitle=f"The experiments of {PAPER}, repeated, with theory beside every figure.",
            tiles=[*_tiles(study, asked)],
            findings=[],
            warnings=[*failed, *([f"not done: {few(missing)}"] if missing else [])],
            facts=[*_facts(study)],
            lists=[],
            sections=[_section(number, one) for number, one in enumerate(study.every)],
            facts_title="What was run, and what it took",
        )
    )


def few(titles: Sequence[str]) -> str:
    """The first of many."""
    more = f" and {len(titles) - _FEW:,} more" if len(titles) > _FEW else ""
    return "; ".join(titles[:_FEW]) + more


def _tiles(study: Study, asked: int) -> Iterator[Tile]:
    done = asked - len(study.missing)
    yield Tile("experiments", format_count(done), f"of {format_count(asked)}", done < asked)
    yield Tile("figures", format_count(sum(len(one.figures) for one in study.every)), "with their tables in data/")
    for name, _, _, cpu in study.costs():
        yield Tile(f"{name}: CPU time", duration(cpu * 1e9), minutes(cpu))


def minutes(seconds: float) -> str:
    """90 -> "1.5 min"."""
    return f"{seconds / 60:.1f} min"


def _facts(study: Study) -> Iterator[tuple[str, str]]:
    yield "models", ", ".join(study.options.models)
    yield "page made", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    for name, done, wall, cpu in study.costs():
        yield (
            name,
            f"{format_plural(done, 'experiment')}: {minutes(cpu)} of CPU time; wall times, several at a time, add up "
            f"to {minutes(wall)}",
        )
    for name, places in study.done.items():
        for key, place in places.items():
            told = facts(place)
            cost = f"{told['cpu_seconds']:.0f} s of CPU time, {told['wall_seconds']:.0f} s; {told['ended']} UTC"
            yield str(told["title"]), f"{name}/{key}: {cost}"


def _section(number: int, section: Section) -> PageSection:
    title = f"Figure {section.number}: {section.title}" if section.number else section.title
    absent = f"Not done, so that this may be less than it seems: {few(section.missing)}." if section.missing else ""
    drawings: list[Drawing] = [drawing(name, figure) for name, figure in section.figures.items()]
    return PageSection(
        f"section-{number}",
        title,
        section.look_for,
        absent=absent,
        paragraphs=[_pieces(paragraph) for paragraph in section.text],
        drawings=drawings,
        tables=[(_title(name, table), _table(table)) for name, table in section.tables.items() if len(table)],
        commands=section.commands,
    )


_MARKED: Final = re.compile(r"`(?P<code>[^`]+)`|\*\*(?P<strong>[^*]+)\*\*")


def _pieces(paragraph: str) -> list[tuple[str, str]]:
    """What stands between backquotes is code, and between pairs of stars strong."""
    pieces, at = [], 0
    for found in _MARKED.finditer(paragraph):
        kind = found.lastgroup or ""
        pieces += [("", paragraph[at : found.start()]), (kind, found[kind])]
        at = found.end()
    return [(kind, piece) for kind, piece in (*pieces, ("", paragraph[at:])) if piece]


def _title(name: str, table: pd.DataFrame) -> str:
    more = f", the first {_MOST_ROWS} of {len(table):,} rows" if len(table) > _MOST_ROWS else ""
    return f"The numbers: {DATA}/{name}.csv{more}"


def _table(frame: pd.DataFrame) -> PageTable:
    columns = [str(name) for name in frame.columns]
    some = frame.head(_MOST_ROWS)
    rows = [
        [_cell(name, value) for name, value in zip(columns, row, strict=True)] for row in some.itertuples(index=False)
    ]
    kinds = [_kind(frame[name], [row[number] for row in rows]) for number, name in enumerate(columns)]
    return PageTable([_head(name) for name in columns], kinds, rows)


_UNITS: Final = re.compile(r"_(bytes|us|ns|ms|s)$")


def _head(name: str) -> str:
    return _UNITS.sub("", name).replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if not is_known(value):
        return "-"
    if isinstance(value, str):
        return value
    unit = _UNITS.search(name)
    if unit is None:
        return format_count(value) if float(value).is_integer() else f"{value:,.4g}"
    if unit[1] == "bytes":
        return format_bytes(value)
    return duration(float(value) * {"us": 1e3, "ns": 1, "ms": 1e6, "s": 1e9}[unit[1]])


def _kind(column: pd.Series[Any], cells: Sequence[str]) -> str:
    if column.dtype != object and str(column.dtype) != "str":
        return "number"
    return "text" if max(map(len, cells), default=0) > _LONG else "word"
