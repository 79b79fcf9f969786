"""The trace for ui.perfetto.dev, read back with Perfetto's protobuf messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from factory import ALL_GATHER, ALL_REDUCE, PAIR, RECV, SEND, UNIX_NS, WORLD, LogFactory, record, training

from commtrace import cli
from commtrace.analyses import perfetto
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.perfetto import export_perfetto
from commtrace.errors import LogError, OutputError
from commtrace.run import Run, open_run
from commtrace.schema import Flag, Phase, State

pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


class Slice(NamedTuple):
    """A slice; `track` has the names of the tracks from the host to its own."""

    track: tuple[str, ...]
    name: str
    begin: int
    end: int
    inside: tuple[str, ...]
    arguments: dict[str, Any]
    flow: int | None
    flow_ends: bool


class Trace:
    """A trace file as the viewer reads it."""

    def __init__(self, path: Path) -> None:
        trace = pb2.Trace()
        trace.ParseFromString(path.read_bytes())
        self.tracks: dict[int, tuple[str, ...]] = {}
        self.slices: list[Slice] = []
        self.counters: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
        names: dict[str, dict[int, str]] = defaultdict(dict)
        stacks: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        self.clock = {clock.clock_id: clock.timestamp for clock in trace.packet[0].clock_snapshot.clocks}
        for packet in trace.packet:
            for kind in ("event_names", "debug_annotation_names"):
                names[kind] |= {entry.iid: entry.name for entry in getattr(packet.interned_data, kind)}
            texts = packet.interned_data.debug_annotation_string_values
            names["texts"] |= {entry.iid: entry.str.decode() for entry in texts}
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                parent = self.tracks[track.parent_uuid] if track.parent_uuid else ()
                assert track.uuid not in self.tracks
                self.tracks[track.uuid] = (*parent, track.name or track.process.process_name)
            if not packet.HasField("track_event"):
                continue
            event, stack = packet.track_event, stacks[packet.track_event.track_uuid]
            if event.type == event.TYPE_COUNTER:
                self.counters[self.tracks[event.track_uuid]].append((packet.timestamp, event.double_counter_value))
            elif event.type == event.TYPE_SLICE_BEGIN:
                assert not stack or stack[-1][1] <= packet.timestamp
                copy = pb2.TrackEvent()
                copy.CopyFrom(event)
                stack.append((copy, packet.timestamp))
            else:
                began, begin = stack.pop()
                assert begin <= packet.timestamp
                inside = tuple(names["event_names"][outer.name_iid] for outer, _ in stack)
                arguments = {
                    names["debug_annotation_names"][annotation.name_iid]: annotation.int_value
                    if annotation.WhichOneof("value") == "int_value"
                    else names["texts"][annotation.string_value_iid]
                    for annotation in began.debug_annotations
                }
                flows = [*began.flow_ids, *began.terminating_flow_ids]
                self.slices.append(
                    Slice(
                        self.tracks[event.track_uuid], names["event_names"][began.name_iid], begin, packet.timestamp,
                        inside, arguments, flows[0] if flows else None, bool(began.terminating_flow_ids),
                    )
                )  # fmt: skip
        assert not any(stacks.values()), "every slice is closed"
        self.last = max((end for *_, end, _, _, _, _ in self.slices), default=0)

    def calls(self, group: str) -> list[Slice]:
        """Return the slices of calls on tracks whose name begins with `group`."""
        return [call for call in self.slices if call.track[-1].startswith(group) and "payload bytes" in call.arguments]


def exported(run: Run, out: Path, **selection: Any) -> Trace:
    export_perfetto(run, out, **selection)
    return Trace(out)


def test_every_call_is_a_slice_in_its_phase_and_step(tmp_path: Path) -> None:
    training(tmp_path / "log", ranks=2, steps=3, boot_id="a")
    run = open_run(tmp_path / "log")
    trace = exported(run, tmp_path / "run.pftrace")
    events = run.events()
    shown = sorted(
        (*call.track, call.name, call.begin, call.end, call.arguments["payload bytes"])
        for call in trace.calls("thread")
    )
    first = int(events["t_begin_ns"].min())
    assert shown == sorted(
        (
            "host node17", f"rank {row.rank}", "thread 1", row.op, row.t_begin_ns - first, row.t_return_ns - first,
            row.payload_bytes,
        )
        for row in rows_of(events)
    )  # fmt: skip
    for call in trace.calls("thread"):
        step, phase = call.inside
        assert step == ("start-up" if call.arguments.get("step") is None else f"step {call.arguments['step']}")
        assert phase == ("init" if step == "start-up" else phase)
        assert call.arguments["dimension"] == "data"
        assert call.arguments["group"] == "0-1"
    assert {span.name for span in trace.slices if span.inside == ()} >= {"start-up", "step 0", "step 1", "step 2"}
    ended = events.loc[events["t_end_ns"] > 0]
    assert len(trace.calls("in flight")) == len(ended)
    assert trace.clock == {6: 0, 1: UNIX_NS - 1_000 + first}


def test_arrows_join_the_calls_of_one_operation(tmp_path: Path) -> None:
    log = LogFactory(tmp_path / "log")
    groups: dict[int, Sequence[int]] = {WORLD: [0, 1], PAIR: [0, 1]}
    for rank in range(2):
        message = record(kind=(SEND, RECV)[rank], peer=1 - rank, tag=3, t_begin=(5_000, 4_000)[rank], t_return=6_000)
        process = log.process(rank, pid=rank + 10, boot_id="a").known(groups)
        process.write([record(t_begin=1_000 + rank), message, record(seq=7 + rank, t_begin=7_000, t_return=7_100)])
    trace = exported(open_run(tmp_path / "log"), tmp_path / "run.pftrace")
    by_flow: dict[int, list[Slice]] = defaultdict(list)
    for span in trace.slices:
        if span.flow is not None:
            by_flow[span.flow].append(span)
    joined = [sorted((call.track[1], call.name, call.flow_ends) for call in flow) for flow in by_flow.values()]
    assert sorted(flow for flow in joined if len(flow) == 2) == [
        [("rank 0", "all_reduce", False), ("rank 1", "all_reduce", True)],
        [("rank 0", "send", True), ("rank 1", "recv", False)],
    ], "the receiver came first"
    assert sorted(map(len, joined)) == [1, 1, 2, 2], "operations 7 and 8 have no counterpart"
    late = {
        call.track[1]: call.arguments["wait for ranks (ns)"] for call in trace.calls("thread") if call.name == "recv"
    }
    assert late == {"rank 1": 1_000}, "the send begins 1,000 ns after it"
    [receive] = [call for call in trace.calls("thread") if call.name == "recv"]
    assert receive.arguments["peer"] == 0
    assert receive.arguments["tag"] == 3


def test_calls_that_overlap_get_tracks_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "_BLOCK", 64)  # steps, phases and tracks continue across blocks
    rng = np.random.default_rng(0)
    rows = []
    for seq in range(200):
        begin = int(rng.integers(1, 5_000))
        returned = begin + int(rng.integers(0, 50))
        end = returned + int(rng.integers(0, 400))
        wait = int(rng.integers(returned, end + 1))
        times = {"t_begin": begin, "t_return": returned, "t_wait": wait, "t_end": end}
        phase = Phase(int(rng.integers(0, 6)))
        rows.append(record(seq=seq, step=begin // 1_000, thread=1 + seq % 2, phase=phase, flags=Flag.ASYNC, **times))
    LogFactory(tmp_path / "log").process(0, world_size=2).known().write(rows)
    trace = exported(open_run(tmp_path / "log"), tmp_path / "run.pftrace")
    first = min(int(row["t_begin"][0]) for row in rows)
    expected = sorted(
        (int(row["seq"][0]), int(row["t_begin"][0]) - first, int(row["t_return"][0]) - first) for row in rows
    )
    shown = [(call.arguments["sequence number"], call.begin, call.end) for call in trace.calls("thread")]
    assert sorted(shown) == expected
    flights = [(call.arguments["sequence number"], call.begin, call.end) for call in trace.calls("in flight")]
    assert sorted(flights) == sorted(
        (int(r["seq"][0]), int(r["t_begin"][0]) - first, int(r["t_end"][0]) - first) for r in rows
    )
    waits = [span for span in trace.slices if span.name == "program waits"]
    assert len(waits) == sum(int(row["t_wait"][0] < row["t_end"][0]) for row in rows)
    assert all(wait.inside == ("all_reduce",) for wait in waits)


def test_counters_are_the_sums_of_what_is_in_flight(tmp_path: Path) -> None:
    rows = [
        record(seq=0, payload=100, t_begin=1_000, t_return=1_010, t_wait=0, t_end=1_200, clock=3),
        record(seq=1, payload=30, t_begin=1_100, t_return=1_110, t_wait=0, t_end=1_300, clock=3),
        record(seq=2, payload=7, t_begin=1_500, t_return=1_510, t_wait=0, t_end=1_510, clock=1),
    ]
    LogFactory(tmp_path / "log").process(0).known().write(rows)
    trace = exported(open_run(tmp_path / "log"), tmp_path / "run.pftrace")
    track = ("host node17", "rank 0", "bytes in flight")
    assert trace.counters[track] == [(0, 100), (100, 130), (200, 30), (300, 0), (500, 7), (510, 0)]
    rates = [value for _, value in trace.counters[(*track[:2], "bandwidth")]]
    assert rates == pytest.approx([0.5, 0.65, 0.15, 0, 0.7, 0])


def test_a_call_that_never_returned_lasts_to_the_last_time_of_its_process(tmp_path: Path) -> None:
    begun = record(seq=1, t_begin=10_000, t_return=0, t_wait=0, t_end=0, clock=0, state=State.BEGUN)
    other = record(seq=0, kind=ALL_GATHER, t_begin=1_000, t_return=2_000, t_end=12_000)
    LogFactory(tmp_path / "log").process(0).known().write([other, begun])
    trace = exported(open_run(tmp_path / "log"), tmp_path / "run.pftrace")
    [hung] = [call for call in trace.calls("thread") if call.name == "all_reduce"]
    assert (hung.begin, hung.end, hung.arguments["state"]) == (9_000, 11_000, "begun")
    assert [call.name for call in trace.calls("in flight")] == ["all_gather"]


def test_ranks_and_steps_are_chosen_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log", ranks=3, steps=5)
    for options, ranks, steps in (
        (["--ranks", "0,2", "--steps", "1-2,4"], {"rank 0", "rank 2"}, {"step 1", "step 2", "step 4"}),
        (["--steps", "start-up"], {"rank 0", "rank 1", "rank 2"}, {"start-up"}),
    ):
        out = tmp_path / "run.pftrace"
        assert cli.main(["export", str(tmp_path / "log"), "--out", str(out), "--force", *options]) == 0
        trace = Trace(out)
        assert {span.track[1] for span in trace.slices} == ranks
        assert {span.name for span in trace.slices if span.name.startswith(("step", "start"))} == steps
        assert f"{len(trace.calls('thread'))} calls" in capsys.readouterr().out


def test_hosts_are_processes_on_one_clock(tmp_path: Path) -> None:
    log = LogFactory(tmp_path / "log")
    for rank, (host, mono) in enumerate((("node1", 1_000), ("node2", 501_000))):
        process = log.process(rank, pid=rank + 10, host=host, boot_id=host, mono_ns=mono).known()
        process.write([record(t_begin=mono + 50, t_return=mono + 80, t_wait=0, t_end=0, clock=0)])
    trace = exported(open_run(tmp_path / "log"), tmp_path / "run.pftrace")
    assert sorted((call.track[0], call.begin, call.end) for call in trace.calls("thread")) == [
        ("host node1", 0, 30),
        ("host node2", 0, 30),
    ]


def test_what_has_no_times_is_refused(tmp_path: Path) -> None:
    LogFactory(tmp_path / "dry").process(0, simulated=True).known().write([record(flags=Flag.SIMULATED)])
    with pytest.raises(LogError, match="a dry run has no times"):
        export_perfetto(open_run(tmp_path / "dry"), tmp_path / "a.pftrace")
    LogFactory(tmp_path / "log").process(0).known().write([record(kind=ALL_REDUCE)])
    run = open_run(tmp_path / "log")
    with pytest.raises(LogError, match=r"no call of these ranks and steps; the run has ranks 0"):
        export_perfetto(run, tmp_path / "a.pftrace", ranks=[5])
    assert not (tmp_path / "a.pftrace").exists()
    (tmp_path / "a.pftrace").write_text("precious")
    with pytest.raises(OutputError, match="already exists"):
        export_perfetto(run, tmp_path / "a.pftrace")
