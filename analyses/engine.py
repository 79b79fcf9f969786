"""The engine: runs analyses over all segments of a run, and the few array operations that their partials are made of.

partial(block) -> table      one block of one process; groups by the numbers in the records, then labels the result
merge(tables) -> table       the same table for all of them; merge([merge([a, b]), c]) == merge([a, b, c])
finish(table, run) -> {name: table}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from commtrace.reading.labels import LABEL_COLUMNS, RecordLabels
from commtrace.reading.log import Process
from commtrace.reading.run import RecordedRun
from commtrace.reading.segment_reader import BLOCK, Segment
from commtrace.reading.table_reader import ProcessTables
from commtrace.schema import RECORD, Records

Array: TypeAlias = npt.NDArray[Any]
NamedTables: TypeAlias = dict[str, pd.DataFrame]
Work: TypeAlias = list[tuple[RecordLabels, Segment]]

TASK: Final = 1 << 20
"""Records that one task of an executor reads at least, where there are as many."""

_DENSE: Final = 1 << 22
_MOST: Final = 1 << 62
_AT_ONCE: Final = 64


class Columns:
    """Calls of one process, fields as columns, with what their numbers mean; a row stands for `calls` equal ones."""

    def __init__(self, labels: RecordLabels) -> None:
        self.labels = labels
        self._columns: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        """A field of the record, one value after the other."""
        if name not in self._columns:
            self._columns[name] = self._column(name)
        return self._columns[name]

    def __len__(self) -> int:
        return len(self.calls)

    def _column(self, name: str) -> Array:
        raise NotImplementedError

    @property
    def calls(self) -> Array:
        """Calls that each row stands for."""
        raise NotImplementedError

    @cached_property
    def volumes(self) -> dict[str, Array]:
        """Payload and wire bytes of each row; wire bytes not known count 0 there, and each call 1 in `wire_unknown`."""
        wire = self.labels.wire_bytes(self)
        unknown = np.isnan(wire)
        known = np.where(unknown, 0.0, wire)
        return {
            "payload_bytes": self["payload"] * self.calls,
            "wire_bytes": known * self.calls,
            "wire_unknown": unknown * self.calls,
        }


class Block(Columns):
    """Records of one process, a row each."""

    def __init__(self, records: Records, labels: RecordLabels) -> None:
        super().__init__(labels)
        self.records = records

    def _column(self, name: str) -> Array:
        if name not in _READ:
            return np.ascontiguousarray(self.records[name])
        # All that are read by and by, a few records at a time: a record is longer than a cache line, and a block of
        # records than a cache.
        columns = {one: np.empty(len(self.records), RECORD[one]) for one in _READ}
        for begin in range(0, len(self.records), _CACHED):
            some = self.records[begin : begin + _CACHED]
            for one, column in columns.items():
                column[begin : begin + _CACHED] = some[one]
        self._columns.update(columns)
        return columns[name]

    @cached_property
    def calls(self) -> Array:
        """A row is a call."""
        return np.ones(len(self.records), np.int64)

    @cached_property
    def cells(self) -> Cells:
        """Its calls, counted by all that most questions ask for: training repeats itself, so these are far fewer."""
        mine = self["peer"] == self.labels.rank
        first, groups = grouped([*(self[name] for name in _ALIKE), mine])
        return Cells(self, first, np.bincount(groups, minlength=len(first)))


_READ: Final = (
    "t_begin", "t_return", "t_wait", "t_start", "t_end", "payload", "local", "group", "site", "step", "peer", "batch",
    "kind", "phase", "clock", "flags", "state",
)  # fmt: skip
_CACHED: Final = 4096

_ALIKE: Final = ("step", "kind", "group", "site", "phase", "state", "payload", "local")


class Cells(Columns):
    """Calls of a block with equal fields, a row per distinct combination.

    Calls of a row are equal in `step`, `kind`, `group`, `site`, `phase`, `state`, `payload` and `local`, and in whether
    this rank is the `peer`. Other fields are those of any one of them.
    """

    def __init__(self, block: Block, first: Array, calls: Array) -> None:
        super().__init__(block.labels)
        self._block, self._first, self._calls = block, first, calls

    def _column(self, name: str) -> Array:
        column: Array = self._block[name][self._first]
        return column

    @property
    def calls(self) -> Array:
        """How many are alike."""
        return self._calls


@dataclass(frozen=True)
class Analysis:
    """One question. The functions are pure and picklable."""

    name: str
    partial: Callable[[Block], pd.DataFrame]
    merge: Callable[[Sequence[pd.DataFrame]], pd.DataFrame]
    finish: Callable[[pd.DataFrame, RecordedRun], NamedTables]
    needed: Callable[[RecordedRun], bool] | None = None
    """Whether the records of this run matter at all; None: of any."""


def fold(run: RecordedRun, analyses: Sequence[Analysis], executor: Executor | None = None) -> NamedTables:
    """All tables of these analyses, in one pass over the records of the run."""
    gather = {analysis.name: _Gather(analysis) for analysis in analyses}
    tasks = _tasks(run)
    work = partial(_partials, [analysis for analysis in analyses if analysis.needed is None or analysis.needed(run)])
    for tables in map(work, tasks) if executor is None else executor.map(work, [*tasks]):
        for name, table in tables.items():
            gather[name].add(table)
    return {
        name: table
        for analysis in analyses
        for name, table in analysis.finish(gather[analysis.name].table(), run).items()
    }


def partials_of(analysis: Analysis, blocks: Iterable[Block]) -> pd.DataFrame:
    """The merged table of some blocks, with its columns even where there are none."""
    gather = _Gather(analysis)
    for block in blocks:
        gather.add(analysis.partial(block))
    return gather.table()


def _tasks(run: RecordedRun) -> Iterator[Work]:
    task: Work = []
    for labels, process in zip(run.labels, run.processes, strict=True):
        for segment in process.segments:
            task.append((labels, segment))
            if sum(segment.count for _, segment in task) >= TASK:
                yield task
                task = []
    yield task


def _partials(analyses: Sequence[Analysis], work: Work) -> NamedTables:
    gather = {analysis.name: _Gather(analysis) for analysis in analyses}
    memory = bytearray(min(BLOCK, max((segment.count for _, segment in work), default=0)) * RECORD.itemsize)
    for labels, segment in work:
        for records in segment.blocks(memory=memory):
            block = Block(records, labels)
            for analysis in analyses:
                gather[analysis.name].add(analysis.partial(block))
    return {name: one.table() for name, one in gather.items()}


@dataclass
class _Gather:
    """Merges tables as they come, a few at a time."""

    analysis: Analysis
    tables: list[pd.DataFrame] = field(default_factory=list)

    def add(self, table: pd.DataFrame) -> None:
        self.tables.append(table)
        if len(self.tables) >= _AT_ONCE:
            self.tables = [self.table()]

    def table(self) -> pd.DataFrame:
        if not self.tables:
            self.tables = [self.analysis.partial(NOTHING)]
        return self.analysis.merge(self.tables)


# --- what partials and merges are made of ---------------------------------------------------------------------------


def grouped(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Group rows by columns of whole numbers, all of shape (n,).

    Returns the position of one row of each group, and for each row the number of its group.
    """
    keys, span = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        codes, more = _codes(column)
        if span * more > _MOST:
            keys, span = _numbered(keys)
        keys, span = keys * more + codes, span * more
    numbers, groups = _numbered(keys)
    first = np.zeros(groups, np.int64)
    first[numbers] = np.arange(len(numbers))
    return first, numbers


def _codes(column: Array) -> tuple[Array, int]:
    """The column as numbers from 0, and how many there may be."""
    if not len(column):
        return column.astype(np.int64), 1
    low, high = int(column.min()), int(column.max())
    return (column.astype(np.int64) - low, high - low + 1) if high - low < _DENSE else _numbered(column)


def _numbered(column: Array) -> tuple[Array, int]:
    """The column as numbers from 0 that are all taken, and how many there are. By hashing: sorting takes far longer."""
    codes, values = pd.factorize(column)
    return codes.astype(np.int64, copy=False), len(values)


def summed(values: Array, groups: Array, size: int) -> Array:
    """Sum of the values of each group, in the values' own type: whole numbers stay exact."""
    result = np.zeros(size, values.dtype)
    np.add.at(result, groups, values)
    return result


# Columns of the normal form that a table may be keyed by, beside WORDS.
_FIELDS: Final = {"step": "step", "payload_bytes": "payload"}


def table_by(rows: Columns, keys: Sequence[str], values: Mapping[str, Array]) -> pd.DataFrame:
    """One row per combination of `keys` (columns of the normal form) with `calls`, and the sums of `values`.

    A combination may take several rows (two kinds that are the same operation), which `merge_sums` brings together.
    """
    numbers = {key: rows.labels.ids(key, rows) if key in LABEL_COLUMNS else rows[_FIELDS[key]] for key in keys}
    first, groups = grouped([*numbers.values()])
    columns = {
        key: rows.labels.text(key, of[first]) if key in LABEL_COLUMNS else of[first] for key, of in numbers.items()
    }
    sums = {name: summed(value, groups, len(first)) for name, value in {"calls": rows.calls, **values}.items()}
    return pd.DataFrame({**columns, **sums})


def known_wire(table: pd.DataFrame) -> pd.DataFrame:
    """Wire bytes are left out of rows in which some call's are not known."""
    return table.assign(wire_bytes=table["wire_bytes"].mask(table["wire_unknown"] > 0)).drop(columns="wire_unknown")


def merge_by(keys: Sequence[str], how: Mapping[str, str], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables with the same columns as one, a row per combination of keys; other columns by `how`, else summed."""
    filled = [table for table in tables if len(table)] or [tables[0]]
    both = pd.concat(filled, ignore_index=True)
    rules = {column: how.get(column, "sum") for column in both.columns if column not in keys}
    return both.groupby([*keys], as_index=False, sort=True, observed=True, dropna=False).agg(rules)


def merge_sums(*keys: str) -> Callable[[Sequence[pd.DataFrame]], pd.DataFrame]:
    """A merge that adds up everything but the keys."""
    return partial(merge_by, keys, {})


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """The rows, whose columns are attributes: for a small table that is about to be shown."""
    return table.itertuples(index=False)


_NOBODY: Final = Process(Path(), -1, -1, "", ProcessTables(), ())

NOTHING: Final = Block(np.zeros(0, RECORD), RecordLabels(-1, _NOBODY, {}, {}))
"""A block without records: gives every table its columns."""
