"""Encoding of many protobuf messages of one shape at a time (https://protobuf.dev/programming-guides/encoding).

A `Column` has the bytes of one field in all rows. A row is the concatenation of its cells in all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array

_VARINT, _FIXED64, _LENGTH_DELIMITED = 0, 1, 2


class Column(NamedTuple):
    """Bytes of one field in each row: the first `length` of its `data`.

    Attributes:
        data: uint8, shape (n, width), or (1, width) if all rows have the same bytes.
        length: int64, shape (n,) or (1,).
    """

    data: Array
    length: Array


def constant(data: bytes) -> Column:
    """Return a column of the same bytes in all rows, such as fields that are already serialised."""
    return Column(np.frombuffer(data, np.uint8)[None], np.array([len(data)]))


def chosen(texts: Column, at: Array) -> Column:
    """Return the rows of a column at these indices."""
    return Column(texts.data[at], texts.length[at])


def stacked(texts: Sequence[bytes]) -> Column:
    """Return a column with one row per byte string."""
    length = np.array([len(text) for text in texts], np.int64)
    width = int(length.max(initial=1))
    data = np.frombuffer(b"".join(text.ljust(width) for text in texts), np.uint8)
    return Column(data.reshape(-1, width), length)


def varint(field: int, values: Array) -> Column:
    """Return a field with non-negative integers, shape (n,)."""
    key = _base128(np.array([field << 3 | _VARINT])).data
    value = _base128(values)
    return Column(np.hstack([key.repeat(len(values), axis=0), value.data]), key.shape[1] + value.length)


def fixed64(field: int | Array, values: Array) -> Column:
    """Return a field with 64-bit integers or floating-point numbers, shape (n,); `field` may differ by row."""
    key = _base128(np.broadcast_to(np.asarray(field) << 3 | _FIXED64, len(values)))
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1, 8)
    return Column(np.hstack([key.data, data]), key.length + 8)


def message(field: int, columns: Sequence[Column]) -> list[Column]:
    """Return a field that holds a message with the given fields."""
    return [constant(_base128(np.array([field << 3 | _LENGTH_DELIMITED])).data.tobytes()), *delimited(columns)]


def delimited(columns: Sequence[Column]) -> list[Column]:
    """Return messages with the given fields, each after its length, as files of messages have them."""
    return [_base128(sum((column.length for column in columns), start=np.zeros(1, np.int64))), *columns]


def text(field: int, texts: Column) -> list[Column]:
    """Return a field that holds the bytes of a column, such as names."""
    return message(field, [texts])


def where(present: Array, columns: Sequence[Column]) -> list[Column]:
    """Return columns that are empty in the rows in which `present`, bool, shape (n,), is false."""
    return [Column(column.data, column.length * present) for column in columns]


def joined(columns: Sequence[Column]) -> bytes:
    """Return the concatenated bytes of all rows."""
    rows = max(len(column.length) for column in columns)
    stops = np.cumsum([column.data.shape[1] for column in columns]).tolist()
    data = np.empty((rows, stops[-1]), np.uint8)
    used = np.empty(data.shape, bool)
    for column, stop in zip(columns, stops, strict=True):
        width = column.data.shape[1]
        data[:, stop - width : stop] = column.data
        used[:, stop - width : stop] = np.arange(width) < column.length[:, None]
    return data[used].tobytes()


def _base128(values: Array) -> Column:
    """Return integers as varints: 7 bits per byte, lowest first. All bytes but the last have the highest bit set."""
    width = max(1, -(-int(values.max(initial=0)).bit_length() // 7))
    shifted = values[:, None] >> np.arange(0, 7 * width, 7)
    continues = shifted[:, 1:] > 0
    data = (shifted & 127).astype(np.uint8)
    data[:, :-1] |= continues.astype(np.uint8) << 7
    return Column(data, 1 + continues.sum(axis=1))
