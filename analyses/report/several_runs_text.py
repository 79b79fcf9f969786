"""Text reports of runs side by side, and of runs by number of ranks. They render tables, and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.analyses.analysis_catalog import SECTIONS, TABLES
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.scaling.scaling_specs import SECTIONS as SCALING_SECTIONS
from commtrace.analyses.sections import Report, Section, Tables
from commtrace.analyses.side_by_side import FULL_RUN, TRAINING_STEP
from commtrace.analyses.what_if.predictions import SECTIONS as WHAT_IF_SECTIONS
from commtrace.formatting import format_bytes
from commtrace.reading.recorded_run import RecordedRun
from commtrace.text_tables import TextColumn, left_column, paragraph, text_table

from .spec_table import spec_table
from .terminal import heading, render_section


def warnings_of_runs(runs: Mapping[str, RecordedRun], tables: Mapping[str, Tables]) -> list[str]:
    """Return the warnings of several runs, each after the name of its run."""
    return [
        f"{name}: {text}"
        for name, run in runs.items()
        for section in SECTIONS
        for text in (*section.alarms(tables[name]), *section.warnings(run, tables[name]))
    ]


def render_side_by_side(
    tables: Mapping[str, pd.DataFrame], width: int, *, warnings: Sequence[str] = ()
) -> Iterator[RenderableType]:
    """Yield the report of the tables of `commtrace.analyses.side_by_side`, top to bottom, after the warnings."""
    for text in warnings:
        yield paragraph(text, width, first="! ", style="bold yellow")
    runs = tables["runs"]
    predicted = tables["runs_predicted"].set_index("run")["predicted_bytes"]
    yield heading("A training step of each run, mean per recorded rank")
    predictions = [(TextColumn("predicted"), [format_bytes(predicted[run]) for run in runs["run"]])]
    yield spec_table(TABLES["runs"], runs, width, extra_columns=predictions)
    for part, title in (
        (TRAINING_STEP, "Payload of a training step"),
        (FULL_RUN, "Payload of the whole run, start-up included"),
    ):
        yield Text()
        yield heading(f"{title}, per rank, by operation")
        yield _by_operation(tables["runs_by_operation"], [*runs["run"]], part, width)
    yield Text()
    for row in rows_of(runs):
        yield paragraph(f"{row.run}: {row.job or 'what was trained was not captured'}; {row.path}", width)


def _by_operation(table: pd.DataFrame, runs: list[str], part: str, width: int) -> RenderableType:
    """Return a row per run and a column per operation, the largest first; the last are left out if there is no room."""
    rows = table.loc[table["part"] == part]
    payloads = rows.pivot(index="run", columns="op", values="payload_bytes_per_rank").fillna(0).reindex(runs)
    sums = payloads.sum().sort_values(ascending=False, kind="stable")
    operations = [str(op) for op in sums.index[sums > 0]]
    if not operations:
        return paragraph("None of these runs has any.", width)
    columns = [
        left_column("run", shortenable=True),
        *(TextColumn(op, optional=number > 0) for number, op in enumerate(operations)),
    ]
    cells = [[run, *(format_bytes(payloads.loc[run, op]) for op in operations)] for run in runs]
    return text_table(columns, cells, width)


def render_scaling(tables: Tables, sentences: Sequence[str], width: int) -> Iterator[RenderableType]:
    """Yield the report of the tables of `commtrace.analyses.scaling`, top to bottom, and the findings."""
    yield from _render(SCALING_SECTIONS, tables, sentences, width)


def render_what_if(tables: Tables, sentences: Sequence[str], width: int) -> Iterator[RenderableType]:
    """Yield the predictions of `commtrace.analyses.what_if`, and what they assume."""
    yield from _render(
        [section for section in WHAT_IF_SECTIONS if section.tables[0].name in tables], tables, sentences, width
    )


def _render(
    sections: Sequence[Section], tables: Tables, sentences: Sequence[str], width: int
) -> Iterator[RenderableType]:
    _, *parts = (part for section in sections for part in render_section(section, Report(tables), width))
    yield from (*parts, Text())  # without the empty line before the first section
    yield from (paragraph(sentence, width, first="- ") for sentence in sentences)
