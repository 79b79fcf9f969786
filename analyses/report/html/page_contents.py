"""Pages of one run, of runs side by side, by number of ranks, and of predictions: sections of figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeGuard

import pandas as pd

from commtrace.analyses import figures
from commtrace.analyses.analysis_catalog import FINDINGS, SECTIONS, TABLES
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.job_summary import summarize_job
from commtrace.analyses.scaling.scaling_specs import SECTIONS as SCALING_SECTIONS
from commtrace.analyses.sections import (
    Block,
    Listing,
    NamedTexts,
    Paragraph,
    Report,
    Section,
    ShownCells,
    ShownTable,
    Tables,
    first_of,
)
from commtrace.analyses.side_by_side import RUNS
from commtrace.analyses.steps import ALL
from commtrace.analyses.table_specs.equivalent_ranks import text_rows
from commtrace.analyses.table_specs.spec import TableSpec
from commtrace.analyses.tracing_cost import cost_per_call
from commtrace.analyses.what_if.predictions import SECTIONS as WHAT_IF_SECTIONS
from commtrace.formatting import format_bytes, format_count, format_plural, format_share, format_small_share, is_known
from commtrace.reading.recorded_run import RecordedRun
from commtrace.run import Run

from .rendering import Page, PageSection, PageTable, Tile, drawing, render

MAX_SITES: Final = 40
"""Call sites that the page shows by default."""

MAX_ROWS: Final = 60
"""Rows of any other table that the page shows."""


def page_of_run(
    name: str, run: RecordedRun, tables: Tables, *, sites: int = MAX_SITES, per_rank: bool = False, state: str = ""
) -> str:
    """Return the page of one run.

    Args:
        name: Title of the page.
        run: The run.
        tables: Its tables, including those that only figures use.
        sites: Maximum number of call sites; 0: all.
        per_rank: Show the first rows of tables of many ranks, instead of classes of equivalent ranks.
        state: A line on the state of the page, as of a run that goes on; "": none.
    """
    report = Report(tables, run, sites, MAX_ROWS, per_rank)
    alarms = [text for section in SECTIONS for text in section.alarms(tables)]
    warnings = [text for section in SECTIONS for text in section.warnings(run, tables)]
    contents = {
        section.name: [*_page_sections(section, report, figures.FIGURES)]
        for section in SECTIONS
        if section is not FINDINGS
    }
    return render(
        Page(
            title=name,
            subtitle=summarize_job(run) or "what was trained was not captured",
            state=state,
            tiles=[*_tiles(tables)],
            findings=[text for section in SECTIONS for text in section.findings(tables)],
            warnings=[*alarms, *warnings],
            sections=[page_section for shown in contents.values() for page_section in shown],
            anchors={name: (shown[0].name, shown[0].title) for name, shown in contents.items() if shown},
        )
    )


def _page_sections(
    section: Section, report: Report, all_figures: Mapping[str, figures.Figure]
) -> Iterator[PageSection]:
    """Yield the figures of a section, each with its heading; the first has the texts and tables of the section."""
    drawn = {
        name: figure
        for name, figure in all_figures.items()
        if figure.table in _names(section) and section.view in ("", figure.view)
    }
    # A figure without data is left out: an empty card says nothing.
    drawn = {name: figure for name, figure in drawn.items() if _has_data(figure, report.tables)}
    tables = {figure.table for figure in drawn.values() if figure.view}
    blocks = [block for block in section.shown(report) if not (_is_table(block) and block.spec.name in tables)]
    if not drawn:
        if blocks or section.absent:
            absent = "" if blocks else section.absent
            yield _with_blocks(PageSection(section.name, section.title, section.look_for, absent=absent), blocks)
        return
    first, *others = (_figure_section(name, figure, report.tables) for name, figure in drawn.items())
    yield _with_blocks(first, blocks)
    yield from others


def _names(section: Section) -> set[str]:
    return {spec.name for spec in section.specs}


def _is_table(block: Block) -> TypeGuard[ShownTable | ShownCells]:
    return isinstance(block, ShownTable | ShownCells)


def _with_blocks(section: PageSection, blocks: Sequence[Block]) -> PageSection:
    """Return a section of the page with further contents. Its only table is not folded."""
    tables = [(block.title or block.spec.title, _page_table(block)) for block in blocks if _is_table(block)]
    notes = [": ".join(filter(None, (block.title, block.text))) for block in blocks if isinstance(block, Paragraph)]
    if len(tables) == 1 and not section.tables and not section.drawings:
        tables = [("", tables[0][1])]
        titles = (block.title for block in blocks if _is_table(block))
        notes = [f"{title}." for title in titles if title not in ("", section.title)] + notes
    return replace(
        section,
        notes=[*section.notes, *notes],
        tables=[*section.tables, *tables],
        facts=[fact for block in blocks if isinstance(block, NamedTexts) for fact in block.texts.items()],
        lists=[(block.title, block.texts) for block in blocks if isinstance(block, Listing)],
    )


def _page_table(block: ShownTable | ShownCells) -> PageTable:
    if isinstance(block, ShownTable):
        return _spec_table(block.spec, block.rows, block.view or "page")
    kinds = ["number" if column.number else "text" for column in block.columns]
    return PageTable([column.head for column in block.columns], kinds, block.cells)


def _tiles(tables: Tables) -> Iterator[Tile]:
    """Yield the key numbers of a run."""
    coverage = tables["coverage"].iloc[0]
    seen, world_size = int(coverage["ranks_seen"]), coverage["world_size"]
    missing = bool(is_known(world_size)) and seen < int(world_size)
    job = f"of {format_count(world_size)}" if is_known(world_size) else "of an unknown number"
    hosts = f", on {format_plural(int(coverage['hosts']), 'host')}" if is_known(coverage["hosts"]) else ""
    yield Tile("recorded ranks", format_count(seen), f"{job}{hosts}", missing)
    records, calls = coverage["records"], coverage["calls"]
    # Of a process that runs, records may be newer than its counters.
    counted = bool(is_known(calls) and calls and records <= calls)
    note = f"{format_share(records / calls)} of those counted" if counted else ""
    yield Tile("calls recorded", format_count(records), note, counted and records < calls)
    steady = tables["steady_step"]
    for step in rows_of(steady.loc[steady["op"] == ALL]):
        variation = f"{step.differing_steps:,} differ from the median" if step.differing_steps else "all identical"
        yield Tile("training steps", format_count(step.steps), variation)
        calls = f"per rank, in {format_count(step.calls_per_rank)} calls"
        yield Tile("payload of a step", format_bytes(step.payload_bytes_per_rank), calls)
        yield Tile("sent in a step", format_bytes(step.wire_bytes_per_rank), "per rank (min)")
    cost = tables["tracing_cost"].dropna(subset=["share"])
    if coverage["simulated"]:
        yield Tile("times", "none", "simulated: nothing was sent")
    elif len(cost):
        note = f"of the run's time, in calls; {cost_per_call(cost)}"
        yield Tile("tracing cost", format_small_share(cost["share"].mean()), note)
    else:
        yield Tile("tracing cost", "not known")


def page_of_runs(names: Sequence[str], tables: Tables, warnings: Sequence[str]) -> str:
    """Return the page of runs side by side, from their names and the tables of `commtrace.analyses.side_by_side`."""
    text = (
        "A training step of each run, per rank. Wire bytes are the fewest bytes that a rank can send for the payload."
    )
    overview = PageSection("runs", "The runs", text, tables=[("", _spec_table(RUNS, tables["runs"], "page"))])
    shown = {name: figure for name, figure in figures.COMPARISONS.items() if _has_data(figure, tables)}
    sections = [_figure_section(name, figure, tables) for name, figure in shown.items()]
    facts = [(str(row.run), f"{row.path}, run {row.id}") for row in rows_of(tables["runs"])]
    return render(
        Page(
            title=", ".join(names),
            subtitle=f"{format_plural(len(names), 'run')} side by side",
            warnings=warnings,
            sections=[overview, *sections, PageSection("log", "The logs", "", facts=facts)],
        )
    )


def page_of_scaling(runs: Mapping[str, Run], tables: Tables, sentences: Sequence[str]) -> str:
    """Return the page of runs by number of ranks, from the tables of `commtrace.analyses.scaling` and the findings."""
    ranks, report = tables["scaling"]["ranks"], Report(tables, max_rows=MAX_ROWS)
    sections = [part for section in SCALING_SECTIONS for part in _page_sections(section, report, figures.SCALING)]
    facts = [(name, f"{run.log.path}, run {run.id}") for name, run in runs.items()]
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"scaling from {ranks.min():,} to {ranks.max():,} ranks",
            findings=sentences,
            sections=[*sections, PageSection("log", "The logs", "", facts=facts)],
        )
    )


def page_of_what_if(runs: Mapping[str, Run], tables: Tables, sentences: Sequence[str]) -> str:
    """Return the page of predictions, from the tables of `commtrace.analyses.what_if` and what they assume."""
    report = Report(tables, max_rows=MAX_ROWS)
    shown = [section for section in WHAT_IF_SECTIONS if section.tables[0].name in tables]
    sections = [part for section in shown for part in _page_sections(section, report, figures.WHAT_IF)]
    facts = [(name, f"{run.log.path}, run {run.id}") for name, run in runs.items()]
    return render(
        Page(
            title=", ".join(runs),
            subtitle="predicted steps",
            findings=sentences,
            sections=[*sections, PageSection("log", "The logs", "", facts=facts)],
        )
    )


def _spec_table(spec: TableSpec, table: pd.DataFrame, view: str) -> PageTable:
    """Return a table of strings, by its description."""
    columns, rows = text_rows(spec, view, table)
    heads, kinds = [column.head for column in columns], [column.kind for column in columns]
    return PageTable(heads, kinds, [[_indented(cell) for cell in row] for row in rows])


def _indented(text: str) -> str:
    """Return a text with its leading spaces as no-break spaces, which browsers keep."""
    return text if not text.startswith(" ") else "\N{NO-BREAK SPACE}" * (len(text) - len(text.lstrip())) + text.lstrip()


def _has_data(figure: figures.Figure, tables: Tables) -> bool:
    """Return whether a figure can be drawn."""
    return figure.table in tables and figure.has_data(tables[figure.table])


def _figure_section(name: str, figure: figures.Figure, tables: Tables) -> PageSection:
    """Return the section of a figure."""
    table = tables[figure.table]
    rows = figure.numbers(table)
    shown = rows.head(MAX_ROWS)
    title = figure.numbers_title + first_of(len(shown), len(rows))
    return PageSection(
        name,
        figure.title,
        figure.look_for,
        drawings=[replace(drawing(name, figure.draw(table)), title="")],
        tables=[(title, _spec_table(TABLES[figure.table], shown, figure.view))] if figure.view and len(shown) else [],
    )
