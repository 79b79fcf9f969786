"""Blocks of records that span processes, and the segments of a run that are read in one go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.labels import LABEL_COLUMNS, Fields, ProcessIds, RecordLabels, RunLabels
from commtrace.reading.log import Process
from commtrace.reading.record_columns import OF_PROCESS, RecordColumns, copy_fields
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import BLOCK, Segment
from commtrace.reading.table_reader import ProcessTables
from commtrace.schema import RECORD, Phase, Records

from .grouping import Array, group_rows, sum_groups

RECORDS_PER_TASK: Final = 1 << 20
"""Least number of records that an executor reads in one go, if there are as many."""

ROWS_OF_BLOCK: Final = BLOCK
"""Number of records in a block, if there are as many."""

READ_FIELDS: Final = (
    "t_begin", "t_return", "t_wait", "t_start", "t_end", "payload", "local", "seq", "group", "site", "step", "peer",
    "batch", "kind", "phase", "clock", "flags", "state",
)  # fmt: skip

_CALL_FIELDS: Final = ("kind", "group", "site", "phase", "state", "payload", "local")


class _CachedFields:
    """Fields of records as contiguous arrays, shape (n,), made when they are first asked for."""

    def __init__(self, records: Fields, labels: RecordLabels) -> None:
        self.records, self.labels = records, labels
        self._columns: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, name: str) -> Array:
        if name not in self._columns:
            if not isinstance(self.records, np.ndarray):
                self._columns[name] = self.records[name]
            elif name in OF_PROCESS:
                self._columns[name] = np.full(len(self), getattr(self.labels, OF_PROCESS[name]), np.int64)
            elif name in READ_FIELDS:
                self._columns |= _copied_fields(self.records)
            else:
                self._columns[name] = np.ascontiguousarray(self.records[name])
        return self._columns[name]


class RecordBlock:
    """Records as columns, a row per call, or in `distinct` and `alike` per number of equal calls.

    Besides the fields of the records there are "process", the position of their process in the log, and "rank".

    Attributes:
        labels: Translates the numbers in the records.
        calls: Calls that each row stands for, int64, shape (n,).
        exact: Whether the row's sizes are those of each call, bool, shape (n,): of a summary, some are near their mean.
    """

    def __init__(
        self,
        records: Fields,
        labels: RecordLabels,
        calls: Array | None = None,
        exact: Array | None = None,
        alike: tuple[RecordBlock, Array] | None = None,
    ) -> None:
        # Not the block itself: `distinct` refers to the fields, and a circle would hold them until Python looks for it.
        self._fields = _CachedFields(records, labels)
        self.exact = np.ones(len(records), bool) if exact is None else exact
        self.labels = labels
        self.calls = np.ones(len(records), np.int64) if calls is None else calls
        self._given_alike = alike

    def __getitem__(self, name: str) -> Array:
        """Return a field of the records, shape (n,)."""
        return self._fields[name]

    def __len__(self) -> int:
        return len(self._fields)

    @cached_property
    def volumes(self) -> dict[str, Array]:
        """Sums of each row: `payload_bytes`, `wire_bytes`, `wire_unknown`, each of shape (n,).

        A call whose wire bytes are not known adds 0 to `wire_bytes` and 1 to `wire_unknown`.
        """
        wire = self._wire_bytes
        unknown = np.isnan(wire)
        return {
            "payload_bytes": self["payload"] * self.calls,
            "wire_bytes": np.where(unknown, 0.0, wire) * self.calls,
            "wire_unknown": unknown * self.calls,
        }

    @cached_property
    def _wire_bytes(self) -> Array:
        """Wire bytes of one call of each row, NaN where they are not known."""
        return self.labels.wire_bytes(self) if self._given_alike is None else self.alike._wire_bytes[self.call]

    @cached_property
    def distinct(self) -> RecordBlock:
        """The distinct calls of each process and step: a row is of one process, step and row of `alike`."""
        first, groups = group_rows([self["process"], self["step"], self.call])
        return self._grouped(first, groups, (self.alike, self.call[first]))

    @property
    def alike(self) -> RecordBlock:
        """The distinct calls of the block; training repeats itself, so they are far fewer than the records.

        Calls of a row are equal in `kind`, `group`, `site`, `phase`, `state`, `payload` and `local`, and in whether
        their rank is the `peer`. Other fields are those of any one of them.
        """
        return self._alike[0]

    @property
    def call(self) -> Array:
        """The row of `alike` that stands for each row, int64, shape (n,)."""
        return self._alike[1]

    @cached_property
    def _alike(self) -> tuple[RecordBlock, Array]:
        if self._given_alike is not None:
            return self._given_alike
        to_self = self["peer"] == self["rank"]
        first, groups = group_rows([*(self[name] for name in _CALL_FIELDS), to_self, self.exact])
        return self._grouped(first, groups), groups

    def _grouped(self, first: Array, groups: Array, alike: tuple[RecordBlock, Array] | None = None) -> RecordBlock:
        calls = sum_groups(self.calls, groups, len(first))
        return RecordBlock(_Rows(self._fields, first), self.labels, calls, self.exact[first], alike)


@dataclass(frozen=True)
class _Rows:
    """Some rows of records."""

    fields: Fields
    at: Array

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, name: str) -> Array:
        return self.fields[name][self.at]


def _copied_fields(records: Records) -> dict[str, Array]:
    columns = {name: np.empty(len(records), RECORD[name]) for name in READ_FIELDS}
    copy_fields(records, columns)
    return columns


@dataclass(frozen=True)
class HistogramBlock:
    """Histograms of durations of one process: rows of `summary_format.TIMES`, with the ids of the run."""

    rows: Mapping[str, Array]
    labels: RecordLabels


EVALUATION: Final = -2
"""The step of evaluations in tables of steps."""


def steps_of(block: RecordBlock) -> Array:
    """Return the training step of each record, -1 for start-up and EVALUATION for evaluations, which are in no step."""
    return np.where(block["phase"] == Phase.EVALUATION, EVALUATION, block["step"].astype(np.int64))


@dataclass
class ProcessPart:
    """All processes of some ranks, for `Executor.map`."""

    processes: list[tuple[Process, RecordLabels]] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        """The segments of the processes, in their order."""
        return [segment for process, _ in self.processes for segment in process.segments]


def process_parts(run: RecordedRun) -> list[ProcessPart]:
    """Return the processes of a run in their order, in parts of RECORDS_PER_TASK records or more."""
    parts, records = [ProcessPart()], 0
    for _, pairs in groupby(zip(run.processes, run.labels, strict=True), lambda pair: pair[0].rank):
        if records >= RECORDS_PER_TASK:
            parts.append(ProcessPart())
            records = 0
        of_rank = [*pairs]
        parts[-1].processes += of_rank
        records += sum(segment.count for process, _ in of_rank for segment in process.segments)
    return parts


@dataclass
class RunPart:
    """Segments that are read in one go, RECORDS_PER_TASK records or more, and of each the ids of its process."""

    segments: list[Segment] = field(default_factory=list)
    processes: list[ProcessIds] = field(default_factory=list)


def _all_segments(process: Process) -> Sequence[Segment]:
    return process.segments


def run_parts(run: RecordedRun, segments_of: Callable[[Process], Sequence[Segment]] = _all_segments) -> list[RunPart]:
    """Return segments of the processes of a run in their order, at least one part, for `Executor.map`."""
    parts, records = [RunPart()], 0
    for ids, process in zip(run.run_labels.processes, run.processes, strict=True):
        for segment in segments_of(process):
            if records >= RECORDS_PER_TASK:
                parts.append(RunPart())
                records = 0
            parts[-1].segments.append(segment)
            parts[-1].processes.append(ids)
            records += segment.count
    return parts


def _all_records(records: Records) -> Records:
    return records


def read_blocks(
    part: RunPart,
    labels: RunLabels,
    select: Callable[[Records], Records] = _all_records,
    fields: Sequence[str] = (),
) -> Iterator[RecordBlock]:
    """Yield the records of a part in blocks that span processes, at least one.

    Args:
        part: The part.
        labels: The labels of its run.
        select: Chooses among records, shape (n,); the others are left out.
        fields: Fields that are needed besides those of every block.
    """
    block = None
    for columns in _read_columns(part, select, fields):
        block = RecordBlock(columns, labels)
        yield block
    if block is None:
        yield EMPTY_BLOCK


def _read_columns(
    part: RunPart, select: Callable[[Records], Records], fields: Sequence[str]
) -> Iterator[RecordColumns]:
    fields = [*dict.fromkeys((*READ_FIELDS, *fields))]
    size = max(1, min(ROWS_OF_BLOCK, sum(segment.count for segment in part.segments)))
    memory = bytearray(min(BLOCK, max((segment.count for segment in part.segments), default=0)) * RECORD.itemsize)
    columns = RecordColumns.of(fields, size)
    for process, segment in zip(part.processes, part.segments, strict=True):
        for records in segment.blocks(memory=memory):
            rest = select(records)
            while len(rest):
                rows, rest = np.split(rest, [size - len(columns)])
                columns.fill(rows, process)
                if len(columns) == size:
                    yield columns
                    columns = RecordColumns.of(fields, size)
    if len(columns):
        yield columns


def sums_by(labels: RecordLabels, keys: Mapping[str, Array], values: Mapping[str, Array]) -> pd.DataFrame:
    """Return keys and sums of values, a row per combination of keys.

    Args:
        labels: The labels of the ids in keys.
        keys: Columns of integers, each of shape (n,); those of LABEL_COLUMNS are ids, and become numbers of labels.
        values: Columns to sum, each of shape (n,).
    """
    first, groups = group_rows([*keys.values()])
    columns = {
        name: labels.codes(name, key[first]) if name in LABEL_COLUMNS else key[first] for name, key in keys.items()
    }
    sums = {name: sum_groups(value, groups, len(first)) for name, value in values.items()}
    return pd.DataFrame({**columns, **sums}, copy=False)  # pandas would copy the columns into blocks


def table_by(rows: RecordBlock, keys: Sequence[str], values: Mapping[str, Array]) -> pd.DataFrame:
    """Return `keys`, `calls` and the sums of `values`, a row per combination of keys.

    A combination may take several rows (two kinds that are the same operation); `merge_sums` adds them up.

    Args:
        rows: The calls, n rows.
        keys: "process", "step" (`steps_of`), "payload_bytes", "exact", or LABEL_COLUMNS.
        values: Columns to sum, each of shape (n,).
    """
    columns = {
        "process": rows["process"],
        "step": steps_of(rows),
        "payload_bytes": rows["payload"],
        "exact": rows.exact,
    }
    numbers = {key: rows.labels.ids(key, rows) if key in LABEL_COLUMNS else columns[key] for key in keys}
    return sums_by(rows.labels, numbers, {"calls": rows.calls, **values})


def mask_unknown_wire(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table without `wire_unknown`, and with missing `wire_bytes` where it was above 0."""
    return table.assign(wire_bytes=table["wire_bytes"].mask(table["wire_unknown"] > 0)).drop(columns="wire_unknown")


EMPTY_BLOCK: Final = RecordBlock(
    np.zeros(0, RECORD), RecordLabels(-1, Process(Path(), -1, -1, "", ProcessTables(), ()), {}, {}, {})
)
"""A block without records, from which every partial table gets its columns."""
