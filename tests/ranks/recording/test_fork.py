"""Forked children leave no trace in their parent's log, and have their own log if they communicate."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import processes
from processes import NewRecorder
from ranks import Nursery

from commtrace.recording.recovery import recover_records
from commtrace.recording.session import Session
from commtrace.schema import Clock, State


def test_children_of_a_training(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    statuses, outputs = nursery.run("forking", log)
    assert statuses == [0, 0], outputs
    assert all("[0, 1, 2, 3, 4, 5, 6, 7]" in output and "child" in output for output in outputs)

    logs = processes.read_all(log)
    parents = [left for left in logs if left.tables["process"][0]["world_size"] == 2]
    children = [left for left in logs if left.tables["process"][0]["world_size"] == 1]
    assert len(parents) == len(children) == 2, "a fork that does not communicate has left a log"
    for left in parents:
        assert left.stats["calls"] == len(left.records) == 5
        assert set(left.records["state"]) == {State.COMPLETE}
        assert left.stats["hook_errors"] == 0
    for left in children:
        assert len(left.records) == 7
        assert left.tables["end"][0]["reason"] == "exit"
        assert left.tables["process"][0]["run"] != parents[0].tables["process"][0]["run"]
    assert not processes.rings(log)


def test_what_a_child_does_to_its_copy_stays_there(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path / "log", drain_ms=60_000)
    session = Session()
    session.recorder = recorder
    calls = [recorder.returned(processes.call(recorder, number), 1, observable=True) for number in range(4)]

    def child() -> None:
        session.forked()
        assert session.recorder is None
        for call in calls[:2]:
            assert call is not None
            recorder.ended(call, 5, 6, Clock.WAIT)
            recorder.unobservable(call)
        recorder.failed(0)
        assert processes.call(recorder, 9) == -1
        recorder.tables.add("sites", id=1, file="child", line=1, function="")
        recorder.counters.count_fault()

    assert processes.in_child(child) == 0
    for call in calls:
        assert call is not None
        recorder.ended(call, 7, 8, Clock.WAIT)
    recorder.close("stop")
    left = processes.read_one(tmp_path / "log")
    assert left.records["t_end"].tolist() == [8] * 4
    assert "sites" not in left.tables
    assert left.stats["dropped"] == left.stats["hook_errors"] == 0


def test_locks_that_another_thread_held_at_the_fork(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path / "log", drain_ms=60_000)
    session = Session()
    session.recorder = recorder
    call = recorder.returned(processes.call(recorder, 0), 1, observable=True)
    assert call is not None
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with recorder.slots.lock, recorder.tables._lock, session._lock:
            held.set()
            done.wait()

    threading.Thread(target=hold, daemon=True).start()
    held.wait()

    def child() -> None:
        session.forked()
        recorder.unobservable(call)
        recorder.tables.row_id("sites", "key", dict)
        session.settings = None
        assert session.begin(lambda: None, blind_spots=[]) is None  # type: ignore[arg-type,return-value]

    try:
        assert processes.in_child(child, limit=5) == 0
    finally:
        done.set()
        recorder.close("stop")


def test_the_childs_end_is_not_the_parents(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path / "log", drain_ms=60_000)
    session = Session()
    session.recorder = recorder
    processes.call(recorder, 0)
    assert processes.in_child(lambda: session.end("exit")) == 0  # even if the child was not notified of the fork
    assert len(processes.rings(tmp_path / "log")) == 1
    assert processes.in_child(lambda: os._exit(len(recover_records(tmp_path / "log")))) == 0
    session.end("stop")
    assert len(processes.read_one(tmp_path / "log").records) == 1
