"""The study's page, and its tables as files."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commtrace.analyses.report.html.page import Drawing, Page, Table, Tile, drawing, render
from commtrace.analyses.report.html.page import Section as PageSection
from commtrace.analyses.report.units import count, known, plural, size
from commtrace.analyses.report.units import time as duration
from commtrace.reading.output import whole_file

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
_LONG: Final = 32
"""Letters from which a word may be broken."""


@dataclass(frozen=True)
class Study:
    """A study as it stands: what was asked for, what is done, what failed, and what there is to see."""

    options: Options
    wanted: Mapping[str, Sequence[Experiment]]
    """By part."""
    done: Mapping[str, Mapping[str, Path]]
    sections: Sequence[Section]
    failures: Mapping[str, str]
    """Why an experiment failed, by its key."""

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
    for section in study.sections:
        for name, table in section.tables.items():
            _write_table(data, name, table)
    with whole_file(directory / PAGE, force=True) as part:
        part.write_text(page(study), encoding="utf-8")


def _write_table(data: Path, name: str, table: pd.DataFrame) -> None:
    with whole_file(data / f"{name}.csv", force=True) as part:
        table.to_csv(part, index=False)
    if find_spec("pyarrow") is not None:
        with whole_file(data / f"{name}.parquet", force=True) as part:
            table.to_parquet(part, index=False)


def page(study: Study) -> str:
    """The page, which needs no other file."""
    missing = [f"not done: {one.title}{_because(study.failures.get(one.key))}" for one in study.missing]
    asked = sum(map(len, study.wanted.values()))
    return render(
        Page(
            title="The communication of transformer training",
            subtitle=f"The experiments of {PAPER}, repeated, with theory beside every figure.",
            tiles=[*_tiles(study, asked)],
            findings=[],
            warnings=missing,
            facts=[*_facts(study)],
            lists=[],
            sections=[_section(number, one) for number, one in enumerate(study.sections)],
            facts_title="What was run, and what it took",
        )
    )


def _because(why: str | None) -> str:
    return f": {why}" if why else ""


def _tiles(study: Study, asked: int) -> Iterator[Tile]:
    done = asked - len(study.missing)
    yield Tile("experiments", count(done), f"of {count(asked)}", done < asked)
    yield Tile("figures", count(sum(len(one.figures) for one in study.sections)), "with their tables in data/")
    for name, _, wall, cpu in study.costs():
        yield Tile(f"{name}: CPU time", duration(cpu * 1e9), f"{_minutes(cpu)}; {_minutes(wall)} one after the other")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"


def _facts(study: Study) -> Iterator[tuple[str, str]]:
    yield "models", ", ".join(study.options.models)
    yield "page made", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    for name, done, wall, cpu in study.costs():
        yield name, f"{plural(done, 'experiment')}: {_minutes(cpu)} of CPU time; {_minutes(wall)} if run one by one"
    for name, places in study.done.items():
        for key, place in places.items():
            told = facts(place)
            cost = f"{told['cpu_seconds']:.0f} s of CPU time, {told['wall_seconds']:.0f} s; {told['ended']} UTC"
            yield str(told["title"]), f"{name}/{key}: {cost}"


def _section(number: int, section: Section) -> PageSection:
    title = f"Figure {section.number}: {section.title}" if section.number else section.title
    absent = (
        f"Missing, so that this may be less than it seems: {'; '.join(section.missing)}." if section.missing else ""
    )
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


def _pieces(paragraph: str) -> list[tuple[bool, str]]:
    """What stands between backquotes is code."""
    return [(bool(number % 2), piece) for number, piece in enumerate(paragraph.split("`")) if piece]


def _title(name: str, table: pd.DataFrame) -> str:
    more = f", the first {_MOST_ROWS} of {len(table):,} rows" if len(table) > _MOST_ROWS else ""
    return f"The numbers: {DATA}/{name}.csv{more}"


def _table(frame: pd.DataFrame) -> Table:
    columns = [str(name) for name in frame.columns]
    some = frame.head(_MOST_ROWS)
    rows = [
        [_cell(name, value) for name, value in zip(columns, row, strict=True)] for row in some.itertuples(index=False)
    ]
    kinds = [_kind(frame[name], [row[number] for row in rows]) for number, name in enumerate(columns)]
    return Table([_head(name) for name in columns], kinds, rows)


_UNITS: Final = re.compile(r"_(bytes|us|ns|ms|s)$")


def _head(name: str) -> str:
    return _UNITS.sub("", name).replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if not known(value):
        return "-"
    if isinstance(value, str):
        return value
    unit = _UNITS.search(name)
    if unit is None:
        return count(value) if float(value).is_integer() else f"{value:,.4g}"
    if unit[1] == "bytes":
        return size(value)
    return duration(float(value) * {"us": 1e3, "ns": 1, "ms": 1e6, "s": 1e9}[unit[1]])


def _kind(column: pd.Series[Any], cells: Sequence[str]) -> str:
    if column.dtype != object and str(column.dtype) != "str":
        return "number"
    return "text" if max(map(len, cells), default=0) > _LONG else "word"
