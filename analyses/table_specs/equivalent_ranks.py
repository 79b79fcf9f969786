"""Tables of many ranks, reduced: classes of equivalent ranks, outliers by name, distributions in place of rows.

A table with a row per rank, of more than MAX_SINGLE ranks, becomes a table whose size does not grow with them. The
column `TableSpec.merge_by` lists the ranks that a row stands for, as text, and the column "alike" counts them. Ranks
are equivalent if their texts, counts and sizes are equal, except for measured values and for values that differ from
rank to rank. Where values of equivalent ranks differ, the cell is a `Distribution` or `Different`. Ranks with an
unusual value have their own row. The same holds for hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from commtrace.analyses.grouping import group_rows, sort_rows
from commtrace.analyses.robust_deviation import NORMAL
from commtrace.formatting import MAX_SINGLE, format_count, is_known
from commtrace.rank_ranges import parse_ranks, shorten_names, shorten_rank_list

from .spec import ColumnSpec, TableSpec, formatted_rows

MAX_CLASSES: Final = 16
"""Maximum number of classes of ranks. Columns that would lead to more do not separate classes."""

MAX_OUTLIERS: Final = 8

ALIKE: Final = "alike"
ALIKE_MEANING: Final = {"unit": "count", "meaning": "Number of ranks, or hosts, that the row stands for."}
"""The additional column of a reduced table, and its description in JSON."""

_MIN_DEVIATIONS: Final = 5 * NORMAL
"""Median absolute deviations that make a value an outlier: 5 standard deviations of a normal distribution."""
_MIN_RATIO: Final = 0.2
"""Deviation from the median, as a share of it, that makes a value an outlier."""
_MIN_OF_WORST: Final = 0.1
"""Share of the largest deviation below which values get no row of their own: the distribution has them."""

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Distribution:
    """The values of equivalent ranks in one column, where they differ.

    Attributes:
        known: Rows whose value is known.
        lowest: The lowest value.
        lowest_at: The ranks (hosts) that have it, as text.
        median: The median; the lower one of an even number of values.
        highest: The highest value.
        highest_at: The ranks (hosts) that have it.
    """

    known: int
    lowest: Any
    lowest_at: str
    median: Any
    highest: Any
    highest_at: str


@dataclass(frozen=True)
class Different:
    """Number of different strings or identifiers that equivalent ranks have in one column."""

    different: int


def reduce_ranks(spec: TableSpec, table: pd.DataFrame) -> pd.DataFrame:
    """Reduce a table of more than MAX_SINGLE ranks, or hosts.

    Returns:
        A row per class of equivalent ranks and per outlier, in the order of their first rows, with the column "alike"
        after `spec.merge_by`. The table's own rows if it has no such column, few ranks, or no equivalent rows. Lists of
        many ranks are shortened.
    """
    shortened = {
        column.name: table[column.name].map(shorten_rank_list, na_action="ignore")
        for column in spec.columns
        if column.ranks
    }
    rows = table.assign(**shortened) if shortened else table
    if not spec.merge_by:
        return rows
    names = table[spec.merge_by]
    lists = spec.column(spec.merge_by).ranks
    if len(_members(names, lists=lists)) <= MAX_SINGLE:
        return rows
    codes = {column.name: _codes(table[column.name]) for column in spec.columns}
    numbers = _classes(spec, table, codes, MAX_CLASSES * int(names.value_counts().max())).copy()
    outliers = _outliers(spec, table, codes, numbers)
    numbers[outliers] = numbers.max() + 1 + group_rows([numbers[outliers], codes[spec.merge_by][outliers]])[1]
    numbers = pd.factorize(numbers)[0]
    if numbers.max() + 1 == len(table):
        return rows
    order, begins = sort_rows([numbers])
    parts = np.split(order, begins[1:])
    first = table.iloc[order[begins]].reset_index(drop=True)
    columns: dict[str, Any] = {}
    for column in spec.columns:
        values = table[column.name]
        if column.name == spec.merge_by:
            members = _shown_members(values, codes[column.name], parts, lists=lists)
            columns[column.name], columns[ALIKE] = ([*cells] for cells in zip(*members, strict=True))
        elif column.ranks:
            columns[column.name] = [text for text, _ in _shown_members(values, codes[column.name], parts, lists=True)]
        else:
            differs = _differs(codes[column.name][order], begins)
            differing = {at: parts[at] for at in np.flatnonzero(differs).tolist()}
            columns[column.name] = _cells(column, values, names, differing, first[column.name])
    return pd.DataFrame(columns)


def _members(names: pd.Series[Any], *, lists: bool) -> list[Any]:
    """Return the distinct ranks or hosts in a column, ascending. With `lists`, its cells are lists of ranks as text."""
    distinct = names.dropna().unique().tolist()
    return sorted({rank for text in distinct for rank in parse_ranks(text)} if lists else distinct)


def _shown_members(
    names: pd.Series[Any], codes: _Array, parts: Sequence[_Array], *, lists: bool
) -> Iterator[tuple[str, int]]:
    """Yield the list and number of the ranks, or hosts, of each part of a table, given the codes of their column."""
    known: dict[bytes, tuple[str, int]] = {}  # the parts of many steps have the same ranks
    for part in parts:
        if (content := codes[part].tobytes()) not in known:
            members = _members(names.iloc[part], lists=lists)
            known[content] = shorten_names(members), len(members)
        yield known[content]


def _codes(values: pd.Series[Any]) -> _Array:
    """Return integers that are equal where values are. Integers are their own: they need no hashing."""
    is_integer = isinstance(values.dtype, np.dtype) and values.dtype.kind in "iu"
    return values.to_numpy() if is_integer else pd.factorize(values)[0]


def _classes(spec: TableSpec, table: pd.DataFrame, codes: Mapping[str, _Array], max_classes: int) -> _Array:
    """Return each row's class number. Columns separate classes, texts first, unless that makes more than `max_classes`.

    Measured values separate classes only by whether they are known.
    """
    numbers = np.zeros(len(table), np.int64)
    columns = [column for column in spec.columns if column.name != spec.merge_by and not column.ranks]
    for column in sorted(columns, key=lambda column: (column.is_measured, column.kind == "number")):
        values = table[column.name].isna().to_numpy() if column.is_measured else codes[column.name]
        first, finer = group_rows([numbers, values])
        numbers = finer if len(first) <= max_classes else numbers
    return numbers


def _differs(codes: _Array, begins: _Array) -> _Array:
    """Return whether the values of each class differ, bool, given codes sorted by class and where each class begins."""
    return np.asarray(np.maximum.reduceat(codes, begins) != np.minimum.reduceat(codes, begins))


def _is_quantity(column: ColumnSpec) -> bool:
    return column.kind == "number" and column.unit not in ("", "boolean")


def _outliers(spec: TableSpec, table: pd.DataFrame, codes: Mapping[str, _Array], classes: _Array) -> _Array:
    """Return which rows are outliers of their class in a quantity, bool; at most those of MAX_OUTLIERS ranks."""
    scores = np.zeros(len(table))
    order, begins = sort_rows([classes])
    for column in filter(_is_quantity, spec.columns):
        if not _differs(codes[column.name][order], begins).any():
            continue
        values = pd.to_numeric(table[column.name], errors="coerce").astype("Float64").to_numpy(float, na_value=np.nan)
        median = _medians(values, classes)
        deviation = np.abs(values - median)
        usual = np.maximum(_MIN_DEVIATIONS * _medians(deviation, classes), _MIN_RATIO * np.abs(median))
        # If most values are 0, compare with the mean deviation.
        usual = np.where(usual > 0, usual, _MIN_RATIO * max(np.nan_to_num(deviation).mean(), np.finfo(float).tiny))
        scores = np.fmax(scores, deviation / usual)
    if not scores.any():
        return scores > 0
    threshold = max(1.0, _MIN_OF_WORST * scores.max())
    worst = pd.Series(scores).groupby(table[spec.merge_by].to_numpy()).max().nlargest(MAX_OUTLIERS).index
    outliers: _Array = table[spec.merge_by].isin(worst).to_numpy() & (scores > threshold)
    return outliers


def _medians(values: _Array, classes: _Array) -> _Array:
    medians: _Array = pd.Series(values).groupby(classes).transform("median").to_numpy()
    return medians


def _cells(
    column: ColumnSpec,
    values: pd.Series[Any],
    names: pd.Series[Any],
    parts: Mapping[int, _Array],
    first: pd.Series[Any],
) -> pd.Series[Any]:
    """Return the cells of a column: those of the first rows of classes, except in classes whose values differ.

    Args:
        column: The column.
        values: Its values in the table.
        names: The ranks, or hosts, of the table.
        parts: Number of each class whose values differ -> its rows.
        first: The values of the first row of each class.
    """
    if not parts:
        return first
    cells = first.astype(object)
    for at, part in parts.items():
        if _is_quantity(column):
            cells[at] = _distribution(values.iloc[part], names.iloc[part])
        else:
            cells[at] = Different(len(pd.unique(values.iloc[part])))
    return cells


def _distribution(values: pd.Series[Any], names: pd.Series[Any]) -> Distribution:
    known = values.notna().to_numpy()
    numbers = pd.to_numeric(values[known]).to_numpy()
    ordered = np.sort(numbers)
    lowest, median, highest = (ordered[at] for at in (0, (len(ordered) - 1) // 2, -1))
    at = [shorten_names(sorted(names[known][numbers == extreme].unique().tolist())) for extreme in (lowest, highest)]
    return Distribution(len(ordered), lowest, at[0], median, highest, at[1])


def text_rows(spec: TableSpec, view: str, table: pd.DataFrame) -> tuple[tuple[ColumnSpec, ...], list[list[str]]]:
    """Return the columns of a table that a view shows, and its cells as strings.

    A row of a reduced table with distributions becomes several lines, named in the column `spec.merge_by`.
    """
    columns = spec.columns_of(view)
    if ALIKE not in table:
        return columns, formatted_rows(columns, table)
    columns = tuple(
        replace(column, kind="text") if column.name == spec.merge_by else replace(column, optional=place > 1)
        for place, column in enumerate(columns)
    )
    rows = table[[column.name for column in columns] + [ALIKE]].itertuples(index=False, name=None)
    lines = [line for *cells, ranks in rows for line in _lines(spec, columns, cells, ranks)]
    return columns, lines


_MAX_NAMED: Final = 2
"""Ranges of ranks, or hosts, that a text has room for."""

_STATISTICS: Final = (
    ("  lowest", "lowest", False),
    ("    on {}", "lowest_at", True),
    ("  median", "median", False),
    ("  highest", "highest", False),
    ("    on {}", "highest_at", True),
)
"""Lines of a row with distributions: name, attribute of `Distribution`, and whether that is a list of names."""


def _lines(spec: TableSpec, columns: Sequence[ColumnSpec], cells: Sequence[Any], ranks: int) -> Iterator[list[str]]:
    texts = []
    for column, cell in zip(columns, cells, strict=True):
        if column.name == spec.merge_by:
            noun = "hosts" if column.name == "host" else "ranks"
            texts.append(f"{_brief(cell)} ({ranks:,} {noun})" if ranks > 1 else str(cell))
        elif isinstance(cell, Different):
            texts.append(f"{cell.different:,} different")
        else:
            texts.append("" if isinstance(cell, Distribution) else column.format(cell))
    yield texts
    distributions = [cell if isinstance(cell, Distribution) else None for cell in cells]
    if not any(distributions):
        return
    head = spec.column(spec.merge_by).head
    for name, attribute, is_name in _STATISTICS:
        values = [getattr(cell, attribute, None) for cell in distributions]
        line = [
            "" if not is_known(value) else _brief(str(value)) if is_name else column.format(value)
            for column, value in zip(columns, values, strict=True)
        ]
        yield [
            name.format(head) if column.name == spec.merge_by else text
            for column, text in zip(columns, line, strict=True)
        ]
    if any(cell.known < ranks for cell in distributions if cell):
        known = [format_count(cell.known) if cell else "" for cell in distributions]
        yield ["  known" if column.name == spec.merge_by else text for column, text in zip(columns, known, strict=True)]


def _brief(names: str) -> str:
    """Return the first ranges, or names, of a list."""
    items = names.split(",")
    return names if len(items) <= _MAX_NAMED else f"{','.join(items[:_MAX_NAMED])},..."
