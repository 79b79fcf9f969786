"""Trace of a run for ui.perfetto.dev: `commtrace export --format perfetto`.

    host node17                     a process
      rank 3                        a group of tracks
        thread 1                    calls, nested in phases, nested in steps
        in flight                   from the begin of each operation to its end, and in it the program's wait for it
        bytes in flight, bandwidth  counters
      rank 4 ...

Operations that overlap get further tracks of the same name, which the viewer draws as one. Arrows (flows) connect the
calls that are one operation, in the order in which they began. Times are ns since the first call, on the hosts' aligned
clocks. The messages are those of the package `perfetto`: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from commtrace.analyses.across_ranks.clocks import clocks_of
from commtrace.analyses.across_ranks.matching import NOT_MATCHED, MatchedCalls, host_numbers, match_calls
from commtrace.analyses.across_ranks.waits import COLUMNS as WAIT_COLUMNS
from commtrace.analyses.across_ranks.waits import Waits, waits_of
from commtrace.analyses.call_times import exact_ends
from commtrace.analyses.fold_engine import EVALUATION, Array, group_rows
from commtrace.analyses.timeline import wall_clock_offsets
from commtrace.errors import LogError, MissingLibraryError
from commtrace.formatting import format_ranks
from commtrace.output_files import atomic_write
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import Flag, Phase

_FIELDS: Final = (
    "t_begin", "t_return", "t_wait", "t_start", "t_end", "payload", "seq", "step", "peer", "tag", "batch", "thread",
    "clock", "flags",
)  # fmt: skip
_LABELS: Final = {
    "group_ranks": "group", "role": "dimension", "dtype": "dtype", "site": "call site", "state": "state",
}  # fmt: skip
"""Columns of the event table that are arguments of a call, and their names in the viewer."""
_NUMBERS: Final = {"payload": "payload bytes", "seq": "number in group", "step": "step", "peer": "peer", "tag": "tag"}
"""Fields of the record that are arguments where they are not -1."""
_FLOW, _FLOW_ENDS = "flow_ids", "terminating_flow_ids"
_STEP_NAMES: Final = {-1: "start-up", EVALUATION: "evaluation"}
_STEP, _PHASE, _CALL = 0, 1, 2
"""Levels of the spans of a thread."""
_SEQUENCE: Final = 1


class _AlikeSpans(NamedTuple):
    """The packet that begins spans with the same name and labels, and the places in it of what differs."""

    packet: Any
    event: Any
    numbers: list[tuple[Any, Array]]
    """Argument, and its value for every call."""
    flow: Any
    """The list that holds the number of the arrow."""


class _Span(NamedTuple):
    """A span of time on a track. Spans of a level follow each other, and lie within one of the level below."""

    begin: int
    end: int
    name: str
    level: int
    call: int = -1
    """Position of its call; -1 for steps, phases and waits."""


def export_perfetto(
    run: RecordedRun,
    out: Path,
    *,
    force: bool = False,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> int:
    """Write the trace of a run to a file, which appears under its name only when it is complete.

    Args:
        run: The run. All its ranks are read, also for the trace of a few: arrows and aligned clocks need them.
        out: The file.
        force: Whether to replace an existing file.
        ranks: Ranks to write; None: all.
        steps: Steps to write, -1 for those before the first one; None: all.

    Returns:
        The number of calls written.

    Raises:
        LogError: The run is a dry run, or none of its calls is wanted.
        OutputError: The file exists or cannot be written.
        MissingLibraryError: The package perfetto is not installed.
    """
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; export a recorded run")
    messages = _perfetto_messages()
    columns = [*_FIELDS, *_LABELS, "op", "phase"]
    calls = match_calls(run, columns, None if steps is None else np.array(steps, np.int64), derived=WAIT_COLUMNS)
    waits = waits_of(calls, clocks_of(run))
    times = _Times(run, calls)
    rank_of = np.array([process.rank for process in run.processes], np.int64)
    wanted = times.known & ((calls["flags"] & int(Flag.CAPTURED)) == 0)
    if ranks is not None:
        wanted &= np.isin(rank_of[calls["process"]], ranks)
    if not wanted.any():
        raise LogError(f"{run.log.path}: no call of these ranks and steps; it has ranks {format_ranks(run.ranks)}")
    with atomic_write(out, force=force) as part, open(part, "xb") as file:
        _Writer(messages, file, calls, times, waits, wanted).write(run)
    return int(wanted.sum())


class _Times:
    """Times of calls in ns since the first call of the run, each of shape (calls,)."""

    def __init__(self, run: RecordedRun, calls: MatchedCalls) -> None:
        process = calls["process"]
        offsets = wall_clock_offsets(run)
        by_wall_clock = np.array([offsets.get(number, 0) for number in range(len(run.processes))], np.int64)[process]
        on_reference = clocks_of(run).to_reference(process, calls["t_begin"])
        if on_reference is None:
            self.known = np.isin(process, [*offsets]) & (calls["t_begin"] > 0)
            shift = by_wall_clock
        else:
            self.known, shift = calls["t_begin"] > 0, on_reference - calls["t_begin"]
        first = (calls["t_begin"] + shift)[self.known].min(initial=np.iinfo(np.int64).max)
        earliest = np.flatnonzero(self.known & (calls["t_begin"] + shift == first))[:1]
        self.first_unix_ns = int((calls["t_begin"] + by_wall_clock)[earliest].max(initial=0)) if offsets else 0
        self.begin, self.returned, self.end, self.wait, self.start = (
            np.where(calls[name] > 0, calls[name] + shift - first, -1)
            for name in ("t_begin", "t_return", "t_end", "t_wait", "t_start")
        )
        self.started = np.maximum(self.begin, self.start)
        last = np.zeros(len(run.processes), np.int64)
        np.maximum.at(last, process, np.maximum.reduce([self.begin, self.returned, self.end]))
        # A call that never returned is drawn to the last time that its process has in the log.
        self.returned = np.where(self.returned >= self.begin, self.returned, last[process])


class _Writer:
    """Writer of one trace: first the tracks of a rank, then their events, rank by rank."""

    def __init__(
        self, messages: Any, file: IO[bytes], calls: MatchedCalls, times: _Times, waits: Waits, wanted: Array
    ) -> None:
        self._messages = messages
        self._file, self._calls, self._times, self._wanted = file, calls, times, wanted
        self._interned: dict[tuple[str, str], int] = {}
        self._uuid = 0
        self._end = self._packet()
        self._end.track_event.type = self._end.track_event.TYPE_SLICE_END
        self._alike_spans: dict[tuple[str, int, str], _AlikeSpans] = {}
        self._numbers = {title: calls[name] for name, title in _NUMBERS.items()}
        for title, values in (("waiting for ranks, ns", waits.wait), ("transfer, ns", waits.transfer)):
            self._numbers[title] = np.where(waits.known, values, -1)
        labels = [calls[name] for name in _LABELS] + [values >= 0 for values in self._numbers.values()]
        self._first_of_combination, self._combinations = group_rows(labels)
        self._instances, self._last = calls["instance"].tolist(), self._last_calls().tolist()
        self._phases, self._names = calls.text("phase"), calls.text("op")
        self._exact = exact_ends(calls)

    def write(self, run: RecordedRun) -> None:
        first = self._packet()
        first.sequence_flags = first.SEQ_INCREMENTAL_STATE_CLEARED
        clocks = first.clock_snapshot.clocks
        for clock_id, moment in ((6, 0), (1, self._times.first_unix_ns)):  # the trace's own clock, the time of day
            clocks.add(clock_id=clock_id, timestamp=moment)
        self._write(first)
        hosts, host_of = host_numbers(run)
        processes = np.unique(self._calls["process"][self._wanted])
        for host in np.unique(host_of[processes]).tolist():
            uuid = self._track(process={"pid": host + 1, "process_name": f"host {hosts[host]}"})
            for process in processes[host_of[processes] == host].tolist():
                self._write_process(uuid, run.processes[process].rank, process)

    def _write_process(self, host: int, rank: int, process: int) -> None:
        calls, times = self._calls, self._times
        at = np.flatnonzero(self._wanted & (calls["process"] == process))
        at = at[np.argsort(times.begin[at], kind="stable")]
        group = self._track(parent_uuid=host, name=f"rank {rank}")
        for thread in np.unique(calls["thread"][at]).tolist():
            own = at[calls["thread"][at] == thread]
            for lane in _lanes(own, times.begin[own], times.returned[own]):
                self._write_spans(group, f"thread {thread}", self._thread(lane))
        ended = at[times.end[at] >= times.begin[at]]
        ended = ended[np.argsort(times.started[ended], kind="stable")]
        for lane in _lanes(ended, times.started[ended], times.end[ended]):
            self._write_spans(group, "in flight", self._in_flight(lane))
        self._write_counters(group, ended)

    def _thread(self, at: Array) -> Iterator[_Span]:
        """Yield the steps, phases and calls of a thread, each before what it encloses."""
        begin, end = self._times.begin[at], self._times.returned[at]
        phases, evaluates = self._phases[at], self._phases[at] == Phase.EVALUATION.name.lower()
        steps = np.where(evaluates, EVALUATION, self._calls["step"][at])
        new_step = _changes(steps)
        new_phase = new_step | _changes(phases)
        step_end, phase_end = (_end_of_runs(new, end).tolist() for new in (new_step, new_phase))
        for i, (first, last, name) in enumerate(zip(begin.tolist(), end.tolist(), self._names[at], strict=True)):
            if new_step[i]:
                yield _Span(first, step_end[i], _STEP_NAMES.get(int(steps[i]), f"step {steps[i]}"), _STEP)
            if new_phase[i]:
                yield _Span(first, phase_end[i], phases[i], _PHASE)
            yield _Span(first, last, name, _CALL, int(at[i]))

    def _in_flight(self, at: Array) -> Iterator[_Span]:
        """Yield the operations of a track, and in each the wait of the program for its end, if it waited."""
        columns = self._times.started[at], self._times.end[at], self._times.wait[at], self._names[at], at
        for begin, end, wait, name, call in zip(*(column.tolist() for column in columns), strict=True):
            yield _Span(begin, end, name, 0, call)
            if begin <= wait < end:
                yield _Span(wait, end, "program waits", 1)

    def _write_spans(self, group: int, name: str, spans: Iterable[_Span]) -> None:
        track = self._track(parent_uuid=group, name=name)
        open_spans: list[_Span] = []
        for span in spans:
            while open_spans and open_spans[-1].level >= span.level:
                self._write_end(track, open_spans.pop().end)
            self._write_begin(track, span)
            open_spans.append(span)
        while open_spans:
            self._write_end(track, open_spans.pop().end)

    def _write_begin(self, track: int, span: _Span) -> None:
        call = span.call
        if call < 0:
            alike = self._alike(span.name, -1, "")
        else:
            instance = self._instances[call] if span.level == _CALL else NOT_MATCHED
            flow = "" if instance == NOT_MATCHED else _FLOW_ENDS if self._last[instance] == call else _FLOW
            alike = self._alike(span.name, int(self._combinations[call]), flow)
            if flow:
                alike.flow[0] = instance + 1
            for annotation, values in alike.numbers:
                annotation.int_value = int(values[call])
        alike.event.track_uuid = track
        alike.packet.timestamp = span.begin
        self._write(alike.packet)

    def _alike(self, name: str, combination: int, flow: str) -> _AlikeSpans:
        """Return the packet that begins spans that are alike.

        Args:
            name: Their name.
            combination: Number of the labels of their calls; -1: they are of no call.
            flow: Field of the event that holds the number of their arrow; "": they have none.
        """
        key = name, combination, flow
        if key not in self._alike_spans:
            packet = self._packet()
            event = packet.track_event
            event.type = event.TYPE_SLICE_BEGIN
            event.name_iid = self._intern("event_names", name)
            numbers = []
            if combination >= 0:
                at = self._first_of_combination[combination : combination + 1]
                for column, title in _LABELS.items():
                    annotation = self._annotation(event, title)
                    text = str(self._calls.text(column, at)[0])
                    annotation.string_value_iid = self._intern("debug_annotation_string_values", text)
                for title, values in self._numbers.items():
                    if values[at[0]] >= 0:
                        numbers.append((self._annotation(event, title), values))
            if flow:
                getattr(event, flow).append(0)
            self._alike_spans[key] = _AlikeSpans(packet, event, numbers, getattr(event, flow) if flow else [])
        return self._alike_spans[key]

    def _annotation(self, event: Any, title: str) -> Any:
        return event.debug_annotations.add(name_iid=self._intern("debug_annotation_names", title))

    def _write_end(self, track: int, moment: int) -> None:
        self._end.timestamp, self._end.track_event.track_uuid = moment, track
        self._write(self._end)

    def _write_counters(self, group: int, at: Array) -> None:
        started, end, payload = self._times.started[at], self._times.end[at], self._calls["payload"][at]
        self._write_counter(group, "bytes in flight", "bytes", started, end, payload)
        exact = self._exact[at] & (end > started)
        rate = payload[exact] / (end[exact] - started[exact])  # bytes per ns are GB/s
        self._write_counter(group, "bandwidth", "GB/s", started[exact], end[exact], rate)

    def _write_counter(self, group: int, name: str, unit: str, begin: Array, end: Array, values: Array) -> None:
        """Write a counter that is, at each moment, the sum of the values of the spans that it lies in."""
        if not len(values):
            return
        track = self._track(parent_uuid=group, name=name, counter={"unit_name": unit})
        moments, at = np.unique(np.concatenate([begin, end]), return_inverse=True)
        changes = np.zeros(len(moments), values.dtype)
        np.add.at(changes, at, np.concatenate([values, -values]))
        spans = np.zeros(len(moments), np.int64)
        np.add.at(spans, at, np.repeat([1, -1], len(values)))
        sums = np.where(np.cumsum(spans) > 0, np.cumsum(changes), 0)  # sums of fractions do not end at exactly 0
        packet = self._packet()
        event = packet.track_event
        event.type, event.track_uuid = event.TYPE_COUNTER, track
        for moment, value in zip(moments.tolist(), sums.tolist(), strict=True):
            packet.timestamp = moment
            event.double_counter_value = value
            self._write(packet)

    def _last_calls(self) -> Array:
        """Return the position of the call of each instance at which its arrow ends, of those that are written."""
        calls = self._calls
        at = np.flatnonzero(self._wanted & (calls["instance"] != NOT_MATCHED))
        at = at[np.argsort(self._times.begin[at], kind="stable")]
        last = np.full(len(calls.channel), -1, np.int64)
        last[calls["instance"][at]] = at
        return last

    def _track(self, **fields: Any) -> int:
        """Write the description of a new track, and return its number."""
        self._uuid += 1
        packet = self._packet()
        packet.track_descriptor.MergeFrom(self._messages.TrackDescriptor(uuid=self._uuid, **fields))
        self._write(packet)
        return self._uuid

    def _intern(self, kind: str, text: str) -> int:
        """Return the number that stands for a text in the trace."""
        if (kind, text) not in self._interned:
            number = self._interned[kind, text] = len(self._interned) + 1
            packet = self._packet()
            value = text.encode() if kind == "debug_annotation_string_values" else text
            field = "str" if kind == "debug_annotation_string_values" else "name"
            getattr(packet.interned_data, kind).add(iid=number, **{field: value})
            self._write(packet)
        return self._interned[kind, text]

    def _packet(self) -> Any:
        packet = self._messages.TracePacket()
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.sequence_flags = packet.SEQ_NEEDS_INCREMENTAL_STATE
        return packet

    def _write(self, packet: Any) -> None:
        data = packet.SerializeToString()
        self._file.write(_HEADS[len(data)] if len(data) < len(_HEADS) else _head(len(data)))
        self._file.write(data)


def _perfetto_messages() -> Any:
    try:
        return import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ImportError:
        raise MissingLibraryError(
            "--format perfetto: needs the package perfetto; pip install 'commtrace[perfetto]'"
        ) from None


def _head(length: int) -> bytes:
    """Return what precedes an element of `Trace.packet` of some length: the number of the field, then the length."""
    result = bytearray(b"\x0a")
    while length >= 128:
        result.append(length & 127 | 128)
        length >>= 7
    return bytes([*result, length])


_HEADS: Final = [_head(length) for length in range(512)]


def _changes(values: Array) -> Array:
    """Return whether each value differs from the one before, bool, shape (n,); the first does."""
    return np.concatenate([[True], values[1:] != values[:-1]]) if len(values) else np.zeros(0, bool)


def _end_of_runs(new: Array, end: Array) -> Array:
    """Return for each position the latest `end` of its run; runs begin where `new` is true."""
    firsts = np.flatnonzero(new)
    return np.repeat(np.maximum.reduceat(end, firsts), np.diff(np.append(firsts, len(end)))) if len(end) else end


def _lanes(at: Array, begin: Array, end: Array) -> list[Array]:
    """Distribute calls to tracks on which none overlaps another, each to the first that is free.

    Args:
        at: Calls by begin, shape (n,).
        begin: When they begin, shape (n,).
        end: When they end, shape (n,).

    Returns:
        The calls of each track, by begin.
    """
    lanes = np.zeros(len(at), np.int64)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for i, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, int(lanes[i])))
    return [at[lanes == lane] for lane in range(int(lanes.max(initial=-1)) + 1)]
