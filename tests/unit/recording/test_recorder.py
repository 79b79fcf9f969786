"""The recorder: records of calls with every outcome, several threads, and the end of recording."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from processes import NewRecorder

from commtrace.recording import drain, ring
from commtrace.recording.counters import is_sampled
from commtrace.recording.log_writer import LogWriter
from commtrace.recording.recorder import PendingCall
from commtrace.schema import Clock, Records, State


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Restrict garbage collection to objects of this module: the test session has too many others."""
    gc.freeze()
    yield
    gc.unfreeze()


def descriptors() -> int:
    gc.collect()  # a mapping keeps a descriptor open until it is collected
    return len(os.listdir("/proc/self/fd"))


def in_threads(work: Callable[[int], None], arguments: Iterable[int]) -> None:
    """Run a function for each argument, in threads at the same time."""
    running = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def test_the_ways_of_a_call(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path)
    slots = [processes.call(recorder, number, flags=1, tag=number) for number in range(6)]
    waited = recorder.returned(slots[0], 101, observable=True)
    assert recorder.returned(slots[1], 102, observable=False) is None
    recorder.failed(slots[2], 103)
    failed_later = recorder.returned(slots[3], 104, observable=True)
    forgotten = recorder.returned(slots[4], 105, observable=True)
    assert waited is not None
    assert failed_later is not None
    assert forgotten is not None
    recorder.ended(waited, 201, 301, Clock.WAIT)
    recorder.ended(waited, 999, 999, Clock.DEVICE)  # only the first end counts
    recorder.failed(failed_later)
    recorder.unobservable(forgotten, 205)
    recorder.close("stop")

    log = processes.read_one(tmp_path)
    records = log.records[np.argsort(log.records["seq"])]
    assert records["state"].tolist() == [
        State.COMPLETE, State.UNOBSERVABLE, State.FAILED, State.FAILED, State.UNOBSERVABLE, State.BEGUN,
    ]  # fmt: skip
    assert records["t_return"].tolist() == [101, 102, 103, 104, 105, 0]
    assert records["t_wait"].tolist() == [201, 0, 0, 0, 205, 0]
    assert records["t_end"].tolist() == [301, 0, 0, 0, 0, 0]
    assert records["clock"].tolist() == [Clock.WAIT, 0, 0, 0, 0, 0]
    assert records["tag"].tolist() == list(range(6))
    assert set(records["thread"]) == {1}
    assert log.tables["end"][0]["reason"] == "stop"
    processes.assert_whole(records)


def test_a_call_that_is_lost_after_its_end_is_recorded_once(tmp_path: Path, new_recorder: NewRecorder) -> None:
    """An exception may reach a hook after the end of the call was written and its slot freed."""
    recorder = new_recorder(tmp_path, ring_records=16)
    ended, not_observable, pending, running = (processes.call(recorder, number) for number in range(4))
    call = recorder.returned(ended, 101, observable=True)
    assert call is not None
    recorder.ended(call, 201, 301, Clock.WAIT)
    recorder.returned(not_observable, 102, observable=False)
    processes.wait_for(lambda: recorder.slots.taken == 2)
    still_pending = recorder.returned(pending, 103, observable=True)
    for slot in (ended, not_observable, pending, running, -1):
        recorder.set_unobservable(slot, 999)
    assert still_pending is not None
    recorder.ended(still_pending, 203, 303, Clock.WAIT)  # too late
    recorder.close("stop")

    records = processes.read_one(tmp_path).records
    records = records[np.argsort(records["seq"])]
    assert records["seq"].tolist() == [0, 1, 2, 3]
    assert records["state"].tolist() == [State.COMPLETE, *[State.UNOBSERVABLE] * 3]
    assert records["t_return"].tolist() == [101, 102, 999, 999]
    assert records["t_end"].tolist() == [301, 0, 0, 0]


@pytest.mark.parametrize("written", [False, True])
def test_an_end_that_a_signal_interrupts_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """The handler raises before the first field of the end is written, or after the last."""
    recorder = processes.recorder(tmp_path, ring_records=16)
    write_end, interruptions = recorder._write_end, iter([KeyboardInterrupt()])

    def interrupted(*end: Any) -> None:
        error = next(interruptions, None)
        if written or error is None:
            write_end(*end)
        if error is not None:
            if written:
                processes.wait_for(lambda: recorder.slots.taken == 0)
            raise error

    monkeypatch.setattr(recorder, "_write_end", interrupted)
    call = recorder.returned(processes.call(recorder, 7), 101, observable=True)
    assert call is not None
    with pytest.raises(KeyboardInterrupt):
        recorder.ended(call, 201, 301, Clock.WAIT)
    recorder.close("stop")
    records = processes.read_one(tmp_path).records
    assert records[["seq", "state", "t_end"]].tolist() == [(7, State.COMPLETE, 301)]


def test_a_number_that_does_not_fit_costs_nothing_but_its_record(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path, ring_records=16)
    for _ in range(100):
        with pytest.raises(struct.error):
            processes.call(recorder, tag=1 << 40)
    processes.call(recorder, 1 << 33, payload=0, local=0)  # a record has the low 32 bits of torch's number
    recorder.close("stop")
    assert processes.read_one(tmp_path).records["seq"].tolist() == [0]
    assert processes.read_one(tmp_path).stats["dropped"] == 0


def test_a_full_ring_counts(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path, ring_records=16, drain_ms=60_000)
    slots = [processes.call(recorder, number) for number in range(100)]
    assert slots[16:] == [-1] * 84
    assert recorder.returned(-1, 5, observable=True) is None
    recorder.failed(-1)
    recorder.close("stop")
    log = processes.read_one(tmp_path)
    assert len(log.records) == 16
    assert (log.stats["calls"], log.stats["dropped"]) == (100, 84)


def test_records_that_cannot_be_written_are_kept_once(
    tmp_path: Path, new_recorder: NewRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def write(writer: LogWriter, lines: list[bytes], records: Records) -> int:
        attempts.append(len(records))
        return 0

    monkeypatch.setattr(LogWriter, "write", write)
    recorder = new_recorder(tmp_path, steps="1", drain_ms=5)
    for number in range(4):
        recorder.returned(processes.call(recorder, number, step=number % 2), 101 + number, observable=False)
    processes.wait_for(lambda: attempts.count(2) > 3)
    monkeypatch.undo()
    recorder.close("stop")
    assert sorted(recorder.ring.kept()["seq"].tolist()) == [0, 1, 2, 3]
    assert sorted(processes.read_one(tmp_path).records["seq"].tolist()) == [1, 3]


@pytest.mark.parametrize("settings", [{"steps": "1"}, {"mode": "summary"}])
def test_records_that_need_no_disk_leave_the_ring_while_it_fails(
    settings: dict[str, str], tmp_path: Path, new_recorder: NewRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogWriter, "ready", False)
    recorder = new_recorder(tmp_path, ring_records=64, drain_ms=5, **settings)
    for number in range(200):
        processes.wait_for(lambda: recorder.slots.free)
        recorder.returned(processes.call(recorder, number, step=0), 101 + number, observable=False)
    monkeypatch.undo()
    recorder.close("stop")
    stats = processes.read_one(tmp_path).stats
    assert (stats["calls"], stats["dropped"], stats["not_selected"] + stats["summarized"]) == (200, 0, 200)


def test_all_of_a_large_ring_is_used_and_only_what_is_needed(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path, ring_records=20_000, drain_ms=60_000)
    for number in range(4000):
        processes.call(recorder, number)
    assert recorder.slots.taken == 4000
    if recorder.slots.recorder == "python":
        assert recorder.slots.used < 5000
    for number in range(4000, 20_000):
        processes.call(recorder, number)
    assert processes.call(recorder, 20_000) == -1
    recorder.close("stop")
    log = processes.read_one(tmp_path)
    assert sorted(log.records["seq"].tolist()) == list(range(20_000))
    assert (log.stats["calls"], log.stats["dropped"]) == (20_001, 1)


def test_threads_that_need_more_of_the_ring_at_once(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder, threads, calls = new_recorder(tmp_path, ring_records=40_000, drain_ms=60_000), 8, 5500
    barrier = threading.Barrier(threads)

    def work(first: int) -> None:
        barrier.wait()
        for number in range(first, first + calls):
            processes.call(recorder, number)

    in_threads(work, range(0, threads * calls, calls))
    recorder.close("stop")
    log = processes.read_one(tmp_path)
    assert len(set(log.records["seq"].tolist())) == len(log.records) == 40_000
    assert log.stats["dropped"] == threads * calls - 40_000
    processes.assert_whole(log.records)


def test_threads_under_a_fast_drain(tmp_path: Path, new_recorder: NewRecorder) -> None:
    """Eight threads begin and return calls, and end those of another thread, while the ring is drained."""
    recorder = new_recorder(tmp_path, ring_records=4096, drain_ms=1, segment_min_bytes=4096)
    threads, calls = 8, 4000
    handed_on: list[list[tuple[PendingCall, int]]] = [[] for _ in range(threads)]
    numbers = itertools.count()

    def hammer(index: int) -> None:
        for turn in range(calls):
            while len(recorder._free) < 64:
                time.sleep(0.001)
            number = next(numbers)
            call = recorder.returned(processes.call(recorder, number), number + 1, observable=turn % 3 != 0)
            if call is not None:
                handed_on[(index + 1) % threads].append((call, number))
            if handed_on[index]:
                other, other_number = handed_on[index].pop(0)
                recorder.ended(other, other_number + 2, other_number + 3, Clock.FUTURE)

    in_threads(hammer, range(threads))
    recorder.close("stop")

    log = processes.read_one(tmp_path)
    records = log.records
    processes.assert_whole(records)
    assert len(np.unique(records["seq"])) == len(records)
    assert len(records) == log.stats["calls"] == threads * calls
    assert log.stats["dropped"] == 0
    assert (records["t_return"] == records["seq"].astype(np.int64) + 1).all()
    complete = records[records["state"] == State.COMPLETE]
    assert len(complete) > 100
    assert (complete["t_end"] == complete["seq"].astype(np.int64) + 3).all()
    others = records[records["state"] != State.COMPLETE]
    assert set(others["state"]) <= {State.RETURNED, State.UNOBSERVABLE}
    assert (others["t_end"] == 0).all()
    assert set(records["thread"]) <= set(range(1, threads + 1))
    assert log.stats["hook_errors"] == 0


def test_calls_that_come_back_after_the_end(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path)
    slot = processes.call(recorder, 0)
    call = recorder.returned(processes.call(recorder, 1), 1, observable=True)
    recorder.close("stop")
    assert call is not None
    recorder.returned(slot, 5, observable=True)
    recorder.ended(call, 5, 6, Clock.WAIT)
    assert processes.call(recorder, 2) == -1
    log = processes.salvaged(tmp_path)[0]
    assert sorted(log.records["state"].tolist()) == [State.BEGUN, State.RETURNED]
    assert "salvage" not in log.tables
    assert not processes.rings(tmp_path)


def test_calls_of_other_threads_while_it_ends(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path, drain_ms=1)
    numbers = itertools.count()
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            recorder.returned(processes.call(recorder, next(numbers)), 1, observable=False)

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    recorder.close("stop")
    stop.set()
    for thread in threads:
        thread.join()
    log = processes.read_one(tmp_path)
    processes.assert_whole(log.records)
    assert len(np.unique(log.records["seq"])) == len(log.records)
    assert log.stats["calls"] == len(log.records) + log.stats["dropped"]
    assert log.ended
    assert not processes.rings(tmp_path)


def test_hook_errors_are_counted_and_the_first_is_kept(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path)

    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error in (KeyError("first"), ValueError("second"), UnprintableError()):
        try:
            raise error
        except Exception:
            recorder.counters.count_fault()
    recorder.close("stop")
    stats = processes.read_one(tmp_path).stats
    assert stats["hook_errors"] == 3
    assert "KeyError: 'first'" in stats["first_error"]


def test_errors_of_callbacks_do_not_keep_records_from_the_disk(tmp_path: Path) -> None:
    def fail() -> int:
        raise ValueError("a callback's")

    recorder = processes.Recorder(
        processes.Settings(str(tmp_path)), processes.RankIdentity(0, 1), blind_spots=[], calibrate=fail
    )
    recorder.drain_callbacks.append(fail)  # type: ignore[arg-type]
    processes.call(recorder, 1)
    recorder.close("stop")
    log = processes.read_one(tmp_path)
    assert len(log.records) == 1
    assert log.stats["hook_errors"] >= 2


def test_a_process_that_is_stopped_during_a_turn_is_late_with_the_next(
    tmp_path: Path, new_recorder: NewRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "LATE_SECONDS", 0.5)
    recorder = new_recorder(tmp_path, drain_ms=1)

    def late_ns() -> int:
        return int.from_bytes(recorder.ring.buffer[ring.LATE_TURN_AT : ring.LATE_TURN_AT + 8], "little")

    time.sleep(0.1)
    assert late_ns() == 0
    begun = time.monotonic_ns()
    stops = iter([0.7])
    recorder.drain_callbacks.append(lambda: time.sleep(next(stops, 0)))
    processes.wait_for(late_ns, 10)
    assert late_ns() >= begun + 700_000_000
    recorder.close("stop")  # its thread would open files while other tests count descriptors


def test_a_sample_is_not_always_the_same_call_of_a_step() -> None:
    sampled = [slot for slot in range(1 << 14) if is_sampled(slot)]
    assert [slot >> 4 for slot in sampled] == [*range(1 << 10)]
    counts = Counter(slot & 15 for slot in sampled)
    assert set(counts) == {*range(16)}
    assert max(counts.values()) < 2 * min(counts.values())


def test_what_calls_cost(tmp_path: Path) -> None:
    recorder = processes.Recorder(
        processes.Settings(str(tmp_path)), processes.RankIdentity(0, 1), blind_spots=[], calibrate=lambda: 1000
    )
    for ns in range(1, 101):
        recorder.counters.note_cost(ns, sampled=True, first=ns > 90)
    recorder.counters.note_cost(50_000, sampled=False, first=True)
    recorder.close("stop")
    stats = processes.read_one(tmp_path).stats
    assert stats["cost_samples"] == 100
    assert stats["cost_ns"] == 5050 + 100 * 1000
    assert stats["cost_p99_ns"] == 1100
    assert (stats["first_calls"], stats["first_ns"]) == (11, sum(range(91, 101)) + 50_000 + 11 * 1000)
    assert (stats["steady_samples"], stats["steady_ns"]) == (90, sum(range(1, 91)) + 90 * 1000)


def test_a_store_that_hangs_does_not_keep_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], new_recorder: NewRecorder
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(LogWriter, "write", lambda *_: go_on.wait() and 0)
    recorder = new_recorder(tmp_path, exit_seconds=0.05, drain_ms=1)
    processes.call(recorder, 0)
    begin = time.monotonic()
    recorder.close("exit")
    assert time.monotonic() - begin < 5
    assert "could not be finished within 0.05 s" in capfd.readouterr().err
    go_on.set()
    recorder._drain._thread.join()
    recorder.ring.remove()


def test_the_drain_thread_takes_no_signals(tmp_path: Path, new_recorder: NewRecorder) -> None:
    """Otherwise a signal that the program blocks, to wait for it, would reach this thread and kill the process."""
    recorder = new_recorder(tmp_path)
    thread = recorder._drain._thread.native_id

    def blocked() -> int:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)

    processes.wait_for(blocked)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
        assert blocked() >> (number - 1) & 1
    assert not blocked() >> (signal.SIGSEGV - 1) & 1
    recorder.close("stop")


def test_a_process_shows_that_it_is_alive_between_two_turns(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path, drain_ms=60_000)

    def alive_and_turn() -> tuple[int, int]:
        alive, turn = (struct.unpack_from("<Q", recorder.ring.buffer, at)[0] for at in (ring.ALIVE_AT, ring.TURN_AT))
        return alive, turn

    begun = time.monotonic_ns()
    processes.wait_for(lambda: alive_and_turn()[0] > begun)
    alive, _ = alive_and_turn()
    processes.wait_for(lambda: alive_and_turn()[0] > alive)
    assert alive_and_turn()[1] < begun, "no turn was due"
    recorder.close("stop")


def test_few_records_of_calls_that_go_on_are_moved_in_one_turn_of_four(
    tmp_path: Path, new_recorder: NewRecorder
) -> None:
    recorder = new_recorder(tmp_path, ring_records=64, drain_ms=60_000)
    processes.wait_for(lambda: struct.unpack_from("<Q", recorder.ring.buffer, ring.ALIVE_AT) != (0,))  # it sleeps

    def taken_after_turn(calls: int) -> int:
        for number in range(calls):
            recorder.returned(processes.call(recorder, number), 101, observable=False)
        recorder._drain._turn()
        return recorder.slots.taken

    assert taken_after_turn(1) == 0, "the first rows of the tables are written at once"
    assert [taken_after_turn(1) for _ in range(5)] == [1, 2, 3, 0, 1]
    assert taken_after_turn(0) == 0, "no call has begun since the last turn"
    assert [taken_after_turn(7), taken_after_turn(1)] == [7, 0], "an eighth of the ring is taken"
    recorder.close("stop")
    assert processes.read_one(tmp_path).stats["calls"] == 14


def test_a_recorder_that_cannot_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_recorder: NewRecorder
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    before = descriptors()
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        new_recorder(tmp_path)
    assert not processes.rings(tmp_path)
    assert descriptors() == before


def test_no_descriptor_stays_open(tmp_path: Path, new_recorder: NewRecorder) -> None:
    before = descriptors()
    for _ in range(5):
        recorder = new_recorder(tmp_path, segment_min_bytes=4096)
        for number in range(100):
            processes.call(recorder, number)
        recorder.close("stop")
    del recorder
    assert descriptors() == before


@pytest.mark.parametrize("shm", ["/dev/shm", "/nonexistent"])
def test_two_processes_of_the_same_name(
    shm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_recorder: NewRecorder
) -> None:
    """Processes in different containers may have the same rank, process id, host name and run."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("commtrace.identity.agree_on_run", lambda member: "run")
    recorders = [new_recorder(tmp_path, shm=shm, segment_min_bytes=4096, drain_ms=2) for _ in range(3)]
    for number in range(300):
        recorder = recorders[number % 3]
        recorder.returned(processes.call(recorder, number), 1, observable=False)
    for recorder in recorders:
        recorder.close("stop")
    logs = processes.read_all(tmp_path)
    assert [log.stem for log in logs] == ["rank00000-1", "rank00000-2-1", "rank00000-3-1"]
    for log in logs:
        assert len(log.records) == log.stats["calls"] == 100
        assert len(set(log.records["seq"] % 3)) == 1
        assert log.ended
    assert len({path.parent for path in tmp_path.glob("*/*/*.jsonl")}) == 1
