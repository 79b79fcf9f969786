"""Matching: the calls of different ranks that are one operation, a collective or a message.

Collectives of a group, and messages with the same group, source, destination and tag, form a channel: both recorders
number the operations of a channel alike on all its ranks (`seq`). Calls with the same channel and number are one
instance. Ranks without a log, that ended early or that dropped records are only missing from an instance.

Not matched: one-sided calls, receives from any source that nothing has arrived for, calls of a group that the tables do
not describe, calls captured into a device graph, channels that two processes use as the same rank, and instances with
more calls than ranks, whose numbers are damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from commtrace.analyses.fold_engine import EMPTY_BLOCK, Array, RecordBlock, group_rows
from commtrace.reading.labels import LABEL_COLUMNS, UNKNOWN, RecordLabels
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import BLOCK
from commtrace.reading.table_reader import RecordedGroup
from commtrace.schema import RECORD, Flag, Records

ONE_SIDED: Final = ("put", "get", "accumulate")
NOT_MATCHED: Final = -1
"""Instance of a call that is not matched with others."""

_NOT_MATCHED_OPERATIONS: Final = (*ONE_SIDED, "sendrecv", UNKNOWN)
_FEW: Final = 1 << 20
_KEY_FIELDS: Final = ("seq", "group", "kind", "peer", "tag", "flags")


class Channel(NamedTuple):
    """Operations that their ranks number alike: the collectives of a group, or messages with the same addresses."""

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
        columns: `process` (position in the log), `instance`, and what `match_calls` was asked for.
        categories: Labels by column, for columns of the event table whose values are positions in these labels.
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

    def text(self, column: str, at: Array | slice = slice(None)) -> Array:
        """Return the labels of a column of the event table, of all calls or of those at some positions."""
        return np.asarray(self.categories[column][self.columns[column][at]])

    def of_process(self, process: int) -> Array:
        """Return the positions of the calls of the process at some position of the log, ascending."""
        processes = self["process"]
        # Of the column's own type, or all of it would be converted.
        return np.arange(*np.searchsorted(processes, np.array([process, process + 1], processes.dtype)))

    @cached_property
    def matched(self) -> Array:
        """Positions of the calls that belong to an instance, ascending."""
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
        complete: Array = self.present == self.expected
        return complete

    def largest(self, values: Array, start: int = 0) -> Array:
        """Return the largest of the values, shape (calls,), in each instance, int64, shape (instances,)."""
        result = np.full(len(self.channel), start, np.int64)
        np.maximum.at(result, self["instance"][self.matched], values[self.matched])
        return result

    def smallest(self, values: Array) -> Array:
        """Return the smallest of the values, shape (calls,), in each instance, int64, shape (instances,)."""
        result = np.full(len(self.channel), np.iinfo(np.int64).max)
        np.minimum.at(result, self["instance"][self.matched], values[self.matched])
        return result


Derived: TypeAlias = Callable[[RecordBlock], Array]
"""A function that computes a column of the calls of a block, shape (n,)."""


def match_calls(
    run: RecordedRun,
    columns: Sequence[str],
    steps: Array | None = None,
    *,
    derived: Mapping[str, Derived] = MappingProxyType({}),
    part: tuple[int, int] = (0, 1),
) -> MatchedCalls:
    """Read the calls of a run and match them across ranks.

    Args:
        run: The run. Dry runs are matched too; they have no times.
        columns: Fields of the record (`schema.RECORD`), or columns of the event table with text, such as "op", "role"
            and "site", which become positions in `MatchedCalls.categories`.
        steps: Steps whose calls are wanted, shape (steps,); None: all.
        derived: Further columns by name, computed while the records are read.
        part: (i, n): only operations whose number in their channel is i modulo n, of a log too long for memory.

    Returns:
        The calls, process by process in the order of the log. Memory: 12 bytes a call and those of the columns.
    """
    return _Matcher(columns, derived, part).read(run, steps)


class _Matcher:
    def __init__(self, columns: Sequence[str], derived: Mapping[str, Derived], part: tuple[int, int]) -> None:
        self._derived, self._part = derived, part
        self._fields = [name for name in columns if name not in LABEL_COLUMNS]
        self._labels = {name: _Numbers() for name in columns if name in LABEL_COLUMNS}
        self._channels = _Numbers()
        self._users: dict[tuple[int, int, bool], int] = {}
        """Process that uses a channel as a rank: (number of the channel, rank, whether it receives)."""

    def read(self, run: RecordedRun, steps: Array | None) -> MatchedCalls:
        segments = [segment.count for process in run.processes for segment in process.segments]
        dtypes = {name: RECORD[name] for name in self._fields}
        dtypes |= {name: compute(EMPTY_BLOCK).dtype for name, compute in self._derived.items()}
        dtypes |= dict.fromkeys(["process", *self._labels], np.dtype(np.int32)) | {"key": np.dtype(np.int64)}
        # Memory that nothing is written to is not used: rows that are not wanted cost none.
        columns = {name: np.empty(sum(segments), dtype) for name, dtype in dtypes.items()}
        memory = bytearray(min(BLOCK, max(segments, default=0)) * RECORD.itemsize)
        stop = 0
        for labels, process in zip(run.labels, run.processes, strict=True):
            to_number = {name: numbers.of(labels.categories(name)) for name, numbers in self._labels.items()}
            for segment in process.segments:
                if steps is not None and 0 <= segment.last_step < min(steps, default=0):
                    continue
                for records in segment.blocks(memory=memory):
                    wanted = self._wanted(records, steps)
                    block = RecordBlock(wanted, labels)
                    rows = slice(stop, stop := stop + len(wanted))
                    columns["key"][rows] = self._keys(block, process.tables.groups)
                    columns["process"][rows] = labels.number
                    for name, compute in self._derived.items():
                        columns[name][rows] = compute(block)
                    for name in self._fields:
                        columns[name][rows] = wanted[name]
                    for name, numbers in to_number.items():
                        columns[name][rows] = numbers[labels.index(LABEL_COLUMNS[name], labels.ids(name, wanted))]
        columns = {name: column[:stop] for name, column in columns.items()}
        channels = [*self._channels.values]
        columns["instance"], channel, seq = _instances(columns.pop("key"), channels)
        categories = {name: np.array([*numbers.values], object) for name, numbers in self._labels.items()}
        return MatchedCalls(columns, categories, channels, channel, seq)

    def _wanted(self, records: Records, steps: Array | None) -> Records:
        if steps is not None:
            records = records[np.isin(records["step"], steps)]
        number, parts = self._part
        return records if parts == 1 else records[records["seq"] % parts == number]

    def _keys(self, block: RecordBlock, groups: Mapping[int, RecordedGroup]) -> Array:
        """Return channel and number of each call as one integer, NOT_MATCHED for those that have none."""
        labels = block.labels
        fields = {name: block.records[name].astype(np.int64) for name in _KEY_FIELDS}
        at = labels.index("kind", fields["kind"])
        sends, receives, mpi, not_matched = (
            np.isin(labels.categories(column).astype(str), values)[at]
            for column, values in (("op", "send"), ("op", "recv"), ("api", "mpi"), ("op", _NOT_MATCHED_OPERATIONS))
        )
        message = sends | receives
        from_anywhere = message & ((fields["peer"] < 0) | (mpi & (fields["tag"] < 0)))
        usable = ~(not_matched | from_anywhere | ((fields["flags"] & Flag.CAPTURED) != 0))
        addresses = [np.where(message, fields[name], -1) for name in ("peer", "tag")]
        first, numbers = group_rows([fields["group"], *addresses, sends, receives, usable])
        channels = np.full(len(first), NOT_MATCHED, np.int64)
        for number, row in enumerate(first.tolist()):
            group = groups.get(int(fields["group"][row]))
            if usable[row] and group is not None:
                peer, tag = (int(values[row]) for values in addresses)
                source, destination = (labels.rank, peer) if sends[row] else (peer, labels.rank)
                channel = Channel(group, source, destination, tag) if message[row] else Channel(group)
                channels[number] = self._used_by(channel, labels, bool(receives[row]))
        known = channels[numbers]
        return np.where(known == NOT_MATCHED, NOT_MATCHED, known << 32 | fields["seq"])

    def _used_by(self, channel: Channel, labels: RecordLabels, receives: bool) -> int:
        """Return the number of a channel; NOT_MATCHED if another process uses it as the same rank."""
        number = self._channels.number(channel)
        user = self._users.setdefault((number, labels.rank, receives), labels.number)
        return number if user == labels.number else NOT_MATCHED


def _instances(keys: Array, channels: Sequence[Channel]) -> tuple[Array, Array, Array]:
    """Return the instance of each call, shape (n,), and of each instance channel and number, shape (instances,)."""
    codes, distinct = _dense_codes(keys, len(channels))
    sizes = np.array([len(channel.ranks) for channel in channels] + [0], np.int64)
    calls = np.bincount(codes, minlength=len(distinct))
    usable = (calls > 0) & (distinct != NOT_MATCHED)
    usable &= calls <= sizes[distinct >> 32]
    numbers = np.where(usable, np.cumsum(usable) - 1, NOT_MATCHED).astype(np.int32)
    return numbers[codes], distinct[usable] >> 32, distinct[usable] & 0xFFFFFFFF


def _dense_codes(keys: Array, channels: int) -> tuple[Array, Array]:
    """Return a code of each key from 0, and the key of each code, ascending; some may stand for no key."""
    lengths = np.zeros(channels + 1, np.int64)
    for rows in _parts(len(keys)):
        np.maximum.at(lengths, (keys[rows] >> 32) + 1, (keys[rows] & 0xFFFFFFFF) + 1)  # channel of NOT_MATCHED: -1
    lengths[0] = 1
    if lengths.sum() > 2 * len(keys) + _FEW:
        distinct, codes = np.unique(keys, return_inverse=True)
        return codes, distinct
    # Numbers without large gaps, as recorders give them: a code for each possible one. Sorting would take far longer.
    first = np.cumsum(lengths) - lengths
    codes = np.empty(len(keys), np.int32)
    for rows in _parts(len(keys)):
        channel = (keys[rows] >> 32) + 1
        codes[rows] = first[channel] + np.where(channel > 0, keys[rows] & 0xFFFFFFFF, 0)
    distinct = np.arange(lengths.sum()) + np.repeat((np.arange(channels + 1) - 1 << 32) - first, lengths)
    distinct[0] = NOT_MATCHED
    return codes, distinct


def _parts(rows: int) -> Iterator[slice]:
    """Yield the parts of so many rows: what is computed between two columns need not exist of all rows at once."""
    return (slice(first, first + _FEW) for first in range(0, rows, _FEW))


class _Numbers:
    """Numbers from 0 for values, in the order in which they were seen."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.values.setdefault(value, len(self.values))

    def of(self, values: Array) -> Array:
        """Return the numbers of values, int32, shape (n,)."""
        return np.array([self.number(value) for value in values.tolist()], np.int32)


def host_numbers(run: RecordedRun) -> tuple[list[str], Array]:
    """Return the hosts of a run, each boot of a host for itself, and the position of each process's host in them.

    Processes of one host share a monotonic clock.
    """
    boots = _Numbers()
    numbers = [boots.number((process.host, str(process.tables.process.get("boot_id")))) for process in run.processes]
    return [host for host, _ in boots.values], np.array(numbers, np.int64)
