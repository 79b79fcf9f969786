"""Descriptions of all tables: title, rows, and for each column its head, unit, format and meaning.

`TABLES` describes every table of `commtrace report`, of runs side by side, of `commtrace scaling`, and those that
figures are drawn from. The terminal report, the HTML pages, the "columns" of the JSON documents, `Run.describe_table`
and the reference page of the documentation (`to_markdown`) are made from it. A test compares it with the tables of
real logs.

Definitions that hold for all tables are in the docstring of `commtrace.analyses`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from .comparison_specs import COMPARISON_TABLES
from .report_specs import FIGURE_TABLES, NETWORK_TABLES, REPORT_TABLES
from .scaling_specs import SCALING_TABLES
from .spec import ColumnSpec, TableSpec

__all__ = ["TABLES", "ColumnSpec", "TableSpec", "describe_columns", "to_markdown"]

_SECTIONS: Final = (
    (
        "Tables of a report",
        "`commtrace report DIR --json`, and `commtrace.open(DIR).table(NAME)`. All of them are in every document; one "
        "that does not apply to a run has no rows.",
        REPORT_TABLES,
    ),
    (
        "Tables used only by figures",
        "`commtrace.open(DIR).table(NAME)`; not in the JSON document.",
        FIGURE_TABLES,
    ),
    ("Tables of a report with a network", "`commtrace report DIR --network NET --json`.", NETWORK_TABLES),
    (
        "Tables of runs side by side",
        "`commtrace report DIR DIR ... --json`, and `commtrace.analyses.comparison.compare`.",
        COMPARISON_TABLES,
    ),
    (
        "Tables of a scaling comparison",
        "`commtrace scaling DIR DIR ... --json`, and `commtrace.analyses.scaling.scaling_tables.scaling`.",
        SCALING_TABLES,
    ),
)

TABLES: Final[Mapping[str, TableSpec]] = {spec.name: spec for _, _, specs in _SECTIONS for spec in specs}
"""Every table by name."""


def describe_columns(names: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Return unit and meaning of each column of the named tables, as the JSON documents hold them."""
    return {
        name: {column.name: {"unit": column.unit, "meaning": column.meaning} for column in TABLES[name].columns}
        for name in names
    }


_WIDTH: Final = 100

_INTRODUCTION: Final = """\
Every table, by its name, with what its rows and columns are. `run.describe_table(NAME)` shows the
same in Python, and the JSON documents hold it as "columns".

- Counts and bytes are sums over the ranks that left a log, unless a column says "per rank".
- Every recorded call counts, also one that failed or did not end; the table `states` counts them.
- A missing value means "not known", never zero: `null` in JSON, "-" in text.
- Text and pages show the columns under short heads, in units that suit; JSON and pandas hold exact
  numbers.
"""


def to_markdown() -> str:
    """Return the reference page of all tables below its title, in Markdown."""
    return "\n".join(_markdown())


def _markdown() -> Iterator[str]:
    yield _INTRODUCTION
    for title, about, specs in _SECTIONS:
        yield from (f"## {title}", "", textwrap.fill(about, _WIDTH, break_on_hyphens=False), "")
        for spec in specs:
            text = textwrap.fill(f"{spec.title}. {spec.rows}", _WIDTH, break_on_hyphens=False)
            yield from (f"### `{spec.name}`", "", text, "")
            yield from ("| column | unit | meaning |", "| --- | --- | --- |")
            yield from (f"| `{column.name}` | {column.unit} | {column.meaning} |" for column in spec.columns)
            yield ""
