"""Several runs as text: what a training step of each communicates. Renders tables that exist, and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.analyses.comparison import STEP, WHOLE
from commtrace.analyses.engine import rows_of
from commtrace.formatting import format_bytes, format_count, format_small_share, is_known
from commtrace.text_tables import TextColumn, left_column, paragraph, text_table

from .terminal import heading


def render(tables: Mapping[str, pd.DataFrame], width: int, *, letters: bool = True) -> Iterator[RenderableType]:
    """The parts, top to bottom, no line longer than `width`. `tables`: those of `commtrace.analyses.comparison`."""
    dots = "…" if letters else "..."
    runs = tables["runs"]
    yield heading("A training step of each run, mean per rank seen")
    columns = [
        left_column("run", shortenable=True),
        TextColumn("ranks"),
        TextColumn("steps"),
        TextColumn("calls"),
        TextColumn("payload"),
        TextColumn("wire, at least"),
        TextColumn("predicted"),
        TextColumn("tracing cost", optional=True),
    ]
    predicted = tables["runs_predicted"].set_index("run")["predicted_bytes"]
    rows = [
        [
            str(row.run),
            _ranks(row.ranks_seen, row.world_size),
            format_count(row.steps),
            format_count(row.calls_per_rank),
            format_bytes(row.payload_bytes_per_rank),
            format_bytes(row.wire_bytes_per_rank),
            format_bytes(predicted[row.run]),
            format_small_share(row.tracing_share),
        ]
        for row in rows_of(runs)
    ]
    yield text_table(columns, rows, width, dots)
    for part, title in ((STEP, "Payload of a training step"), (WHOLE, "Payload of the whole run, start-up included")):
        yield Text()
        yield heading(f"{title}, per rank, by operation")
        yield _by_operation(tables["runs_by_operation"], [*runs["run"]], part, width, dots)
    yield Text()
    for row in rows_of(runs):
        yield paragraph(f"{row.run}: {row.job or 'what was trained was not captured'}; {row.path}", width)


def _ranks(seen: object, world: object) -> str:
    return f"{format_count(seen)} of {format_count(world)}" if is_known(world) else format_count(seen)


def _by_operation(table: pd.DataFrame, runs: list[str], part: str, width: int, dots: str) -> RenderableType:
    """A row per run, a column per operation, those that move most first; the last give way to the width."""
    some = table.loc[(table["part"] == part) & (table["payload_bytes_per_rank"] > 0)]
    operations = [
        str(op) for op in some.groupby("op")["payload_bytes_per_rank"].sum().sort_values(ascending=False).index
    ]
    if not operations:
        return paragraph("There is none in any of these runs.", width)
    told = {str(run) for run in table.loc[table["part"] == part, "run"]}
    cells = some.set_index(["run", "op"])["payload_bytes_per_rank"].to_dict()
    columns = [
        left_column("run", shortenable=True),
        *(TextColumn(op, optional=at > 0) for at, op in enumerate(operations)),
    ]
    rows = [
        [run, *(format_bytes(cells.get((run, op), 0.0 if run in told else None)) for op in operations)] for run in runs
    ]
    return text_table(columns, rows, width, dots)
