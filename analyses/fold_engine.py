"""The engine that runs analyses over the segments of a run, and the array operations that analyses are made of.

An analysis is three functions, as in map and reduce:

    partial(block) -> table          of one block of records of some processes, with numbers in place of labels
    merge(tables) -> table           of any number of such tables; merge([merge([a, b]), c]) == merge([a, b, c])
    finish(table, run) -> {name: table}       of the merged table, with labels
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pandas as pd

import commtrace
from commtrace.reading.executors import merge_tree
from commtrace.reading.labels import LABEL_COLUMNS, Fields, ProcessIds, RecordLabels, RunLabels
from commtrace.reading.log import Process
from commtrace.reading.record_columns import IDS, OF_PROCESS, RecordColumns, copy_fields
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import BLOCK, Segment
from commtrace.reading.stored_tables import MERGED, StoredTables, open_stored
from commtrace.reading.table_reader import ProcessTables
from commtrace.schema import RECORD, Phase, Records
from commtrace.summary_format import TIMES

Array: TypeAlias = npt.NDArray[Any]
NamedTables: TypeAlias = dict[str, pd.DataFrame]

RECORDS_PER_TASK: Final = 1 << 20
"""Least number of records that an executor reads in one go, if there are as many."""

ROWS_OF_BLOCK: Final = BLOCK
"""Number of records in a block, if there are as many."""

_READ_FIELDS: Final = (
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
            elif name in _READ_FIELDS:
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
    columns = {name: np.empty(len(records), RECORD[name]) for name in _READ_FIELDS}
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


@dataclass(frozen=True)
class Analysis:
    """Functions that compute tables of a run, pure and picklable; the module docstring defines them."""

    name: str
    partial: Callable[[RecordBlock], pd.DataFrame]
    merge: Callable[[Sequence[pd.DataFrame]], pd.DataFrame]
    finish: Callable[[pd.DataFrame, RecordedRun], NamedTables]
    reads_records: Callable[[RecordedRun], bool] | None = None
    """Whether the tables of this run depend on its records. None: those of every run do."""
    reads_cells: bool = False
    """Whether blocks may be of a summary: without times, and with rows that stand for several calls."""
    times_partial: Callable[[HistogramBlock], pd.DataFrame] | None = None
    """As `partial`, of histograms of durations."""
    categorical: bool = False
    """Whether labels in the table for `finish` are categoricals, for a long table."""

    @property
    def is_fold(self) -> bool:
        """Whether its tables are made of a merged table, or else of the run (`without_records`)."""
        return self.reads_records is not _no_records


def without_records(name: str, finish: Callable[[RecordedRun], NamedTables]) -> Analysis:
    """Return an analysis that is not a fold: its tables are computed from the run at the end."""
    return Analysis(name, _no_rows, _first, functools.partial(_finish_run, finish), reads_records=_no_records)


def _no_rows(block: RecordBlock) -> pd.DataFrame:
    return pd.DataFrame()


def _first(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return tables[0]


def _finish_run(finish: Callable[[RecordedRun], NamedTables], _: pd.DataFrame, run: RecordedRun) -> NamedTables:
    return finish(run)


def _no_records(run: RecordedRun) -> bool:
    return False


def fold(run: RecordedRun, analyses: Sequence[Analysis]) -> NamedTables:
    """Compute the tables of analyses in one pass over the records of a run, by its executor.

    Args:
        run: The run to analyse.
        analyses: The analyses; their names are distinct.

    Returns:
        The tables of all analyses by name.
    """
    stored = _stored_tables(run, analyses)
    merged = _merged_tables(run, [analysis for analysis in analyses if analysis.name not in stored])
    merged |= {name: tables[MERGED] for name, tables in stored.items() if MERGED in tables}

    def finished(analysis: Analysis) -> NamedTables:
        if analysis.name in stored and not analysis.is_fold:
            return stored[analysis.name]
        return analysis.finish(_labelled(analysis, merged.get(analysis.name), run), run)

    return {name: table for analysis in analyses for name, table in finished(analysis).items()}


def _merged_tables(run: RecordedRun, analyses: Sequence[Analysis]) -> NamedTables:
    """Return the merged tables of those of the analyses that read the records of this run."""
    wanted = {
        analysis.name: _Fold(analysis.partial, analysis.merge)
        for analysis in analyses
        if analysis.reads_records is None or analysis.reads_records(run)
    }
    merged = run.executor.reduce("fold", _partials, _merged, (wanted, run.run_labels), run_parts(run)) if wanted else {}
    for name, tables in _summary_partials(analyses, run).items():
        merged[name] = wanted[name].merge([merged[name], *tables])
    return merged


def tables_to_store(run: RecordedRun, analyses: Sequence[Analysis]) -> Iterator[tuple[str, NamedTables]]:
    """Yield of each analysis what `fold` takes in place of a packed log's records: the merged table, or all tables."""
    merged = _merged_tables(run, analyses)
    for analysis in analyses:
        if analysis.name in merged:
            yield analysis.name, {MERGED: merged.pop(analysis.name)}
        elif not analysis.is_fold:
            yield analysis.name, analysis.finish(pd.DataFrame(), run)


_STORED: Final[WeakKeyDictionary[RecordedRun, StoredTables | None]] = WeakKeyDictionary()


def _stored_tables(run: RecordedRun, analyses: Sequence[Analysis]) -> dict[str, NamedTables]:
    """Return the stored tables of a packed log by analysis."""
    if run not in _STORED:
        _STORED[run] = open_stored(run.log, code_digest())
    stored = _STORED[run]
    tables = {analysis.name: stored.read(analysis.name) for analysis in analyses} if stored else {}
    return {name: of_analysis for name, of_analysis in tables.items() if of_analysis}


@functools.cache
def code_digest() -> str:
    """Return a digest of the code of commtrace, from which tables of other code are known."""
    digest = hashlib.sha256(commtrace.__version__.encode())
    for folder in (Path(commtrace.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _summary_partials(analyses: Sequence[Analysis], run: RecordedRun) -> dict[str, list[pd.DataFrame]]:
    """Return the partial tables of the summaries of a run by the name of their analysis."""
    tables: dict[str, list[pd.DataFrame]] = defaultdict(list)
    by_name = {a.name: a for a in analyses if a.reads_records is None or a.reads_records(run)}
    for ids, process in zip(run.run_labels.processes, run.processes, strict=True):
        if process.summary is None:
            continue
        for calls in process.summary.calls(process.rank):
            columns = RecordColumns.of(_READ_FIELDS, len(calls))
            columns.fill(calls, ids)
            block = RecordBlock(columns, run.run_labels, calls["calls"], calls["exact"].astype(bool))
            for name, analysis in by_name.items():
                if analysis.reads_cells:
                    tables[name].append(analysis.partial(block))
        times = process.summary.table("times")
        rows = {name: times[name] if name not in IDS else ids.of_run(name, times[name]) for name in TIMES.names or ()}
        for name, analysis in by_name.items():
            if analysis.times_partial is not None:
                tables[name].append(analysis.times_partial(HistogramBlock(rows, run.run_labels)))
        for name, parts in tables.items():  # a few at a time, to bound memory
            tables[name] = [by_name[name].merge(parts)]
    return tables


class _Fold(NamedTuple):
    """What of an analysis is computed where the records are."""

    partial: Callable[[RecordBlock], pd.DataFrame]
    merge: Callable[[Sequence[pd.DataFrame]], pd.DataFrame]


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


_Shared: TypeAlias = tuple[Mapping[str, _Fold], RunLabels]


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


def _partials(shared: _Shared, part: RunPart) -> NamedTables:
    """Return the merged partial tables of a part."""
    folds, labels = shared
    partials = ({name: fold.partial(block) for name, fold in folds.items()} for block in read_blocks(part, labels))
    return merge_tree(functools.partial(_merged, shared), partials)


def _merged(shared: _Shared, tables: Sequence[NamedTables]) -> NamedTables:
    folds, _ = shared
    return {name: fold.merge([of_part[name] for of_part in tables]) for name, fold in folds.items()}


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
    fields = [*dict.fromkeys((*_READ_FIELDS, *fields))]
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


def _labelled(analysis: Analysis, table: pd.DataFrame | None, run: RecordedRun) -> pd.DataFrame:
    """Return the merged table, with labels or categories of them in place of the numbers in LABEL_COLUMNS."""
    if table is None:
        table = analysis.merge([analysis.partial(EMPTY_BLOCK)])
    columns: dict[str, Any] = {}
    for name in LABEL_COLUMNS:
        if name in table:
            codes: Array = table[name].to_numpy()
            labels = run.run_labels.distinct(name)
            if analysis.categorical:
                columns[name] = pd.Categorical.from_codes(codes, pd.Index(labels.tolist()))
            else:
                columns[name] = labels[codes]
    return table.assign(**columns)


_MAX_DENSE_CODES: Final = 1 << 22
_MAX_KEY: Final = 1 << 62


def group_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Group rows by columns of integers.

    Args:
        columns: Keys, each of shape (n,).

    Returns:
        The position of one row of each group, shape (groups,), and the number of each row's group, shape (n,).
    """
    numbers, groups = _dense_codes(_joint_keys(columns))
    first = np.zeros(groups, np.int64)
    first[numbers] = np.arange(len(numbers))
    return first, numbers


def positions_by_value(values: Array) -> dict[int, Array]:
    """Return the positions of each integer in an array of shape (n,), both ascending."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(values)])
    return dict(zip(ordered[firsts].tolist(), np.split(order, firsts[1:]), strict=False))


def _joint_keys(columns: Sequence[Array], *, ordered: bool = False) -> Array:
    """Return one integer for each row of columns of integers, equal for equal rows; `ordered`: and in their order."""
    keys, span = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        codes, count = _codes(column, ordered=ordered)
        if span * count > _MAX_KEY:
            keys, span = _dense_codes(keys, ordered=ordered)
        keys, span = keys * count + codes, span * count
    return keys


def _codes(column: Array, *, ordered: bool) -> tuple[Array, int]:
    """Return the column as codes from 0, and an upper bound of their number."""
    if not len(column):
        return column.astype(np.int64), 1
    low, high = int(column.min()), int(column.max())
    if high - low < _MAX_DENSE_CODES:
        return column.astype(np.int64) - low, high - low + 1
    return _dense_codes(column, ordered=ordered)


def _dense_codes(column: Array, *, ordered: bool = False) -> tuple[Array, int]:
    """Return the column as codes from 0 without gaps, and their number. Hashes: sorting takes far longer."""
    codes, values = pd.factorize(column, sort=ordered)
    return codes.astype(np.int64, copy=False), len(values)


def number_sequences(values: Array, begins: Array) -> tuple[Array, Array]:
    """Number sequences so that equal ones have the same number.

    Args:
        values: The values of all sequences, one after the other, int64 from 0.
        begins: Position of the first value of each sequence, ascending, shape (sequences,).

    Returns:
        The number of each sequence from 0, shape (sequences,), and an example of each number, a position in `begins`.
    """
    lengths = np.diff(begins, append=len(values))
    numbers = np.zeros(len(begins), np.int64)
    longer = np.arange(len(begins))
    for position in range(int(lengths.max(initial=0))):
        longer = longer[lengths[longer] > position]
        _, numbers[longer] = group_rows([numbers[longer], values[begins[longer] + position]])
    examples, numbers = group_rows([lengths, numbers])
    return numbers, examples


def concatenated_ranges(begins: Array, lengths: Array) -> Array:
    """Return the integers of ranges with these begins and lengths, one range after the other."""
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def sum_groups(values: Array, groups: Array, count: int) -> Array:
    """Return the sum of the values of each group, shape (count,), in the values' own dtype: integers stay exact."""
    result = np.zeros(count, values.dtype)
    np.add.at(result, groups, values)
    return result


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


def concat_tables(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of tables with the same columns; empty tables do not change the dtypes of others."""
    filled = [table for table in tables if len(table)] or [tables[0]]
    return filled[0] if len(filled) == 1 else pd.concat(filled, ignore_index=True)


def merge_sums(*keys: str, **how: str) -> Callable[[Sequence[pd.DataFrame]], pd.DataFrame]:
    """Return a merge to a row per combination of keys, in their order, which sums the other columns.

    Args:
        keys: Columns of integers.
        how: "min" or "max" by column, for those that are not summed.
    """
    return functools.partial(_merge_by, keys, how)


def _merge_by(keys: Sequence[str], how: Mapping[str, str], tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    table = concat_tables(tables)
    columns = {name: table[name].to_numpy() for name in table.columns}
    joint = _joint_keys([columns[name] for name in keys], ordered=True)
    order = np.argsort(joint, kind="stable")
    begins = np.flatnonzero(np.diff(joint[order], prepend=-1))
    merged = {name: columns.pop(name)[order[begins]] for name in keys}
    merged |= {name: _RULES[how.get(name, "sum")].reduceat(column[order], begins) for name, column in columns.items()}
    return pd.DataFrame(merged, copy=False)


_RULES: Final = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """Iterate over the rows of a small table as named tuples."""
    return table.itertuples(index=False)


EMPTY_BLOCK: Final = RecordBlock(
    np.zeros(0, RECORD), RecordLabels(-1, Process(Path(), -1, -1, "", ProcessTables(), ()), {}, {}, {})
)
"""A block without records, from which every partial table gets its columns."""
