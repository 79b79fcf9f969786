"""Descriptions of all tables: title, rows, and for each column its head, unit, format and meaning.

`TABLES` describes every table of `commtrace report`, of runs side by side, of `commtrace scaling`, and those that
figures are drawn from. The terminal report, the HTML pages, the "columns" of the JSON documents, `Run.describe_table`
and the reference page of the documentation are made from it. A test compares it with the tables of real logs.

Definitions that hold for all tables are in the docstring of `commtrace.analyses`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from .report_specs import FIGURE_TABLES, NETWORK_TABLES, REPORT_TABLES
from .several_runs_specs import COMPARISON_TABLES, DIFFERENCE_TABLES, SCALING_TABLES
from .spec import ColumnSpec, TableSpec

__all__ = [
    "COMPARISON_TABLES", "DIFFERENCE_TABLES", "FIGURE_TABLES", "NETWORK_TABLES", "REPORT_TABLES", "SCALING_TABLES",
    "TABLES", "ColumnSpec", "TableSpec", "describe_columns",
]  # fmt: skip

TABLES: Final[Mapping[str, TableSpec]] = {
    spec.name: spec
    for specs in (REPORT_TABLES, FIGURE_TABLES, NETWORK_TABLES, COMPARISON_TABLES, DIFFERENCE_TABLES, SCALING_TABLES)
    for spec in specs
}
"""Every table by name."""


def describe_columns(names: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Return unit and meaning of each column of the named tables, as in the JSON documents."""
    return {
        name: {column.name: {"unit": column.unit, "meaning": column.meaning} for column in TABLES[name].columns}
        for name in names
    }
