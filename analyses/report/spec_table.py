"""Data frames as text tables, by their descriptions."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from rich.table import Table

from commtrace.analyses.table_specs.equivalent_ranks import text_rows
from commtrace.analyses.table_specs.spec import TableSpec
from commtrace.text_tables import TextColumn, text_table


def spec_table(
    spec: TableSpec,
    table: pd.DataFrame,
    width: int,
    *,
    view: str = "terminal",
    extra_columns: Sequence[tuple[TextColumn, Sequence[str]]] = (),
) -> Table:
    """Lay out a table, possibly reduced to classes of equivalent ranks, as a view of its description shows it.

    `extra_columns` have a cell per row, and go to the right, before columns that may be left out.
    """
    shown, rows = text_rows(spec, view, table)
    columns = [
        TextColumn(column.head, column.kind == "number", column.shortenable, column.optional) for column in shown
    ]
    end = len(columns)
    while columns[end - 1].optional:
        end -= 1
    for column, cells in reversed(extra_columns):
        columns.insert(end, column)
        for row, cell in zip(rows, cells, strict=True):
            row.insert(end, cell)
    return text_table(columns, rows, width)
