"""Sections of reports: the tables and texts of a subject, as data that text and page render.

The module of a subject describes its tables, computes them and defines its section; `analysis_catalog.SECTIONS` lists
all sections. Without `blocks`, a section shows every table that has rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import pandas as pd

from commtrace.reading.recorded_run import RecordedRun
from commtrace.text_tables import TextColumn

from .fold_engine import AnyAnalysis
from .table_specs.equivalent_ranks import reduce_ranks
from .table_specs.spec import TableSpec

Tables: TypeAlias = Mapping[str, pd.DataFrame]

MAX_ROWS: Final = 40
"""Rows of a table that a report in text shows."""


@dataclass(frozen=True)
class Report:
    """What sections are made from.

    Attributes:
        tables: The tables, by name.
        run: The run; None in reports of several runs.
        sites: Maximum number of call sites; 0: all.
        max_rows: Maximum number of rows of other tables.
        per_rank: Whether to show single ranks of tables of many ranks, instead of classes of equivalent ranks.
        sections_chosen: Whether the user chose the sections.
    """

    tables: Tables
    run: RecordedRun | None = None
    sites: int = 10
    max_rows: int = MAX_ROWS
    per_rank: bool = False
    sections_chosen: bool = False

    @property
    def simulated(self) -> bool:
        """Whether it is of a dry run, which sends nothing."""
        return self.run is not None and self.run.simulated

    def rows(self, spec: TableSpec) -> pd.DataFrame:
        """Return the rows of a table; without `per_rank`, classes of equivalent ranks instead of many ranks."""
        table = self.tables[spec.name]
        return table if self.per_rank else reduce_ranks(spec, table)


@dataclass(frozen=True)
class Paragraph:
    """A text, with a heading above it if it has a title."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class ShownTable:
    """Rows of a table, in one of its views ("": that of the text or of the page).

    Text shows the counts in the column `bars`, if any, also as bars.
    """

    spec: TableSpec
    rows: pd.DataFrame
    title: str = ""
    bars: str = ""
    view: str = ""


@dataclass(frozen=True)
class ShownCells:
    """A table as strings, where the columns of its description do not suffice."""

    spec: TableSpec
    columns: Sequence[TextColumn]
    cells: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Listing:
    """A list of texts, with a heading above it if it has a title."""

    texts: Sequence[str]
    title: str = ""


@dataclass(frozen=True)
class NamedTexts:
    """Texts by name."""

    texts: Mapping[str, str]
    title: str = ""


Block: TypeAlias = Paragraph | ShownTable | ShownCells | Listing | NamedTexts


def _no_sentences(tables: Tables) -> Iterator[str]:
    return iter(())


def _no_warnings(run: RecordedRun, tables: Tables) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class Section:
    """A subject of the report: its tables, what computes them, and how they are shown.

    Attributes:
        name: Its name in `--sections`.
        title: Its heading.
        tables: Descriptions of its tables, in the order in which they are shown.
        analyses: Compute the tables.
        on_request: Compute further tables, and take as long as all other analyses together, because they match all
            calls of all ranks. Text has them only if the section is chosen.
        details: Tables that only figures use, with what computes them.
        option: Command-line option that is needed to compute the tables; "": none.
        blocks: Yields what is shown; nothing if the section does not apply. None: all tables that have rows.
        default: Whether text shows it unless sections are chosen. The report of a healthy run fits on two screens.
        view: View of its tables.
        look_for: What to look for in it, for the page.
        absent: Why nothing is shown, for the page.
        findings: Yields the most important results, as sentences.
        warnings: Yields what makes the data incomplete or unreliable.
        alarms: Yields what is wrong with the job, such as calls that do not end.
    """

    name: str
    title: str
    tables: tuple[TableSpec, ...] = ()
    analyses: tuple[AnyAnalysis, ...] = ()
    on_request: tuple[AnyAnalysis, ...] = ()
    details: tuple[tuple[TableSpec, AnyAnalysis], ...] = ()
    option: str = ""
    blocks: Callable[[Report], Iterator[Block]] | None = None
    default: bool = True
    view: str = ""
    look_for: str = ""
    absent: str = ""
    findings: Callable[[Tables], Iterator[str]] = _no_sentences
    warnings: Callable[[RecordedRun, Tables], Iterator[str]] = _no_warnings
    alarms: Callable[[Tables], Iterator[str]] = _no_sentences

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The descriptions of all tables, including those that only figures use."""
        return (*self.tables, *(spec for spec, _ in self.details))

    def shown(self, report: Report) -> list[Block]:
        """Return what a report shows of the section."""
        if self.option and any(spec.name not in report.tables for spec in self.tables):
            return []
        return [*(self.blocks(report) if self.blocks else _all_tables(self, report))]


def _all_tables(section: Section, report: Report) -> Iterator[Block]:
    for spec in section.tables:
        if spec.name in report.tables and len(rows := report.rows(spec)):
            shown = rows.head(report.max_rows)
            is_only_one = len(section.tables) == 1 and len(shown) == len(rows)
            title = "" if is_only_one else spec.title + first_of(len(shown), len(rows))
            yield ShownTable(spec, shown, title, view=section.view)


def first_of(shown: int, total: int, what: str = "the first") -> str:
    """Return the end of a title: ", the first 10 of 1,234"; "" if all rows are shown."""
    return f", {what} {shown:,} of {total:,}" if shown < total else ""
