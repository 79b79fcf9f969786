"""Trace of a run for ui.perfetto.dev: `commtrace export --format perfetto`.

    host node17                     a process
      rank 3                        a group of tracks
        thread 1                    calls, nested in phases, nested in steps
        in flight                   each operation from start to end, and within it the program's wait for it
        bytes in flight, bandwidth  counters
      rank 4 ...

Operations that overlap get further tracks of the same name, which the viewer draws as one. Arrows (flows) connect the
calls of one operation, in the order in which they began. Times are ns since the first call, on the hosts' aligned
clocks. The package `perfetto` defines the messages: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

import numpy as np

from commtrace.analyses import protobuf_columns as protobuf
from commtrace.analyses.across_ranks.call_times import COLUMNS as TIME_COLUMNS
from commtrace.analyses.across_ranks.call_times import CallTimes
from commtrace.analyses.across_ranks.matching import NOT_MATCHED, MatchedCalls, host_numbers, match_calls
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.call_spans import AlignedTimes, changes, ends_of_runs, lanes, no_calls, require_times
from commtrace.analyses.grouping import Array, group_rows
from commtrace.analyses.protobuf_columns import Column, constant, varint, where
from commtrace.analyses.record_blocks import EVALUATION
from commtrace.durations import exact_ends
from commtrace.errors import MissingLibraryError
from commtrace.output_files import atomic_write
from commtrace.schema import Flag, Phase

_FIELDS: Final = (
    "t_begin", "t_return", "t_wait", "t_start", "t_end", "payload", "seq", "step", "peer", "tag", "batch", "thread",
    "clock", "flags",
)  # fmt: skip
_LABELS: Final = {
    "group_ranks": "group", "role": "dimension", "dtype": "dtype", "site": "call site", "state": "state",
}  # fmt: skip
"""Columns of the event table that become debug annotations, and their labels."""
_NUMBERS: Final = {"payload": "payload bytes", "seq": "sequence number", "step": "step", "peer": "peer", "tag": "tag"}
"""Fields of the record that become debug annotations, unless -1, and their labels."""
_STEP_NAMES: Final = {-1: "start-up", EVALUATION: "evaluation"}
_SEQUENCE: Final = 1
_BLOCK: Final = 4096
"""Calls encoded at a time, so that their packets fit into a processor's cache."""

_Lanes: TypeAlias = dict[int, Array]
"""The calls of each track, ordered by begin, without overlaps."""


def export_perfetto(
    run: AnalysedRun,
    out: Path,
    *,
    force: bool = False,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> int:
    """Write the trace of a run to a file, atomically.

    Args:
        run: The run. All its ranks are read even if few are written, because arrows and aligned clocks need them.
        out: The file.
        force: Whether to replace an existing file.
        ranks: Ranks to write; None: all.
        steps: Steps to write, -1 for those before the first one; None: all.

    Returns:
        The number of calls written.

    Raises:
        LogError: The run is a dry run, or has no call of these ranks and steps.
        OutputError: The file exists or cannot be written.
        MissingLibraryError: The package perfetto is not installed.
    """
    require_times(run)
    messages = _perfetto_messages()
    columns = [*_FIELDS, *_LABELS, "op", "phase"]
    calls = match_calls(run, columns, None if steps is None else np.array(steps, np.int64), derived=TIME_COLUMNS)
    waits = CallTimes.of(calls, run.clocks)
    times = AlignedTimes(run, calls, run.clocks)
    rank_of = np.array([process.rank for process in run.processes], np.int64)
    wanted = times.known & ((calls["flags"] & int(Flag.CAPTURED)) == 0)
    if ranks is not None:
        wanted &= np.isin(rank_of[calls["process"]], ranks)
    if not wanted.any():
        raise no_calls(run)
    with atomic_write(out, force=force) as part, open(part, "xb") as file:
        _Writer(messages, file, calls, times, waits, wanted).write(run)
    return int(wanted.sum())


class _Writer:
    """Writer of one trace: first all tracks, with the counters, then the spans of the calls, a block at a time."""

    def __init__(
        self, messages: Any, file: IO[bytes], calls: MatchedCalls, times: AlignedTimes, waits: CallTimes, wanted: Array
    ) -> None:
        self._messages, self._event = messages, messages.TrackEvent
        self._file, self._calls, self._times, self._wanted = file, calls, times, wanted
        self._interned: dict[tuple[str, str], int] = {}
        self._new_texts = messages.InternedData()
        self._uuid = 0
        first, self._text_index = group_rows([calls[name] for name in ("op", *_LABELS)])
        self._texts = protobuf.stacked([self._texts_of(call) for call in first[:, None]])
        numbers = {title: calls[name] for name, title in _NUMBERS.items()}
        for title, values in (("wait for ranks (ns)", waits.wait), ("transfer (ns)", waits.transfer)):
            numbers[title] = np.where(waits.known, values, -1)
        self._numbers: list[tuple[Column, Array]] = []
        for title, values in numbers.items():
            name = messages.DebugAnnotation(name_iid=self._intern("debug_annotation_names", title))
            self._numbers.append((constant(name.SerializeToString()), values))
        self._last = self._last_calls()
        self._exact = exact_ends(calls)

    def write(self, run: AnalysedRun) -> None:
        times_of_day = ((6, 0), (1, self._times.first_unix_ns))  # the trace's own clock, and the time of day
        self._write_packet(
            sequence_flags=self._messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED,
            clock_snapshot={"clocks": [{"clock_id": clock, "timestamp": moment} for clock, moment in times_of_day]},
        )
        hosts, host_of = host_numbers(run)
        processes = np.unique(self._calls["process"][self._wanted])
        threads: _Lanes = {}
        in_flight: _Lanes = {}
        for host in np.unique(host_of[processes]).tolist():
            uuid = self._track(process={"pid": host + 1, "process_name": f"host {hosts[host]}"})
            for process in processes[host_of[processes] == host].tolist():
                group = self._track(parent_uuid=uuid, name=f"rank {run.processes[process].rank}")
                at = self._calls.of_process(process)
                at = at[self._wanted[at]]
                at = at[np.argsort(self._times.begin[at], kind="stable")]
                threads |= self._thread_tracks(group, at)
                in_flight |= self._in_flight_tracks(group, at)
        self._write_threads(*_rows(threads))
        self._write_in_flight(*_rows(in_flight))

    def _thread_tracks(self, group: int, at: Array) -> _Lanes:
        begin, returned, threads = self._times.begin, self._times.returned, self._calls["thread"][at]
        tracks: _Lanes = {}
        for thread in np.unique(threads).tolist():
            tracks |= self._tracks(group, f"thread {thread}", at[threads == thread], begin, returned)
        return tracks

    def _in_flight_tracks(self, group: int, at: Array) -> _Lanes:
        """Write the tracks of the completed operations of a process, and its counters."""
        at = at[self._times.end[at] >= self._times.begin[at]]
        at = at[np.argsort(self._times.started[at], kind="stable")]
        tracks = self._tracks(group, "in flight", at, self._times.started, self._times.end)
        started, end, payload = self._times.started[at], self._times.end[at], self._calls["payload"][at]
        self._write_counter(group, "bytes in flight", "bytes", started, end, payload)
        exact = self._exact[at] & (end > started)
        rate = payload[exact] / (end[exact] - started[exact])  # bytes per ns are GB/s
        self._write_counter(group, "bandwidth", "GB/s", started[exact], end[exact], rate)
        return tracks

    def _tracks(self, group: int, name: str, at: Array, begin: Array, end: Array) -> _Lanes:
        """Write as many tracks of one name as needed to draw the calls, ordered by begin, without overlaps."""
        return {self._track(parent_uuid=group, name=name): lane for lane in lanes(at, begin[at], end[at])}

    def _write_threads(self, tracks: Array, at: Array) -> None:
        """Write the calls of threads, nested in phases, nested in steps."""
        begin, end, phases = self._times.begin[at], self._times.returned[at], self._calls["phase"][at]
        phase_names = self._calls.categories["phase"]
        steps = np.where((phase_names == Phase.EVALUATION.name.lower())[phases], EVALUATION, self._calls["step"][at])
        first_of_step = changes(tracks) | changes(steps)
        first_of_phase = first_of_step | changes(phases)
        last_of_step, last_of_phase = (np.append(first[1:], True) for first in (first_of_step, first_of_phase))
        step_end, phase_end = (ends_of_runs(first, end) for first in (first_of_step, first_of_phase))
        distinct, step_of = np.unique(steps, return_inverse=True)
        names_of_steps = self._event_names(_STEP_NAMES.get(step, f"step {step}") for step in distinct.tolist())
        names_of_phases = self._event_names(phase_names)
        self._write_new_texts()
        for block in _blocks(len(at)):
            track = self._track_of(tracks[block])
            step, phase = (
                [varint(self._event.NAME_IID_FIELD_NUMBER, names[numbers[block]])]
                for names, numbers in ((names_of_steps, step_of), (names_of_phases, phases))
            )
            call = [*self._call(at[block]), *self._arrow(at[block])]
            self._write_rows(
                where(first_of_step[block], self._begin(track, begin[block], step)),
                where(first_of_phase[block], self._begin(track, begin[block], phase)),
                self._begin(track, begin[block], call),
                self._end(track, end[block]),
                where(last_of_phase[block], self._end(track, phase_end[block])),
                where(last_of_step[block], self._end(track, step_end[block])),
            )

    def _write_in_flight(self, tracks: Array, at: Array) -> None:
        """Write operations from start to end, and within each the program's wait for it, if any."""
        begin, end, wait = self._times.started[at], self._times.end[at], self._times.wait[at]
        waits = (begin <= wait) & (wait < end)
        [waiting] = self._event_names(["program waits"])
        self._write_new_texts()
        name = constant(self._event(name_iid=int(waiting)).SerializeToString())
        for block in _blocks(len(at)):
            track = self._track_of(tracks[block])
            self._write_rows(
                self._begin(track, begin[block], self._call(at[block])),
                where(waits[block], self._begin(track, np.maximum(wait[block], 0), [name])),
                where(waits[block], self._end(track, end[block])),
                self._end(track, end[block]),
            )

    def _call(self, at: Array) -> list[Column]:
        """Return the fields of the events that begin calls: their names and arguments."""
        fields = [protobuf.chosen(self._texts, self._text_index[at])]
        for name, values in self._numbers:
            present = values[at] >= 0
            if present.any():
                value = varint(self._messages.DebugAnnotation.INT_VALUE_FIELD_NUMBER, np.where(present, values[at], 0))
                fields += where(present, protobuf.message(self._event.DEBUG_ANNOTATIONS_FIELD_NUMBER, [name, value]))
        return fields

    def _arrow(self, at: Array) -> list[Column]:
        """Return the field of the arrow through each matched call. An arrow ends at the last call of its operation."""
        instance = self._calls["instance"][at].astype(np.int64)
        ends = self._last[instance] == at if len(self._last) else np.zeros(len(at), bool)
        field = np.where(ends, self._event.TERMINATING_FLOW_IDS_FIELD_NUMBER, self._event.FLOW_IDS_FIELD_NUMBER)
        return where(instance != NOT_MATCHED, [protobuf.fixed64(field, instance + 1)])

    def _begin(self, track: Column, moments: Array, fields: Sequence[Column]) -> list[Column]:
        """Return packets that begin spans. Names are interned, so a reader that missed them skips the packets."""
        packet = self._messages.TracePacket
        flags = constant(packet(sequence_flags=packet.SEQ_NEEDS_INCREMENTAL_STATE).SerializeToString())
        return self._packet(self._event.TYPE_SLICE_BEGIN, track, moments, fields, [flags])

    def _end(self, track: Column, moments: Array) -> list[Column]:
        return self._packet(self._event.TYPE_SLICE_END, track, moments)

    def _packet(
        self, kind: int, track: Column, moments: Array, fields: Sequence[Column] = (), flags: Sequence[Column] = ()
    ) -> list[Column]:
        """Return packets with events of a type on tracks."""
        packet = self._messages.TracePacket
        event = [constant(self._event(type=kind).SerializeToString()), track, *fields]
        sequence = constant(packet(trusted_packet_sequence_id=_SEQUENCE).SerializeToString())
        timestamp = varint(packet.TIMESTAMP_FIELD_NUMBER, moments)
        columns = [timestamp, sequence, *flags, *protobuf.message(packet.TRACK_EVENT_FIELD_NUMBER, event)]
        return protobuf.message(self._messages.Trace.PACKET_FIELD_NUMBER, columns)

    def _track_of(self, tracks: Array) -> Column:
        return varint(self._event.TRACK_UUID_FIELD_NUMBER, tracks)

    def _write_counter(self, group: int, name: str, unit: str, begin: Array, end: Array, values: Array) -> None:
        """Write a counter: at each moment, the sum of the values of the spans in progress."""
        if not len(values):
            return
        track = self._track(parent_uuid=group, name=name, counter={"unit_name": unit})
        moments, at = np.unique(np.concatenate([begin, end]), return_inverse=True)
        changes = np.zeros(len(moments), values.dtype)
        np.add.at(changes, at, np.concatenate([values, -values]))
        spans = np.zeros(len(moments), np.int64)
        np.add.at(spans, at, np.repeat([1, -1], len(values)))
        sums = np.where(np.cumsum(spans) > 0, np.cumsum(changes), 0)  # floating-point sums do not end at exactly 0
        for block in _blocks(len(moments)):
            value = protobuf.fixed64(self._event.DOUBLE_COUNTER_VALUE_FIELD_NUMBER, sums[block].astype(np.float64))
            tracks = self._track_of(np.array([track]))
            self._write_rows(self._packet(self._event.TYPE_COUNTER, tracks, moments[block], [value]))

    def _last_calls(self) -> Array:
        """Return the index of the last written call of each instance, at which its arrow ends."""
        calls = self._calls
        at = np.flatnonzero(self._wanted & (calls["instance"] != NOT_MATCHED))
        at = at[np.argsort(self._times.begin[at], kind="stable")]
        last = np.full(len(calls.channel), -1, np.int64)
        last[calls["instance"][at]] = at
        return last

    def _track(self, **fields: Any) -> int:
        """Write the description of a new track, and return its number."""
        self._uuid += 1
        self._write_packet(track_descriptor={"uuid": self._uuid, **fields})
        return self._uuid

    def _texts_of(self, call: Array) -> bytes:
        """Return the fields of the name and texts that all calls like the one at `call`, shape (1,), have."""
        arguments = []
        for column, title in _LABELS.items():
            text = self._intern("debug_annotation_string_values", str(*self._calls.text(column, call)))
            arguments.append({"name_iid": self._intern("debug_annotation_names", title), "string_value_iid": text})
        [name] = self._event_names(self._calls.text("op", call))
        return bytes(self._event(name_iid=int(name), debug_annotations=arguments).SerializeToString())

    def _event_names(self, names: Iterable[str]) -> Array:
        """Return the ids of interned event names."""
        return np.array([self._intern("event_names", name) for name in names], np.int64)

    def _intern(self, kind: str, text: str) -> int:
        """Return the id of an interned text."""
        if (kind, text) not in self._interned:
            number = self._interned[kind, text] = len(self._interned) + 1
            value = {"str": text.encode()} if kind == "debug_annotation_string_values" else {"name": text}
            getattr(self._new_texts, kind).add(iid=number, **value)
        return self._interned[kind, text]

    def _write_new_texts(self) -> None:
        """Write the strings that were interned since the last call."""
        self._write_packet(interned_data=self._new_texts)
        self._new_texts.Clear()

    def _write_packet(self, **fields: Any) -> None:
        packet = {"trusted_packet_sequence_id": _SEQUENCE, **fields}
        self._file.write(self._messages.Trace(packet=[packet]).SerializeToString())

    def _write_rows(self, *packets: Sequence[Column]) -> None:
        """Write the packets of each row."""
        self._file.write(protobuf.joined([column for columns in packets for column in columns]))


def _perfetto_messages() -> Any:
    try:
        return import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except ImportError:
        raise MissingLibraryError.of_extra("--format perfetto", "perfetto", "perfetto") from None


def _rows(tracks: _Lanes) -> tuple[Array, Array]:
    """Return track and index of the calls of all tracks, shape (n,)."""
    numbers = np.array([*tracks], np.int64).repeat([len(calls) for calls in tracks.values()])
    return numbers, np.concatenate([np.zeros(0, np.int64), *tracks.values()])


def _blocks(rows: int) -> Iterator[slice]:
    """Return slices that cover `rows` rows in blocks."""
    return (slice(first, first + _BLOCK) for first in range(0, rows, _BLOCK))
