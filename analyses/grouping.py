"""Operations on integer columns that analyses share: groups of equal rows, and sums by group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

Array: TypeAlias = npt.NDArray[Any]

_MAX_DENSE_CODES: Final = 1 << 22

_MAX_KEY: Final = 1 << 62

_MIN_TABLE: Final = 1 << 16
"""Number of keys up to which a table of all of them is made for any number of rows."""
_ROWS_OF_TABLE: Final = 8
"""Keys of such a table for each row, at most."""


def group_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Group rows by columns of integers.

    Args:
        columns: Keys, each of shape (n,).

    Returns:
        The index of one row of each group, shape (groups,), in the order in which groups appear, and the number of
        each row's group, shape (n,).
    """
    numbers, groups = _dense_codes(*_joint_keys(columns))
    first = np.zeros(groups, np.int64)
    first[numbers] = np.arange(len(numbers))
    return first, numbers


def sort_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Sort rows by columns of integers, each of shape (n,).

    Returns:
        The indices of the rows in their order, shape (n,), and where in it each group of equal rows begins.
    """
    joint, _ = _joint_keys(columns, ordered=True)
    order = np.argsort(joint, kind="stable")
    return order, np.flatnonzero(np.diff(joint[order], prepend=-1))


def positions_by_value(values: Array) -> dict[int, Array]:
    """Return the indices of each value in an integer array of shape (n,), both in ascending order."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(values)])
    return dict(zip(ordered[firsts].tolist(), np.split(order, firsts[1:]), strict=False))


def _joint_keys(columns: Sequence[Array], *, ordered: bool = False) -> tuple[Array, int]:
    """Return a key from 0 per row, equal for equal rows, and an upper bound on the number of keys.

    With `ordered`, keys sort as the rows do.
    """
    keys, span = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        codes, count = _codes(column, ordered=ordered)
        if count == 1:
            continue
        if span * count > _MAX_KEY:
            keys, span = _dense_codes(keys, span, ordered=ordered)
        keys *= count
        keys += codes
        span *= count
    return keys, span


def _codes(column: Array, *, ordered: bool) -> tuple[Array, int]:
    """Return the column as codes from 0, and an upper bound on their number."""
    if not len(column):
        return column.astype(np.int64), 1
    low, high = int(column.min()), int(column.max())
    if high - low < _MAX_DENSE_CODES:
        codes = column.astype(np.int64, copy=low != 0)
        if low:
            codes -= low
        return codes, high - low + 1
    return _hashed_codes(column, ordered=ordered)


def _dense_codes(keys: Array, span: int, *, ordered: bool = False) -> tuple[Array, int]:
    """Return keys from 0 to below `span` as codes from 0 without gaps, and their number.

    Codes are in the order of the keys if `ordered`, else in the order in which the keys appear.
    """
    if span > max(_MIN_TABLE, _ROWS_OF_TABLE * len(keys)):
        return _hashed_codes(keys, ordered=ordered)
    first = np.full(span, len(keys), np.int32)  # a table is far faster than hashing
    first[keys[::-1]] = np.arange(len(keys) - 1, -1, -1, dtype=np.int32)
    present = np.flatnonzero(first < len(keys))
    order = present if ordered else present[np.argsort(first[present], kind="stable")]
    first[order] = np.arange(len(order), dtype=np.int32)
    return first[keys].astype(np.int64), len(order)


def _hashed_codes(column: Array, *, ordered: bool) -> tuple[Array, int]:
    """Return codes as `_dense_codes` does, of any values. Hashing is far faster than sorting."""
    codes, values = pd.factorize(column, sort=ordered)
    return codes.astype(np.int64, copy=False), len(values)


def concatenated_ranges(begins: Array, lengths: Array) -> Array:
    """Return the concatenated integer ranges that start at `begins` and have these lengths."""
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def sum_groups(values: Array, groups: Array, count: int) -> Array:
    """Return the sum of the values of each group, shape (count,), in the values' own dtype: integers stay exact."""
    result = np.zeros(count, values.dtype)
    np.add.at(result, groups, values)
    return result


def sum_sorted(values: Array, begins: Array, add: np.ufunc = np.add) -> Array:
    """Return the sum of each group of sorted values, given where in them each group begins (`sort_rows`)."""
    return values if len(begins) == len(values) else np.asarray(add.reduceat(values, begins))


def concat_tables(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate tables with the same columns. Empty tables do not change the dtypes of others."""
    filled = [table for table in tables if len(table)] or [tables[0]]
    return filled[0] if len(filled) == 1 else pd.concat(filled, ignore_index=True)


def merge_sums(*keys: str, **how: str) -> Callable[[Sequence[pd.DataFrame]], pd.DataFrame]:
    """Return a merge function: a row per combination of keys, in their order, with sums of the other columns.

    Args:
        keys: Columns of integers.
        how: "min" or "max" for each column that is not summed.
    """
    return functools.partial(_merge_by, keys, how)


def _merge_by(keys: Sequence[str], how: Mapping[str, str], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    table = concat_tables(tables)
    columns = {name: table[name].to_numpy() for name in table.columns}
    order, begins = sort_rows([columns[name] for name in keys])
    merged = {name: columns.pop(name)[order[begins]] for name in keys}
    merged |= {
        name: sum_sorted(column[order], begins, _UFUNCS[how.get(name, "sum")]) for name, column in columns.items()
    }
    return pd.DataFrame(merged, copy=False)


_UFUNCS: Final = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """Iterate over the rows of a small table as named tuples."""
    return table.itertuples(index=False)
