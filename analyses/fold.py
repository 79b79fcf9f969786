"""The engine: runs analyses over all segments of a run, and the few array operations that their partials are made of.

partial(block) -> table      one block of one process; groups by the numbers in the records, then names the result
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

from commtrace.reading.log import Process
from commtrace.reading.names import WORDS, Names
from commtrace.reading.run import Run
from commtrace.reading.segments import Segment
from commtrace.reading.tables import Tables
from commtrace.schema import RECORD, Records

Array: TypeAlias = npt.NDArray[Any]
NamedTables: TypeAlias = dict[str, pd.DataFrame]
Work: TypeAlias = list[tuple[Names, Segment]]

TASK: Final = 1 << 20
"""Records that one task of an executor reads at least, where there are as many."""

_DENSE: Final = 1 << 22
_AT_ONCE: Final = 64


@dataclass(frozen=True)
class Block:
    """Records of one process, with what their numbers mean."""

    records: Records
    names: Names
    _columns: dict[str, Array] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> Array:
        """A field of the records, one value after the other: a record takes more than a cache line."""
        if name not in self._columns:
            self._columns[name] = np.ascontiguousarray(self.records[name])
        return self._columns[name]

    @cached_property
    def volumes(self) -> dict[str, Array]:
        """Payload and wire bytes of each record; wire bytes not known count 0 there, and 1 in `wire_unknown`."""
        wire = self.names.wire_bytes(self.records)
        unknown = np.isnan(wire)
        known = np.where(unknown, 0.0, wire)
        return {"payload_bytes": self["payload"], "wire_bytes": known, "wire_unknown": unknown.astype(np.int64)}


@dataclass(frozen=True)
class Analysis:
    """One question. The functions are pure and picklable."""

    name: str
    partial: Callable[[Block], pd.DataFrame]
    merge: Callable[[Sequence[pd.DataFrame]], pd.DataFrame]
    finish: Callable[[pd.DataFrame, Run], NamedTables]


def fold(run: Run, analyses: Sequence[Analysis], executor: Executor | None = None) -> NamedTables:
    """All tables of these analyses, in one pass over the records of the run."""
    gather = {analysis.name: _Gather(analysis) for analysis in analyses}
    tasks = _tasks(run)
    work = partial(_partials, analyses)
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


def _tasks(run: Run) -> Iterator[Work]:
    task: Work = []
    for names, process in zip(run.names, run.processes, strict=True):
        for segment in process.segments:
            task.append((names, segment))
            if sum(segment.count for _, segment in task) >= TASK:
                yield task
                task = []
    yield task


def _partials(analyses: Sequence[Analysis], work: Work) -> NamedTables:
    gather = {analysis.name: _Gather(analysis) for analysis in analyses}
    for names, segment in work:
        for records in segment.blocks():
            block = Block(records, names)
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
    numbers = np.zeros(len(columns[0]), np.int64)
    groups = min(len(numbers), 1)
    for column in columns:
        codes, span = _codes(column)
        numbers, groups = _dense(numbers * span + codes, groups * span)
    first = np.zeros(groups, np.int64)
    first[numbers] = np.arange(len(numbers))
    return first, numbers


def _codes(column: Array) -> tuple[Array, int]:
    """The column as numbers from 0, and how many there may be."""
    if not len(column):
        return column.astype(np.int64), 1
    low, high = int(column.min()), int(column.max())
    if high - low < _DENSE:
        return column.astype(np.int64) - low, high - low + 1
    values, codes = np.unique(column, return_inverse=True)
    return codes, len(values)


def _dense(codes: Array, span: int) -> tuple[Array, int]:
    """The same grouping, with numbers that are all taken. Without sorting where the span allows."""
    if span > _DENSE:
        values, codes = np.unique(codes, return_inverse=True)
        return codes, len(values)
    taken = np.zeros(span, bool)
    taken[codes] = True
    return (np.cumsum(taken) - 1)[codes], int(taken.sum())


def summed(values: Array, groups: Array, size: int) -> Array:
    """Sum of the values of each group, in the values' own type: whole numbers stay exact."""
    result = np.zeros(size, values.dtype)
    np.add.at(result, groups, values)
    return result


# Columns of the normal form that a table may be keyed by, beside WORDS.
_FIELDS: Final = {"step": "step", "payload_bytes": "payload"}


def table_by(block: Block, keys: Sequence[str], values: Mapping[str, Array]) -> pd.DataFrame:
    """One row per combination of `keys` (columns of the normal form) with `calls`, and the sums of `values`.

    A combination may take several rows (two kinds that are the same operation), which `merge_sums` brings together.
    """
    fields = {key: WORDS.get(key) or _FIELDS[key] for key in keys}
    first, groups = grouped([block[name] for name in fields.values()])
    some = {key: block[name][first] for key, name in fields.items()}
    columns = {key: block.names.name(key, numbers) if key in WORDS else numbers for key, numbers in some.items()}
    sums = {name: summed(value, groups, len(first)) for name, value in values.items()}
    return pd.DataFrame({**columns, "calls": np.bincount(groups, minlength=len(first)), **sums})


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


_NOBODY: Final = Process(Path(), -1, -1, "", Tables(), ())

NOTHING: Final = Block(np.zeros(0, RECORD), Names(-1, _NOBODY, {}, {}))
"""A block without records: gives every table its columns."""
