"""Files of the NCCL Inspector and the RCCL Inspector (`NCCL_INSPECTOR_ENABLE=1`): JSON lines, one file per process.

A line is one call that has ended. Up to version 4.2 of the format, each line has its communicator and process:

    {"header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
     "metadata": {"dump_timestamp_us": 1748030377748202, "hostname": "node17", "pid": 1639453, ...},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1407, "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
                   "coll_timing_source": "kernel_gpu", ...}}

From version 4.3 on, they are only on a line with `dump_stats`, which says how many of the next lines they are for.

- `rank` is the position in the communicator. Ranks of the job are positions in the communicator that has all ranks, and
  members of the others follow from the files of all processes.
- `coll_sn` counts the calls of one operation of a communicator, not those of the communicator.
- The size is that of one rank's share for AllGather and ReduceScatter (`inspectorComputeOpBw` multiplies it by the
  number of ranks). That of uint8 wraps around, because the Inspector does not know this type.
- The duration is the device's. Only files of `NCCL_INSPECTOR_DUMP_VERBOSE=1` also say when calls were; without it, the
  calls of a file are a summary.

Sources: NVIDIA/nccl, plugins/profiler/inspector (README.md, inspector.cc, inspector_plugin.cc, inspector_json.cc).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from commtrace.formatting import format_plural
from commtrace.operations import MESSAGES
from commtrace.schema import Clock, Flag, State

from .events import (
    MOST_RANKS,
    Event,
    ImportedCall,
    ImportedGroup,
    ImportedProcess,
    ImportedTotal,
    NotKnown,
    NotRecorded,
    Problem,
)
from .json_lines import Lines, json_object
from .json_stream import natural
from .kineto_sizes import StatedSize
from .operation_names import UNKNOWN_OPERATION, operation_of

_MARK: Final = re.compile(rb'"(coll_perf|p2p_perf|dump_stats|inspector_output_format_version)"')
_CONTEXT: Final = re.compile(rb'"header"\s*:\s*(\{[^{}]*\})\s*,\s*"metadata"\s*:\s*(\{[^{}]*\})')
_RECORDS: Final = {"coll_perf": "coll_records", "p2p_perf": "p2p_records", "proxy_trace": "proxy_records"}
"""Kind of a line -> number of its lines, in the `dump_stats` before them."""
_LARGEST: Final = 1 << 50
_LONGEST_US: Final = 1 << 40

_TIMED_BY: Final = {"kernel_gpu": Clock.DEVICE}
"""Source of a duration -> what observed the end. A host's observation, or one that is not named, may be late."""


def is_inspector(path: Path, head: bytes) -> bool:
    """Return whether a file with these first bytes was written by the Inspector."""
    return head.lstrip()[:1] == b"{" and b'"traceEvents"' not in head and _MARK.search(head) is not None


class Communicator(NamedTuple):
    """A line's communicator: its hash, its name, its number of ranks, and this process's position in it."""

    id: str
    name: str
    ranks: int
    position: int


class ProcessKey(NamedTuple):
    """A line's process."""

    host: str
    pid: int


class _Context(NamedTuple):
    communicator: Communicator
    process: ProcessKey


class _Moments(NamedTuple):
    """When a call began and returned on the host, and when its first kernel started and its last stopped, us."""

    begun: int
    returned: int
    started: int
    stopped: int


class Communicators:
    """The communicators in the files of a run: the rank of each process, and the ranks of each communicator.

    Attributes:
        world_size: Number of ranks of the communicator that has all ranks; None if there is none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._sizes: dict[str, int] = {}
        self._members: dict[str, dict[int, ProcessKey]] = defaultdict(dict)
        """Process by communicator and position, in order of appearance."""
        for path in paths:
            self._read(path)
        self._world = self._find_world()
        self.world_size = self._sizes[self._world] if self._world is not None else None
        self._ranks = self._number_processes()
        self._groups: dict[str, ImportedGroup | None] = {}

    def _read(self, path: Path) -> None:
        seen: set[tuple[bytes, bytes]] = set()
        for _, line in Lines(path):
            match = _CONTEXT.search(line)
            if match is None:
                continue
            # The time of the dump changes from line to line; the rest is new once per communicator.
            key = match[1], re.sub(rb'"dump_timestamp_us"\s*:\s*\d+', b"", match[2])
            if key not in seen:
                seen.add(key)
                context = _context({"header": json_object(match[1]), "metadata": json_object(match[2])})
                if context is not None:
                    communicator = context.communicator
                    self._sizes.setdefault(communicator.id, communicator.ranks)
                    self._members[communicator.id].setdefault(communicator.position, context.process)

    def _find_world(self) -> str | None:
        """Return the communicator that has all ranks: the first of the largest, unless others have other processes."""
        if not self._sizes:
            return None
        most = max(self._sizes.values())
        world, *others = (name for name, size in self._sizes.items() if size == most)
        processes = {*self._members[world].values()}
        is_one_of_several = any(processes.isdisjoint(self._members[other].values()) for other in others)
        return None if is_one_of_several else world

    def _number_processes(self) -> dict[ProcessKey, list[int]]:
        """Return the ranks of each process: those in the world, else free numbers in order of appearance."""
        ranks: dict[ProcessKey, list[int]] = defaultdict(list)
        for position, process in (self._members[self._world] if self._world is not None else {}).items():
            ranks[process].append(position)
        used = {rank for positions in ranks.values() for rank in positions}
        free = (rank for rank in range(MOST_RANKS) if rank not in used)
        for members in self._members.values():
            for process in members.values():
                if process not in ranks:
                    ranks[process].append(next(free))
        return ranks

    def rank(self, communicator: Communicator, process: ProcessKey) -> int | None:
        """Return the rank that made a call; None if it is one of several in a process, and its line does not say which.

        Processes of several ranks, such as those of nccl-tests with `-g 8`, have one file.
        """
        ranks = self._ranks.get(process, ())
        if len(ranks) == 1:
            return ranks[0]
        position = communicator.position
        return position if communicator.ranks == self.world_size and position in ranks else None

    def is_in_world(self, process: ProcessKey) -> bool:
        """Return whether the world has the process, so that its rank is that of the job."""
        return self._world is not None and process in self._members[self._world].values()

    def group(self, communicator: Communicator) -> ImportedGroup | None:
        """Return the group of a communicator; None if the files do not have all of its processes."""
        if communicator.id not in self._groups:
            self._groups[communicator.id] = self._group(communicator)
        return self._groups[communicator.id]

    def _group(self, communicator: Communicator) -> ImportedGroup | None:
        size, members = self._sizes.get(communicator.id, 0), self._members[communicator.id]
        ranks: list[int | None] = [*range(size)]
        if communicator.id != self._world:
            ranks = [
                self.rank(communicator._replace(position=position), members[position]) if position in members else None
                for position in range(size)
            ]
        known = [rank for rank in ranks if rank is not None]
        if len({*known}) != size or communicator.ranks != size:
            return None
        name = "" if communicator.name == "unknown" else communicator.name
        return ImportedGroup(tuple(known), communicator.id, name, "nccl")


def survey(paths: Sequence[Path], _completing: Sequence[Path]) -> Callable[[Path], Iterator[Event]]:
    """Read the communicators of all files of a run, and return what yields the events of one.

    Raises:
        ImportFileError: A file cannot be read.
    """
    return partial(_events, Communicators(paths))


def events(path: Path) -> Iterator[Event]:
    """Yield the process of a file, its calls, and what is not known.

    Raises:
        ImportFileError: The file cannot be read.
    """
    return survey([path], [])(path)


def _events(communicators: Communicators, path: Path) -> Iterator[Event]:
    lines = Lines(path)
    calls = _Calls(communicators)
    for number, line in lines:
        yield from calls.of_line(number, json_object(line))
    yield from calls.rest()
    if lines.problem:
        yield Problem(lines.problem, "calls after that are missing", "cut")


class _Counts:
    """What is counted of one process: its calls by communicator and operation, and what is not known of them."""

    def __init__(self, process: ImportedProcess) -> None:
        self.process = process
        self.numbers: dict[tuple[str, str], list[int]] = {}
        """First and last number, and number of calls, by communicator and operation."""
        self.without_group = self.without_payload = self.without_moment = self.timed_by_host = 0
        self.messages = self.unmatched_messages = 0

    def count(self, communicator: str, operation: str, number: int) -> None:
        """Count a call by its number."""
        first_last = self.numbers.setdefault((communicator, operation), [number, number, 0])
        first_last[:] = min(number, first_last[0]), max(number, first_last[1]), first_last[2] + 1

    @property
    def gaps(self) -> int:
        """Number of calls that the file does not have between those that it has, by their numbers."""
        return sum(max(0, last - first + 1 - calls) for first, last, calls in self.numbers.values())


class _Calls:
    """The calls of a file, line by line."""

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self._lines = _LineContext()
        self._counts: dict[tuple[ProcessKey, int], _Counts] = {}
        self._overwritten: dict[tuple[ProcessKey, int], dict[tuple[str, str], int]] = defaultdict(dict)
        """By process, communicator and kind of call."""
        self._current: tuple[ProcessKey, int] | None = None
        self._has_moments: bool | None = None
        """Whether the file says when calls were, by its first call."""
        self._first_unusable = self._unusable = self._without_rank = 0

    def of_line(self, number: int, row: dict[str, Any] | None) -> Iterator[Event]:
        """Yield the events of a line, given its number and object; None: it is none."""
        context = None if row is None else self._lines.context(row)
        if row is None or context is None:
            self._leave_out(number)
            return
        rank = self._communicators.rank(context.communicator, context.process)
        if rank is None:
            self._without_rank += 1
            return
        key = context.process, rank
        stats, prefix = row.get("dump_stats"), "coll" if "coll_perf" in row else "p2p"
        perf = row.get(f"{prefix}_perf")
        if isinstance(stats, dict):
            overwritten = self._overwritten[key]
            for kind in ("coll", "p2p"):
                total, place = natural(stats.get(f"{kind}_dropped_total")) or 0, (context.communicator.id, kind)
                overwritten[place] = max(total, overwritten.get(place, 0))
        elif isinstance(perf, dict) and isinstance(perf.get(prefix), str):
            moments = _moments(perf.get("event_trace_ts"), prefix)
            if self._has_moments is None:
                self._has_moments = moments is not None
            if key not in self._counts:
                self._counts[key] = _Counts(self._process(context, rank, row, moments))
            if key != self._current:
                self._current = key
                yield self._counts[key].process
            yield self._call(perf, prefix, context, moments, self._counts[key])
        elif "proxy_trace" not in row:
            self._leave_out(number)

    def _leave_out(self, number: int) -> None:
        self._unusable += 1
        self._first_unusable = self._first_unusable or number

    def _process(
        self, context: _Context, rank: int, row: Mapping[str, Any], moments: _Moments | None
    ) -> ImportedProcess:
        metadata = row.get("metadata")
        version = metadata.get("inspector_output_format_version") if isinstance(metadata, dict) else None
        return ImportedProcess(
            rank=rank,
            world_size=self._communicators.world_size,
            host=context.process.host,
            pid=context.process.pid,
            tool="NCCL or RCCL Inspector",
            moment_ns=moments.begun * 1000 if moments is not None else 0,
            clock_is_wall=moments is not None,
            facts={"versions": {"inspector_format": version}} if isinstance(version, str) else {},
        )

    def _call(
        self, perf: Mapping[str, Any], prefix: str, context: _Context, moments: _Moments | None, counts: _Counts
    ) -> Event:
        name, communicator = str(perf[prefix]), context.communicator
        op = "all_gather" if name == "AllGatherV" else operation_of(name) or UNKNOWN_OPERATION
        size = _size(op, name, natural(perf.get(f"{prefix}_msg_size_bytes")), communicator.ranks)
        number, group = natural(perf.get(f"{prefix}_sn")), self._communicators.group(communicator)
        if number is not None:
            counts.count(communicator.id, op if prefix == "coll" else prefix, number)
        counts.without_group += group is None
        counts.without_payload += size.payload is None
        duration_ns = _duration_ns(perf.get(f"{prefix}_exec_time_us"))
        clock = _TIMED_BY.get(str(perf.get(f"{prefix}_timing_source")), Clock.TEST) if duration_ns else Clock.NONE
        counts.timed_by_host += clock is Clock.TEST
        counts.messages += op in MESSAGES
        call = ImportedCall(
            kind=(op, _variant(name, perf, prefix), "nccl", "", ""),
            group=group,
            payload=size.payload,
            local=size.local,
            seq=number if op not in MESSAGES else None,
            seq_of_operation=prefix == "coll",
            peer=self._peer(perf.get(f"{prefix}_peer"), group, context, counts),
            flags=int(size.flags),
            clock=clock,
            state=State.COMPLETE if duration_ns else State.UNOBSERVABLE,
        )
        if not self._has_moments:
            return ImportedTotal(call, in_flight_ns=[duration_ns] if duration_ns else [])
        if moments is None:
            counts.without_moment += 1
            return replace(call, clock=Clock.NONE, state=State.UNOBSERVABLE)
        begun, returned, started, stopped = (moment * 1000 for moment in moments)
        # The kernels' starts are seen when they happen; the device's duration is exact.
        end = started + duration_ns if clock is Clock.DEVICE else max(started, stopped)
        return replace(call, t_begin=begun, t_return=returned, t_start=started, t_end=end if duration_ns else 0)

    def _peer(self, position: Any, group: ImportedGroup | None, context: _Context, counts: _Counts) -> int:
        """Return the global rank of the other end of a message; -1 where it is not known.

        Messages are numbered by their order between two ranks. After messages that were overwritten, numbers would not
        be those of the other rank, so that messages without a peer, which are not matched, are all that is certain.
        """
        if group is None or type(position) is not int or not 0 <= position < len(group.ranks):
            return -1
        if self._overwritten[context.process, counts.process.rank or 0].get((context.communicator.id, "p2p")):
            counts.unmatched_messages += 1
            return -1
        return group.ranks[position]

    def rest(self) -> Iterator[Event]:
        """Yield what is not known of each process, and what is wrong with the file."""
        for key, counts in self._counts.items():
            yield counts.process
            yield from self._not_known(counts, sum(self._overwritten[key].values()))
        if not self._counts:
            return
        if self._unusable:
            yield Problem(
                f"{self._unusable:,} lines are no call of the Inspector, the first is line {self._first_unusable:,}",
                "they are left out",
            )
        if self._without_rank:
            yield Problem(
                f"{self._without_rank:,} calls are of a process with several ranks, and do not say of which",
                "they are left out; run one process per device",
            )

    def _not_known(self, counts: _Counts, overwritten: int) -> Iterator[Event]:
        process = counts.process
        if not self._communicators.is_in_world(ProcessKey(process.host, process.pid or 0)):
            yield NotKnown(f"its rank: no communicator in the files has all ranks; it was numbered {process.rank}")
        if not self._has_moments:
            yield NotKnown("when its calls were, and their order: NCCL_INSPECTOR_DUMP_VERBOSE=1 records it")
        else:
            yield NotKnown("exactly when its kernels started: a thread of the host looked; their durations are exact")
        if counts.without_moment:
            yield NotKnown(f"when {counts.without_moment:,} of its calls were, and how long they took")
        if counts.timed_by_host:
            yield NotKnown(f"the device's duration of {counts.timed_by_host:,} of its calls: the host timed them")
        if counts.without_payload:
            yield NotKnown(f"the payload of {counts.without_payload:,} of its calls")
        if counts.without_group:
            yield NotKnown(
                f"the ranks of the group of {counts.without_group:,} of its calls: import the files of all ranks"
            )
        if overwritten:
            yield NotRecorded(overwritten)
            yield NotKnown(
                f"{overwritten:,} calls that the Inspector overwrote before it wrote them: raise "
                "NCCL_INSPECTOR_DUMP_COLL_RING_SIZE, or write more often"
            )
        if counts.gaps > overwritten:
            yield NotKnown(
                f"{counts.gaps - overwritten:,} calls between those in its file, by their numbers: it leaves out those "
                "of less than NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES"
            )
        if counts.unmatched_messages:
            messages = format_plural(counts.unmatched_messages, "message")
            yield NotKnown(f"the peers of {messages} after those that were overwritten")
        if not counts.messages:
            yield NotKnown("sends and receives: the file has none; NCCL_INSPECTOR_ENABLE_P2P=1 records them")
        yield NotKnown("calls of less than NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, 8,192 B by default, and barriers")
        yield NotKnown("steps, call sites, purposes, element types, and roots of broadcasts and reduces")


class _LineContext:
    """Communicator and process of each line: its own, or those of the `dump_stats` before it (version 4.3)."""

    def __init__(self) -> None:
        self._last: _Context | None = None
        self._remaining: dict[str, int] = {}

    def context(self, row: Mapping[str, Any]) -> _Context | None:
        """Return the context of a line; None for a line without one."""
        if "header" in row or "metadata" in row:
            context, stats = _context(row), row.get("dump_stats")
            is_marker = isinstance(stats, dict)
            self._last = context if is_marker else None
            self._remaining = {
                kind: natural(stats.get(name)) or 0 for kind, name in _RECORDS.items() if isinstance(stats, dict)
            }
            return context
        kind = next((kind for kind in _RECORDS if kind in row), "")
        if self._remaining.get(kind, 0) < 1:
            self._last = None
            return None
        self._remaining[kind] -= 1
        return self._last


def _context(row: Mapping[str, Any]) -> _Context | None:
    header, metadata = row.get("header"), row.get("metadata")
    if not isinstance(header, dict) or not isinstance(metadata, dict):
        return None
    ranks, position = natural(header.get("n_ranks")), natural(header.get("rank"))
    pid = natural(metadata.get("pid"))
    if ranks is None or position is None or not position < ranks < MOST_RANKS or pid is None or pid >= 1 << 31:
        return None
    communicator = Communicator(str(header.get("id")), str(header.get("comm_name", "unknown")), ranks, position)
    return _Context(communicator, ProcessKey(str(metadata.get("hostname") or ""), pid))


def _size(op: str, name: str, stated: int | None, ranks: int) -> StatedSize:
    """Return the size of a call by the convention of nccl-tests.

    Args:
        op: The operation.
        name: NCCL's name of it.
        stated: Bytes in the file: of one rank's share for AllGather and ReduceScatter.
        ranks: Number of ranks of the communicator.
    """
    if stated is None or stated >= _LARGEST or name == "AllGatherV" or op in ("all_to_all", UNKNOWN_OPERATION):
        return StatedSize(flags=Flag.UNEVEN if name == "AllGatherV" else 0)
    if op in ("all_gather", "reduce_scatter"):
        return StatedSize(stated * ranks, stated)
    return StatedSize(stated, 0)


def _variant(name: str, perf: Mapping[str, Any], prefix: str) -> str:
    """Return NCCL's name of a call with the algorithm and protocol, where it states them: "AllReduce RING LL"."""
    chosen = (perf.get(f"{prefix}_{which}") for which in ("algo", "proto"))
    return " ".join([name, *(text for text in chosen if isinstance(text, str) and text != "unknown")])[:80]


def _duration_ns(value: Any) -> int:
    """Return a duration in us as ns; 0 where it is not known."""
    return round(value * 1000) if type(value) in (int, float) and 0 < value < _LONGEST_US else 0


def _moments(trace: Any, prefix: str) -> _Moments | None:
    """Return when a call was, from its trace of events; None where it is not known."""
    if not isinstance(trace, dict):
        return None
    kernels = trace.get("kernel_events")
    channels = [row for row in kernels if isinstance(row, dict)] if isinstance(kernels, list) else []
    started = [moment for row in channels if (moment := _moment(row.get("kernel_start_ts")))]
    stopped = [moment for row in channels if (moment := _moment(row.get("kernel_stop_ts")))]
    begun, returned = (_moment(trace.get(f"{prefix}_{name}_ts")) for name in ("start", "stop"))
    return _Moments(begun, max(begun, returned), min(started), max(stopped)) if begun and started and stopped else None


def _moment(value: Any) -> int:
    return natural(value, 1 << 53) or 0
