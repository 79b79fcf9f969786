"""Descriptions of tables: title, rows, and for each column its head, unit, format and meaning.

`spec` has the types, `shared_columns` the columns that several tables share, and `equivalent_ranks` merges the rows of
many ranks. A table is described in the module that computes it; `analysis_catalog.TABLES` has all of them, and the
terminal report, the HTML pages, the "columns" of the JSON documents, `Run.describe_table` and the reference page of the
documentation are made from it. A test compares it with the tables of real logs.

Definitions that hold for all tables are in the docstring of `commtrace.analyses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .report_specs import REPORT_TABLES
from .several_runs_specs import DIFFERENCE_TABLES, SCALING_TABLES
from .spec import TableSpec
from .step_time_specs import STEP_TIME_FIGURE_TABLES

__all__ = ["DIFFERENCE_TABLES", "SCALING_TABLES", "TABLES"]

TABLES: Final[Mapping[str, TableSpec]] = {
    spec.name: spec
    for specs in (
        REPORT_TABLES, STEP_TIME_FIGURE_TABLES, DIFFERENCE_TABLES, SCALING_TABLES,
    )
    for spec in specs
}  # fmt: skip
"""Tables whose descriptions are here, by name."""
