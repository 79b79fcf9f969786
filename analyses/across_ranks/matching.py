"""Matching: the calls of different ranks that are one operation, a collective or a message.

Collectives of a group, and messages with the same group, source, destination and tag, form a
channel. Both recorders give an operation of a channel the same number (`seq`) on all its ranks.
Calls with the same channel and number are one instance. Ranks that left no log, ended early or
dropped records are only missing from an instance.

Not matched: one-sided calls, receives from any source for which nothing has arrived, calls of a
group that the tables do not describe, calls captured into a device graph, channels that two
processes use as the same rank, and instances with more calls than ranks, whose numbers are damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.analyses.grouping import Array, group_rows
from commtrace.analyses.record_blocks import EMPTY_BLOCK, RecordBlock, read_blocks
from commtrace.operations import operations_where
from commtrace.reading.labels import LABEL_COLUMNS, UNKNOWN, RunLabels
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.run_parts import RunPart
from commtrace.reading.segment_reader import last_records
from commtrace.reading.table_reader import RecordedGroup
from commtrace.schema import Flag, Records

NOT_MATCHED: Final = -1
"""Instance of a call that is not matched with others."""

_NOT_MATCHED_OPERATIONS: Final = (*operations_where(lambda operation: operation.is_one_sided), UNKNOWN)
_CHUNK_ROWS: Final = 1 << 20
_CODED_COLUMNS: Final = ("phase", "state", "flags")
"""Text columns whose value in a record is an index into the labels."""
_KEY_FIELDS: Final = ("seq", "group", "kind", "peer", "tag", "flags")


class Channel(NamedTuple):
    """Operations numbered together: a group's collectives, or messages with equal addresses."""

    group: RecordedGroup
    source: int = -1
    """Global rank that sends; -1: the channel holds collectives."""
    destination: int = -1
    tag: int = -1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part in each operation; a message to itself has its rank twice."""
        return self.group.ranks if self.source < 0 else (self.source, self.destination)


@dataclass(frozen=True, eq=False)
class MatchedCalls:
    """Calls of all processes as columns of shape (calls,), and the instances that they belong to.

    Attributes:
        columns: `process` (index in the log), `instance`, and the columns requested from
            `match_calls`.
        categories: Labels by column, for columns of the event table whose values are indices into these labels.
        channels: The channels of the run.
        channel: Position in `channels` of each instance, shape (instances,).
        seq: Number of each instance in its channel, shape (instances,); instances are sorted by channel and number.
    """

    columns: Mapping[str, Array]
    categories: Mapping[str, Array]
    channels: Sequence[Channel]
    channel: Array
    seq: Array

    def __len__(self) -> int:
        return len(self.columns["process"])

    def __getitem__(self, name: str) -> Array:
        """Return a column of the calls, shape (calls,)."""
        return self.columns[name]

    def rows(self, at: Array) -> MatchedCalls:
        """Return the calls with these indices, ascending. Instances keep their numbers."""
        return replace(self, columns={name: column[at] for name, column in self.columns.items()})

    def split(self, size: int) -> Iterator[MatchedCalls]:
        """Yield the calls in parts of about `size` calls, each with entire instances."""
        parts = -(-len(self) // size)
        if parts < 2:
            yield self
            return
        number = self.per_call(self.seq % parts)
        for part in range(parts):
            yield self.rows(np.flatnonzero(number == part))

    def text(self, column: str, at: Array | slice = slice(None)) -> Array:
        """Return the labels of a column of the event table, of all calls or of those with these indices."""
        return np.asarray(self.categories[column][self.columns[column][at]])

    def has_label(self, column: str, *labels: str) -> Array:
        """Return whether the label of each call is one of these, bool, shape (calls,)."""
        return np.asarray(np.isin(self.categories[column].astype(str), labels)[self.columns[column]])

    def of_process(self, process: int) -> Array:
        """Return the indices of the calls of a process, ascending, given its index in the log."""
        processes = self["process"]
        # In the column's own dtype, or the whole column would be converted.
        return np.arange(*np.searchsorted(processes, np.array([process, process + 1], processes.dtype)))

    @cached_property
    def matched(self) -> Array:
        """Indices of the calls that belong to an instance, ascending."""
        return np.flatnonzero(self["instance"] != NOT_MATCHED)

    @cached_property
    def present(self) -> Array:
        """Number of calls of each instance in the log, shape (instances,)."""
        return np.bincount(self["instance"][self.matched], minlength=len(self.channel))

    @cached_property
    def expected(self) -> Array:
        """Number of calls that each instance has when all its ranks have made theirs, shape (instances,)."""
        return np.array([len(channel.ranks) for channel in self.channels], np.int64)[self.channel]

    @cached_property
    def complete(self) -> Array:
        """Whether the log has the calls of all ranks of each instance, bool, shape (instances,)."""
        return np.asarray(self.present == self.expected)

    def per_call(self, values: Array, otherwise: int = 0) -> Array:
        """Return the value of each call's instance, given those of the instances; `otherwise` for calls without one."""
        result = np.full(len(self), otherwise, values.dtype)
        result[self.matched] = values[self["instance"][self.matched]]
        return result

    def largest(self, values: Array, start: int = 0) -> Array:
        """Return the largest of the values, shape (calls,), in each instance, int64, shape (instances,)."""
        return self._extremes(np.maximum, values, start)

    def smallest(self, values: Array) -> Array:
        """Return the smallest of the values, shape (calls,), in each instance, int64, shape (instances,)."""
        return self._extremes(np.minimum, values, np.iinfo(np.int64).max)

    def _extremes(self, extreme: np.ufunc, values: Array, start: int) -> Array:
        result = np.full(len(self.channel), start, np.int64)
        # Convert first: otherwise, `ufunc.at` takes 15 times as long.
        extreme.at(result, self["instance"][self.matched], values[self.matched].astype(np.int64, copy=False))
        return result


Derived: TypeAlias = Callable[[RecordBlock], Array]
"""A function that computes a column of the calls of a block, shape (n,)."""


def match_calls(
    run: RecordedRun,
    columns: Sequence[str],
    steps: Array | None = None,
    *,
    derived: Mapping[str, Derived] = MappingProxyType({}),
    keep: Derived | None = None,
    last: int | None = None,
) -> MatchedCalls:
    """Read the calls of a run and match them across ranks.

    Args:
        run: The run. Dry runs are matched too; they have no times.
        columns: Fields of the record (`schema.RECORD`), or text columns of the event table, such as
            "op", "role" and "site". Text becomes indices into `MatchedCalls.categories`; those of
            "phase", "state" and "flags" are the values in the record.
        steps: Steps to read, shape (steps,); None: all.
        derived: Further columns by name, computed while the records are read.
        keep: Function that returns whether to keep each call of a block, bool, shape (n,), such as `every_nth`;
            None: all.
        last: Number of records to read of each process, its last ones; None: all.

    Returns:
        The calls, process by process in the order of the log. Memory: 12 bytes per call plus the
        columns.
    """
    reader = CallReader(columns, derived, steps, keep)
    parts = run.parts(lambda process: process.segments if last is None else last_records(process.segments, last))
    table = CallTable(run.labels, reader, sum(segment.count for part in parts for segment in part.segments))
    for block in chain.from_iterable(run.executor.map("match", partial(_read_part, reader, run.labels), parts)):
        table.append(block)
    return table.part(0)


def every_nth(n: int, block: RecordBlock) -> Array:
    """Return whether each call's number in its channel is a multiple of n, bool, shape (n,): entire operations."""
    return np.asarray(block["seq"] % n == 0)


class CallTable:
    """Table of calls as they are read, in one or more parts.

    Part i of n has the operations whose number in their channel is i modulo n. Several parts are kept in files, so
    that a run may have more calls than fit into memory.

    Args:
        labels: Labels of the run.
        reader: Reads the calls.
        calls: Maximum number of calls.
        parts: Number of parts.
    """

    def __init__(self, labels: RunLabels, reader: CallReader, calls: int, parts: int = 1) -> None:
        self.reader, self._labels, self._stop = reader, labels, 0
        dtypes = {name: column.dtype for name, column in reader.calls(EMPTY_BLOCK).columns.items()}
        self._row = np.dtype([*dtypes.items(), ("key", np.int64)])
        self._files: list[IO[bytes]] = [TemporaryFile() for _ in range(parts)] if parts > 1 else []
        # Memory that is never written to is not used: rows that are not selected cost none.
        self._columns = {name: np.empty(0 if self._files else calls, self._row[name]) for name in self._row.names or ()}
        self._channel_numbers: dict[tuple[int, ...], int] = {}
        self._users: dict[tuple[int, ...], int] = {}
        self._matched: MatchedCalls | None = None

    def append(self, block: BlockCalls) -> None:
        """Append the calls of a block."""
        channel = np.array([*map(self._channel_number, block.uses), NOT_MATCHED], np.int64)[block.use]
        columns = {**block.columns, "key": np.where(channel == NOT_MATCHED, NOT_MATCHED, channel << 32 | block.seq)}
        if not self._files:
            rows = slice(self._stop, self._stop + len(block.use))
            self._stop = rows.stop
            for name, column in columns.items():
                self._columns[name][rows] = column
            return
        table = np.empty(len(block.use), self._row)
        for name, column in columns.items():
            table[name] = column
        for number, file in enumerate(self._files):
            file.write(table[block.seq % len(self._files) == number].tobytes())

    def parts(self) -> Iterator[MatchedCalls]:
        """Yield the calls of each part."""
        return map(self.part, range(max(1, len(self._files))))

    def part(self, number: int) -> MatchedCalls:
        """Return the calls of a part, matched."""
        if self._files:
            self._files[number].seek(0)
            table = np.frombuffer(self._files[number].read(), self._row)
            return self._match({name: np.ascontiguousarray(table[name]) for name in self._row.names or ()})
        if self._matched is None:
            self._matched = self._match({name: column[: self._stop] for name, column in self._columns.items()})
            self._columns = {}
        return self._matched

    def _channel_number(self, use: _Use) -> int:
        """Return the number of a channel; NOT_MATCHED if another process uses it as the same rank."""
        number = self._channel_numbers.setdefault(use[:_ADDRESS], len(self._channel_numbers))
        return number if self._users.setdefault(use[:-1], use[-1]) == use[-1] else NOT_MATCHED

    def _match(self, columns: dict[str, Array]) -> MatchedCalls:
        labels = self._labels
        channels = [Channel(labels.groups[group], *addresses) for group, *addresses in self._channel_numbers]
        columns["instance"], channel_of, seq = _instances(columns.pop("key"), channels)
        categories = {
            name: (labels.categories if name in _CODED_COLUMNS else labels.distinct)(name)
            for name in self.reader.label_columns
        }
        return MatchedCalls(columns, categories, channels, channel_of, seq)


_Use: TypeAlias = tuple[int, ...]
"""A use of a channel by a process: the group's id in the run, source, destination and tag (the channel; -1 for
collectives), the process's rank, whether it receives, and the process."""
_ADDRESS: Final = 4
"""Length of the part of a use that identifies the channel."""


class BlockCalls(NamedTuple):
    """Calls of a block.

    Attributes:
        columns: Columns of the calls, each of shape (n,).
        uses: Uses of channels.
        use: Position in `uses` of each call, -1 for those that are not matched, shape (n,).
        seq: Number of each call in its channel, int64, shape (n,).
    """

    columns: dict[str, Array]
    uses: list[_Use]
    use: Array
    seq: Array


class CallReader:
    """Reader of calls, picklable.

    Args:
        columns: As in `match_calls`.
        derived: As in `match_calls`.
        steps: As in `match_calls`.
        keep: As in `match_calls`.
    """

    def __init__(
        self,
        columns: Sequence[str],
        derived: Mapping[str, Derived],
        steps: Array | None = None,
        keep: Derived | None = None,
    ) -> None:
        self._steps, self._derived, self._keep = steps, dict(derived), keep
        self._fields = [name for name in columns if name not in LABEL_COLUMNS]
        self.label_columns = [name for name in columns if name in LABEL_COLUMNS]
        self.record_fields = [*_KEY_FIELDS, *self._fields]

    def select(self, records: Records) -> Records:
        """Return the records of the requested steps."""
        return records if self._steps is None else records[np.isin(records["step"], self._steps)]

    def calls(self, block: RecordBlock) -> BlockCalls:
        """Return the calls of a block."""
        if self._keep is not None:
            block = block.rows(np.flatnonzero(self._keep(block)))
        columns = {"process": block["process"].astype(np.int32)}
        columns |= {name: compute(block) for name, compute in self._derived.items()}
        columns |= {name: block[name] for name in self._fields}
        for name in self.label_columns:
            ids = block.labels.ids(name, block)
            columns[name] = (ids if name in _CODED_COLUMNS else block.labels.codes(name, ids)).astype(np.int32)
        return BlockCalls(columns, *_channel_uses(block), block["seq"].astype(np.int64))


def _read_part(reader: CallReader, labels: RunLabels, part: RunPart) -> list[BlockCalls]:
    return [reader.calls(block) for block in read_blocks(part, labels, reader.select, reader.record_fields)]


def _channel_uses(block: RecordBlock) -> tuple[list[_Use], Array]:
    """Return `uses` and `use` of `BlockCalls`."""
    labels = block.labels
    sends, receives, mpi, not_matched = (
        np.isin(labels.categories(column).astype(str), values)[block["kind"]]
        for column, values in (("op", "send"), ("op", "recv"), ("api", "mpi"), ("op", _NOT_MATCHED_OPERATIONS))
    )
    message = sends | receives
    from_anywhere = message & ((block["peer"] < 0) | (mpi & (block["tag"] < 0)))
    usable = ~(not_matched | from_anywhere | ((block["flags"] & int(Flag.CAPTURED)) != 0))
    usable &= labels.group_sizes(block["group"]) > 0
    peer, tag = (np.where(message, block[name], -1) for name in ("peer", "tag"))
    rank = np.where(message, block["rank"], -1)
    source, destination = np.where(sends, rank, peer), np.where(sends, peer, rank)
    columns = [block["group"], source, destination, tag, block["rank"], receives, block["process"]]
    first, numbers = group_rows([*columns, usable])
    chosen = np.flatnonzero(usable[first])
    positions = np.full(len(first), -1, np.int32)
    positions[chosen] = np.arange(len(chosen))
    rows = zip(*(column[first[chosen]].tolist() for column in columns), strict=True)
    return [*rows], positions[numbers]


def _instances(keys: Array, channels: Sequence[Channel]) -> tuple[Array, Array, Array]:
    """Return `instance` of each call, and `channel` and `seq` of each instance (`MatchedCalls`)."""
    codes, distinct = _dense_codes(keys, len(channels))
    sizes = np.array([len(channel.ranks) for channel in channels] + [0], np.int64)
    calls = np.bincount(codes, minlength=len(distinct))
    usable = (calls > 0) & (distinct != NOT_MATCHED)
    usable &= calls <= sizes[distinct >> 32]
    numbers = np.where(usable, np.cumsum(usable) - 1, NOT_MATCHED).astype(np.int32)
    for rows in _chunks(len(codes)):
        codes[rows] = numbers[codes[rows]]
    return codes.astype(np.int32, copy=False), distinct[usable] >> 32, distinct[usable] & 0xFFFFFFFF


def _dense_codes(keys: Array, channels: int) -> tuple[Array, Array]:
    """Return a code >= 0 for each key, and the key of each code, ascending; some are unused."""
    lengths = np.zeros(channels + 1, np.int64)
    for rows in _chunks(len(keys)):
        np.maximum.at(lengths, (keys[rows] >> 32) + 1, (keys[rows] & 0xFFFFFFFF) + 1)  # channel of NOT_MATCHED: -1
    lengths[0] = 1
    if lengths.sum() > 2 * len(keys) + _CHUNK_ROWS:
        distinct, codes = np.unique(keys, return_inverse=True)
        return codes, distinct
    # Recorders number without large gaps: use a code for each possible key. Sorting is far slower.
    first = np.cumsum(lengths) - lengths
    codes = np.empty(len(keys), np.int32)
    for rows in _chunks(len(keys)):
        channel = (keys[rows] >> 32) + 1
        codes[rows] = first[channel] + np.where(channel > 0, keys[rows] & 0xFFFFFFFF, 0)
    distinct = np.arange(lengths.sum()) + np.repeat((np.arange(channels + 1) - 1 << 32) - first, lengths)
    distinct[0] = NOT_MATCHED
    return codes, distinct


def _chunks(rows: int) -> Iterator[slice]:
    """Return slices that cover `rows` rows, to limit the size of intermediate values."""
    return (slice(first, first + _CHUNK_ROWS) for first in range(0, rows, _CHUNK_ROWS))


def host_numbers(run: RecordedRun) -> tuple[list[str], Array]:
    """Return the hosts of a run, and the index of each process's host among them.

    Each boot of a host counts as a host: its processes share a monotonic clock.
    """
    boots: dict[tuple[str, str], int] = {}
    of_process = [(process.host, str(process.tables.process.get("boot_id"))) for process in run.processes]
    numbers = [boots.setdefault(boot, len(boots)) for boot in of_process]
    return [host for host, _ in boots], np.array(numbers, np.int32)
