"""The study's HTML page, its tables as files, and how their values are formatted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from commtrace.analyses.report.html.rendering import Drawing, Page, PageSection, PageTable, Tile, drawing, render
from commtrace.formatting import format_bytes, format_count, format_duration, format_plural, format_share, is_known
from commtrace.output_files import atomic_write

from .claims import Claim, claim_table, claims_as_json
from .experiments import read_facts
from .parts import Experiment, Options, Section

if TYPE_CHECKING:
    import pandas as pd

PAGE: Final = "study.html"
DATA: Final = "data"
CLAIMS: Final = "claims"
PAPER: Final = (
    "Demystifying the Communication Characteristics for Distributed Transformer Models (Anthony et al., "
    "arXiv 2408.10197)"
)
_SHOWN_ROWS: Final = 40
_SHOWN_TITLES: Final = 6
_LONG: Final = 32
"""Cells with more characters may be wrapped."""


@dataclass(frozen=True)
class Study:
    """State of a study: options, planned and finished experiments, failures, and sections to show."""

    options: Options
    planned: Mapping[str, Sequence[Experiment]]
    """By part."""
    done: Mapping[str, Mapping[str, Path]]
    """Folders by part and key."""
    sections: Mapping[str, Sequence[Section]]
    """By part."""
    failures: Mapping[str, str]
    """Why an experiment failed, by its key."""

    @property
    def all_sections(self) -> list[Section]:
        """The sections of all parts."""
        return [section for sections in self.sections.values() for section in sections]

    @property
    def missing(self) -> list[Experiment]:
        """Experiments without a result."""
        return [item for part, planned in self.planned.items() for item in planned if item.key not in self.done[part]]

    def claims(self, part: str | None = None) -> list[Claim]:
        """Return the claims of one part, or of all."""
        sections = self.all_sections if part is None else self.sections.get(part, ())
        return [claim for section in sections for claim in section.claims]

    def costs(self) -> Iterator[tuple[str, int, float, float]]:
        """Yield each part's name, number of finished experiments, wall seconds and CPU seconds."""
        for name, folders in self.done.items():
            facts = [read_facts(folder) for folder in folders.values()]
            wall, cpu = (sum(fact[f"{clock}_seconds"] for fact in facts) for clock in ("wall", "cpu"))
            yield name, len(facts), wall, cpu


def write(directory: Path, study: Study) -> None:
    """Write the page and the tables, replacing existing ones. Raises OutputError."""
    data = directory / DATA
    data.mkdir(exist_ok=True)
    claims = study.claims()
    _write_table(data, CLAIMS, claim_table(claims))
    with atomic_write(data / f"{CLAIMS}.json", force=True) as part:
        part.write_text(claims_as_json(claims), encoding="utf-8")
    for section in study.all_sections:
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
    """Return the page, which is self-contained."""
    failed = [
        f"failed: {item.title}: {study.failures[item.key]}" for item in study.missing if item.key in study.failures
    ]
    not_done = [item.title for item in study.missing if item.key not in study.failures]
    warnings = dict.fromkeys(warning for section in study.all_sections for warning in section.warnings)
    verdicts = PageSection(
        "verdicts",
        "Verdicts",
        "What the paper states, what was measured, and what follows: confirmed, refined, contradicted or inconclusive.",
        tables=[(f"{DATA}/{CLAIMS}.csv, with exact numbers in {DATA}/{CLAIMS}.json", _claims(study.claims()))],
    )
    return render(
        Page(
            title="The communication of transformer training",
            subtitle=f"The experiments of {PAPER}, repeated and compared with theory.",
            tiles=[*_tiles(study)],
            warnings=[*failed, *([f"not done: {shorten(not_done)}"] if not_done else []), *warnings],
            sections=[
                verdicts,
                *(_section(number, section) for number, section in enumerate(study.all_sections)),
                PageSection("log", "Experiments and their costs", "", facts=[*_facts(study)]),
            ],
        )
    )


def shorten(titles: Sequence[str]) -> str:
    """Join the titles, or the first of many."""
    more = f" and {len(titles) - _SHOWN_TITLES:,} more" if len(titles) > _SHOWN_TITLES else ""
    return "; ".join(titles[:_SHOWN_TITLES]) + more


def _tiles(study: Study) -> Iterator[Tile]:
    total = sum(map(len, study.planned.values()))
    done = total - len(study.missing)
    yield Tile("experiments", format_count(done), f"of {format_count(total)}", done < total)
    figures = sum(len(section.figures) for section in study.all_sections)
    yield Tile("figures", format_count(figures), f"with their tables in {DATA}/")
    for name, _, _, cpu in study.costs():
        yield Tile(f"{name}: CPU time", format_duration(cpu * 1e9), format_minutes(cpu))


def format_minutes(seconds: float) -> str:
    """Format seconds as minutes: 90 -> "1.5 min"."""
    return f"{seconds / 60:.1f} min"


def _facts(study: Study) -> Iterator[tuple[str, str]]:
    yield "models", ", ".join(study.options.models)
    yield "page made", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    for name, done, wall, cpu in study.costs():
        times = f"{format_minutes(cpu)} of CPU time, {format_minutes(wall)} of wall time, summed"
        yield name, f"{format_plural(done, 'experiment')}: {times}"
    for name, folders in study.done.items():
        for key, folder in folders.items():
            facts = read_facts(folder)
            times = f"{facts['cpu_seconds']:.0f} s of CPU time, {facts['wall_seconds']:.0f} s; {facts['ended']} UTC"
            yield str(facts["title"]), f"{name}/{key}: {times}"


def _section(number: int, section: Section) -> PageSection:
    drawings: list[Drawing] = [drawing(name, figure) for name, figure in section.figures.items()]
    return PageSection(
        f"section-{number}",
        section.heading,
        section.caption,
        absent=f"Without results of: {shorten(section.missing)}." if section.missing else "",
        drawings=drawings,
        tables=[(_title(name, table), _table(table)) for name, table in section.tables.items() if len(table)],
        commands=section.commands,
    )


def _claims(claims: Sequence[Claim]) -> PageTable:
    rows = [(item.statement, item.place, item.measured, item.verdict, item.command) for item in claims]
    head = ["claim", "place", "measured", "verdict", "command"]
    return PageTable(head, ["text", "word", "text", "word", "text"], rows)


def _title(name: str, table: pd.DataFrame) -> str:
    more = f", the first {_SHOWN_ROWS} of {len(table):,} rows" if len(table) > _SHOWN_ROWS else ""
    return f"The numbers: {DATA}/{name}.csv{more}"


def _table(frame: pd.DataFrame) -> PageTable:
    columns, rows = format_table(frame.head(_SHOWN_ROWS))
    kinds = [_kind(frame[name], [row[number] for row in rows]) for number, name in enumerate(frame.columns)]
    return PageTable(columns, kinds, rows)


_UNITS: Final = re.compile(r"(?<!per)_(bytes|us|ns|ms|s|share)$")


def format_table(frame: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return head and rows as text. The suffix of a column's name is its unit."""
    columns = [str(name) for name in frame.columns]
    rows = [
        [_cell(name, value) for name, value in zip(columns, row, strict=True)] for row in frame.itertuples(index=False)
    ]
    return [_UNITS.sub("", name).replace("_", " ") for name in columns], rows


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
    if unit[1] == "share":
        return format_share(value)
    return format_duration(float(value) * {"us": 1e3, "ns": 1, "ms": 1e6, "s": 1e9}[unit[1]])


def _kind(column: pd.Series[Any], cells: Sequence[str]) -> str:
    if column.dtype != object and str(column.dtype) != "str":
        return "number"
    return "text" if max(map(len, cells), default=0) > _LONG else "word"
