"""Sections of a page: a figure with the numbers below it, or a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pandas as pd

from commtrace.analyses.figures import Figure
from commtrace.analyses.table_specs import TABLES
from commtrace.analyses.table_specs.spec import formatted_rows

from .page import PageSection, PageTable, drawing

_VIEWS: Final = {"speedup": "speedup", "step_parts": "step_parts"} | dict.fromkeys(
    ("volume", "waterfall", "waterfall_by_role", "expected_and_measured", "message_sizes", "operation_volumes",
     "measured_and_predicted"), "page",
)  # fmt: skip
"""Figures with a table below them: the view of the table's description."""


def spec_table(name: str, table: pd.DataFrame, view: str = "page") -> PageTable:
    """Return a table as texts, by its description in `commtrace.analyses.table_specs`."""
    columns = TABLES[name].columns_of(view)
    return PageTable(
        [column.head for column in columns], [column.kind for column in columns], formatted_rows(columns, table)
    )


def figure_section(name: str, figure: Figure, tables: Mapping[str, pd.DataFrame]) -> PageSection:
    """Return the section of a figure, or the reason why it cannot be drawn."""
    table = tables.get(figure.table)
    if table is None or not figure.has_data(table):
        return PageSection(name, figure.title, "", absent=figure.absent + _why_not_predicted(figure.table, tables))
    drawn = drawing(name, figure.draw(table))
    rows, title = table, "The numbers"
    if name == "expected_and_measured":
        rows, title = _differences(table), "What differs, sums over ranks and training steps"
    shown = rows.head(TABLES[figure.table].max_rows)
    if len(shown) < len(rows):
        title += f", the first {len(shown)} of {len(rows):,}"
    has_table = name in _VIEWS and len(shown) > 0
    return PageSection(
        name,
        figure.title,
        figure.look_for,
        figure=drawn.figure,
        height=drawn.height,
        table=spec_table(figure.table, shown, _VIEWS[name]) if has_table else None,
        table_title=title,
    )


def _why_not_predicted(table: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return why a run is not compared with theory, if `table` is a table of that comparison."""
    theory = tables.get("theory")
    if theory is None or table not in ("waterfall", "reconciliation"):
        return ""
    return "".join(f" ({reason})" for reason in theory["not_predicted"].dropna().unique()[:3])


def _differences(reconciliation: pd.DataFrame) -> pd.DataFrame:
    """Return what differs in training steps by dimension, operation and cause, the largest difference first."""
    differing = ~reconciliation["cause"].isin(["", "expected"])
    rows = reconciliation.loc[(reconciliation["step"] >= 0) & differing]
    sums = {name: (name, "sum") for name in ("expected_calls", "measured_calls", "difference_bytes")}
    groups = rows.groupby(["role", "op", "cause"], as_index=False).agg(**sums, sites=("sites", "max"))
    return groups.sort_values("difference_bytes", key=lambda difference: difference.abs(), ascending=False)
