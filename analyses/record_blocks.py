"""Blocks of records that span processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.labels import TEXT_FIELDS, RunLabels
from commtrace.reading.log import Log
from commtrace.reading.record_columns import RecordColumns, row_groups
from commtrace.reading.run_parts import RunPart
from commtrace.reading.segment_reader import BLOCK
from commtrace.schema import RECORD, Fields, Phase, Records

from .grouping import Array, group_rows, sum_groups

ROWS_OF_BLOCK: Final = BLOCK
"""Maximum number of records in a block."""

READ_FIELDS: Final = (
    "t_begin", "t_return", "t_wait", "t_start", "t_end", "payload", "local", "seq", "group", "site", "step", "peer",
    "batch", "kind", "phase", "clock", "flags", "state",
)  # fmt: skip

_GROUPS: Final = ("process", "step")
_CALL_FIELDS: Final = ("kind", "group", "site", "phase", "state", "payload", "local")


class RecordBlock:
    """Records as columns, a row per call.

    A row of `distinct_calls` and `distinct_calls_by` stands for several equal calls.

    Besides the fields of the records there are "process", the index of the process in the log, and "rank".

    Attributes:
        labels: Labels of the numbers in the records.
        calls: Number of calls that each row stands for, int64, shape (n,).
        exact: Whether each row has the exact sizes of its calls, bool, shape (n,). Some rows of a summary have means.
    """

    def __init__(
        self,
        records: Fields,
        labels: RunLabels,
        calls: Array | None = None,
        exact: Array | None = None,
        distinct_calls: tuple[RecordBlock, Array] | None = None,
    ) -> None:
        # `distinct_calls` refers to the records, not to the block: a reference cycle would delay freeing them.
        self._records = records
        self.exact = np.ones(len(records), bool) if exact is None else exact
        self.labels = labels
        self.calls = np.ones(len(records), np.int64) if calls is None else calls
        self._given_distinct_calls = distinct_calls
        self._grouped_by: dict[tuple[str, ...], RecordBlock] = {}

    def __getitem__(self, name: str) -> Array:
        """Return a field of the records, shape (n,)."""
        return self._records[name]

    def __len__(self) -> int:
        return len(self._records)

    def rows(self, at: Array) -> RecordBlock:
        """Return the rows with these indices."""
        if len(at) == len(self):
            return self
        return RecordBlock(_Rows(self._records, at), self.labels, self.calls[at], self.exact[at])

    @cached_property
    def volumes(self) -> dict[str, Array]:
        """Sums of each row: `payload_bytes`, `wire_bytes`, `payload_unknown`, `wire_unknown`, each of shape (n,).

        A call whose wire bytes are not known adds 0 to `wire_bytes` and 1 to `wire_unknown`; its payload likewise.
        """
        wire = self._wire_bytes
        unknown = np.isnan(wire)
        return {
            "payload_bytes": self["payload"] * self.calls,
            "wire_bytes": np.where(unknown, 0.0, wire) * self.calls,
            "payload_unknown": self.labels.payload_unknown(self["kind"]) * self.calls,
            "wire_unknown": unknown * self.calls,
        }

    @cached_property
    def _wire_bytes(self) -> Array:
        """Wire bytes of one call of each row, NaN where they are not known."""
        if self._given_distinct_calls is None:
            return self.labels.wire_bytes(self)
        return self.distinct_calls._wire_bytes[self.call]

    def distinct_calls_by(self, *keys: str) -> RecordBlock:
        """Return the distinct calls of each process, of each step, or of each process and step.

        Args:
            keys: "process", "step", or both.

        Returns:
            A row per combination of keys and row of `distinct_calls`. Computed once.
        """
        if keys not in self._grouped_by:
            rows = self if len(keys) == len(_GROUPS) else self.distinct_calls_by(*_GROUPS)  # which has fewer rows
            first, groups = group_rows([*(rows[key] for key in keys), rows.call])
            self._grouped_by[keys] = rows._grouped(first, groups, (rows.distinct_calls, rows.call[first]))
        return self._grouped_by[keys]

    @property
    def distinct_calls(self) -> RecordBlock:
        """The distinct calls of the block. Training repeats itself, so there are far fewer of them than records.

        Calls of a row are equal in `kind`, `group`, `site`, `phase`, `state`, `payload` and `local`, and in whether
        their rank is the `peer`. Other fields are those of an arbitrary one of the calls.
        """
        return self._distinct_calls_and_rows[0]

    @property
    def call(self) -> Array:
        """Index into `distinct_calls` for each row, int64, shape (n,)."""
        return self._distinct_calls_and_rows[1]

    @cached_property
    def _distinct_calls_and_rows(self) -> tuple[RecordBlock, Array]:
        if self._given_distinct_calls is not None:
            return self._given_distinct_calls
        to_self = self["peer"] == self["rank"]
        first, groups = group_rows([*(self[name] for name in _CALL_FIELDS), to_self, self.exact])
        return self._grouped(first, groups), groups

    def _grouped(
        self, first: Array, groups: Array, distinct_calls: tuple[RecordBlock, Array] | None = None
    ) -> RecordBlock:
        if len(first) == len(self):  # no two rows are equal, and groups have the order of rows: share the columns
            return RecordBlock(self._records, self.labels, self.calls, self.exact, distinct_calls)
        calls = sum_groups(self.calls, groups, len(first))
        return RecordBlock(_Rows(self._records, first), self.labels, calls, self.exact[first], distinct_calls)


class _Rows:
    """Selected rows of records. Columns, of shape (n,), are computed on first access."""

    def __init__(self, fields: Fields, at: Array) -> None:
        self._fields, self._at = fields, at
        self._columns: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, name: str) -> Array:
        if name not in self._columns:
            self._columns[name] = self._fields[name][self._at]
        return self._columns[name]


@dataclass(frozen=True)
class HistogramBlock:
    """Histograms of durations of one process: rows of `summary_format.TIMES`, with the ids of the run."""

    rows: Mapping[str, Array]
    labels: RunLabels


EVALUATION: Final = -2
"""Value of `step` for evaluations."""


def steps_of(block: RecordBlock) -> Array:
    """Return the training step of each record: -1 for start-up, EVALUATION for evaluations, which belong to no step."""
    return np.where(block["phase"] == Phase.EVALUATION, EVALUATION, block["step"].astype(np.int64))


def _all_records(records: Records) -> Records:
    return records


def read_blocks(
    part: RunPart,
    labels: RunLabels,
    select: Callable[[Records], Records] = _all_records,
    fields: Sequence[str] = (),
) -> Iterator[RecordBlock]:
    """Yield the records of a part in blocks that span processes; at least one block.

    Args:
        part: Part of a run.
        labels: The labels of the run.
        select: Function that returns the records to keep, given records, shape (n,).
        fields: Fields to read besides READ_FIELDS.
    """
    size = max(1, min(ROWS_OF_BLOCK, sum(segment.count for segment in part.segments)))
    memory = bytearray(min(BLOCK, max((segment.count for segment in part.segments), default=0)) * RECORD.itemsize)
    records = (
        (select(block), process)
        for segment, process in zip(part.segments, part.processes, strict=True)
        for block in segment.blocks(memory=memory)
    )
    block = None
    for columns in row_groups(records, dict.fromkeys((*READ_FIELDS, *fields)), size):
        block = RecordBlock(columns, labels)
        yield block
    if block is None:
        yield EMPTY_BLOCK


def sums_by(labels: RunLabels, keys: Mapping[str, Array], values: Mapping[str, Array]) -> pd.DataFrame:
    """Return keys and sums of values, a row per combination of keys.

    Args:
        labels: The labels of the ids in keys.
        keys: Columns of integers, each of shape (n,); those in TEXT_FIELDS are ids, and become numbers of labels.
        values: Columns to sum, each of shape (n,).
    """
    first, groups = group_rows([*keys.values()])
    columns = {
        name: labels.codes(name, key[first]) if name in TEXT_FIELDS else key[first] for name, key in keys.items()
    }
    sums = {name: sum_groups(value, groups, len(first)) for name, value in values.items()}
    return pd.DataFrame({**columns, **sums}, copy=False)  # pandas would copy the columns into blocks


def table_by(rows: RecordBlock, keys: Sequence[str], values: Mapping[str, Array]) -> pd.DataFrame:
    """Return `keys`, `calls` and the sums of `values`, a row per combination of keys.

    A combination may have several rows, one per kind of the same operation; `merge_sums` adds them up.

    Args:
        rows: The calls, n rows.
        keys: "process", "step" (`steps_of`), "payload_bytes", "exact", or TEXT_FIELDS.
        values: Columns to sum, each of shape (n,).
    """
    columns = {
        "process": rows["process"],
        "step": steps_of(rows),
        "payload_bytes": rows["payload"],
        "exact": rows.exact,
    }
    numbers = {key: rows.labels.ids(key, rows) if key in TEXT_FIELDS else columns[key] for key in keys}
    return sums_by(rows.labels, numbers, {"calls": rows.calls, **values})


def known_total(table: pd.DataFrame) -> int:
    """Return the payload of all calls of a table with `payload_unknown`; 0 if it is not known of every call."""
    return 0 if table["payload_unknown"].any() else int(table["payload_bytes"].sum())


def mask_unknown_sizes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with missing `payload_bytes` and `wire_bytes` where their counts of unknown calls are above 0.

    The counts, `payload_unknown` and `wire_unknown`, are left out.
    """
    masked = {"wire_bytes": table["wire_bytes"].mask(table["wire_unknown"] > 0)}
    if (unknown := table["payload_unknown"] > 0).any():
        masked["payload_bytes"] = table["payload_bytes"].mask(unknown)
    return table.assign(**masked).drop(columns=["payload_unknown", "wire_unknown"])


EMPTY_BLOCK: Final = RecordBlock(
    RecordColumns.of(RECORD.names or (), 0), RunLabels(Log(Path(), "", processes=(), notes=(), other_runs=()))
)
"""A block without records, for partial tables that have columns but no rows."""
