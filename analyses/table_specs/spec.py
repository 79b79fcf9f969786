"""Table and column descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pandas as pd

from commtrace.formatting import format_bytes, format_count, format_duration, format_share, is_known


@dataclass(frozen=True)
class ColumnSpec:
    """Description of a column of a table.

    Attributes:
        name: Its name in the table, and in JSON.
        head: Heading of the column in reports.
        unit: What its numbers count: "bytes", "ns", "fraction" (0 to 1) ...; "" for texts.
        meaning: A sentence.
        format: Returns a value as text; missing values become "-".
        kind: "number" is aligned right, "word" is not broken into lines, "text" may be.
        optional: Whether a terminal that is too narrow may leave it out.
        shortenable: Whether a terminal that is too narrow may shorten its texts.
        ranks: Whether its texts are lists of ranks, such as "0-3,8".
        measured: Whether its counts are measured, and so differ among ranks that make the same calls.
    """

    name: str
    head: str
    unit: str
    meaning: str
    format: Callable[[Any], str]
    kind: Literal["number", "word", "text"] = "number"
    optional: bool = False
    shortenable: bool = False
    ranks: bool = False
    measured: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether its values differ among ranks that make the same calls: times, rates and measured counts."""
        return self.measured or self.unit not in ("", "count", "bytes", "boolean")


@dataclass(frozen=True)
class TableSpec:
    """Description of a table.

    Attributes:
        name: Its name in `Run.table`, and in JSON.
        title: A heading.
        rows: What a row is, and the order of the rows.
        columns: All columns, in order.
        views: Names of the columns that a view shows, separated by spaces, by the name of the view: "terminal", "page",
            or that of a figure. Other views show all columns.
        merge_by: Column of ranks, or hosts, whose rows are merged if there are many (`equivalent_ranks`); "": never.
    """

    name: str
    title: str
    rows: str
    columns: tuple[ColumnSpec, ...]
    views: Mapping[str, str] = field(default_factory=dict)
    merge_by: str = ""

    @property
    def column_names(self) -> list[str]:
        """The names of all columns, in order."""
        return [column.name for column in self.columns]

    def column(self, name: str) -> ColumnSpec:
        """Return the column with this name."""
        return next(column for column in self.columns if column.name == name)

    def columns_of(self, view: str) -> tuple[ColumnSpec, ...]:
        """Return the columns that a view shows, in its order."""
        by_name = {column.name: column for column in self.columns}
        return tuple(by_name[name] for name in (self.views[view].split() if view in self.views else by_name))


def formatted_rows(columns: Sequence[ColumnSpec], table: pd.DataFrame) -> list[list[str]]:
    """Return the cells of these columns of a table as strings, row by row."""
    rows = table[[column.name for column in columns]].itertuples(index=False, name=None)
    return [[column.format(value) for column, value in zip(columns, row, strict=True)] for row in rows]


def text_of(value: Any) -> str:
    """Return a text as it is, "-" if it is missing."""
    return str(value) if is_known(value) else "-"


def column(
    unit: str, formatter: Callable[[Any], str], name: str, head: str, meaning: str, **options: Any
) -> ColumnSpec:
    """Return a column. Its head is its name in words if `head` is ""; `options` are the other attributes."""
    return ColumnSpec(name, head or name.replace("_", " "), unit, meaning, formatter, **options)


word_column = partial(column, "", text_of, kind="word")
text_column = partial(column, "", text_of, kind="text")
count = partial(column, "count", format_count)
bytes_column = partial(column, "bytes", format_bytes)
duration = partial(column, "ns", format_duration)
share = partial(column, "fraction", format_share)
ratio = partial(column, "ratio", lambda value: f"{value:.2f}" if is_known(value) else "-")
flag = partial(column, "boolean", text_of, kind="word")
