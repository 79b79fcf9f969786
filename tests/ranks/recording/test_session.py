"""Processes that end, fail or are interrupted: what the log contains, and what the program observes."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import processes
import pytest
from ranks import Nursery
from recorders import FORGOTTEN, end

from commtrace.cli import main
from commtrace.identity import RankIdentity
from commtrace.recording import recorder as recorder_module
from commtrace.recording.session import Session
from commtrace.run import open_run
from commtrace.schema import State
from commtrace.settings import Settings


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("return", 0, "exit"),
        ("exit", 3, "exit"),
        ("raise", 1, "exit"),
        ("thread", 0, "exit"),
        ("busy daemon", -signal.SIGABRT, "exit"),  # torch aborts after commtrace has ended
        ("handled SIGTERM", 5, "exit"),
        ("SIGINT", -signal.SIGINT, "exit"),
        ("SIGTERM", -signal.SIGTERM, None),
        ("abort", -signal.SIGABRT, None),
        ("os._exit", 4, None),
        ("exec", 6, None),
    ],
)
def test_endings(how: str, status: int, reason: str | None, nursery: Nursery, tmp_path: Path) -> None:
    statuses, outputs = nursery.run("ending", tmp_path / "log", how, ranks=1)
    assert statuses == [status], outputs
    (left,) = processes.read_all(tmp_path / "log") if reason else processes.salvaged(tmp_path / "log")
    expected = {"thread": 6}.get(how, 5)
    assert left.stats["calls"] == len(left.records) + left.stats["dropped"]
    assert len(left.records) >= expected if how == "busy daemon" else len(left.records) == expected
    assert [row["reason"] for row in left.tables.get("end", [])] == ([reason] if reason else [])
    assert ("salvage" in left.tables) == (reason is None)
    assert not processes.rings(tmp_path / "log")


@pytest.mark.long
def test_only_selected_ranks_are_recorded(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    statuses, outputs = nursery.run("changed_training", log, 3, "none", ranks=4, RANKS="1,2-3:8")
    assert statuses == [0] * 4, outputs
    assert open_run(log).ranks == [1, 2]
    assert main(["report", str(log), "--width", "160"]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 recorded, on 1 host; not selected: 0,3" in out
    assert "Ranks 0,3 were not recorded because of COMMTRACE_RANKS" in out
    assert "left no log" not in out
    assert main(["check", str(log)]) == 0
    assert "of rank 1-2" in capsys.readouterr().out


def test_only_selected_steps_are_recorded(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {}
    for steps in ("", "1,4-6"):
        log = tmp_path / f"log{steps}"
        statuses, outputs = nursery.run("changed_training", log, 9, "none", STEPS=steps)
        assert statuses == [0] * 2, outputs
        runs[steps] = open_run(log)
    full, selected = (run.table("volume_by_step").set_index("step") for run in runs.values())
    assert selected.index.tolist() == [-1, 1, 4, 5, 6]
    assert selected.equals(full.loc[selected.index])
    coverage, all_calls = runs["1,4-6"].table("coverage").iloc[0], int(full["calls"].sum())
    assert (coverage["records"], coverage["calls"], coverage["not_found"]) == (selected["calls"].sum(), all_calls, 0)
    assert coverage["not_selected"] == all_calls - selected["calls"].sum()
    assert coverage["steps_selected"] == "1,4-6"
    assert main(["check", str(log)]) == 0
    assert "matches the rules" in capsys.readouterr().out
    assert main(["report", str(log), "--width", "200"]) == 0
    assert f"{coverage['not_selected']} calls of steps outside COMMTRACE_STEPS=1,4-6" in capsys.readouterr().out
    for pair in ((tmp_path / "log", log), (log, tmp_path / "log"), (log, log)):
        assert main(["diff", *map(str, pair)]) == 0, capsys.readouterr().out
    assert main(["check", str(log), "--update-baseline", str(tmp_path / "baseline")]) == 2
    assert "was recorded with COMMTRACE_STEPS" in capsys.readouterr().err


def test_a_call_that_is_forgotten_just_before_the_end(nursery: Nursery, tmp_path: Path) -> None:
    """The call's Work is released when the log is closed, not before."""
    statuses, outputs = nursery.run("ending", tmp_path / "log", "forgotten", ranks=1, drain_ms=60_000)
    assert statuses == [0], outputs
    left = processes.read_one(tmp_path / "log")
    forgotten = left.records[left.records["t_begin"].argmax()]
    assert (forgotten["state"], forgotten["clock"]) == end(FORGOTTEN, "allreduce_", nursery.recorder)
    assert "Exception ignored" not in outputs[0]


def test_handlers_that_communicate(nursery: Nursery, tmp_path: Path) -> None:
    statuses, outputs = nursery.run("signals", tmp_path / "log", "communicate", ranks=1)
    assert statuses == [0], outputs
    calls, handled, _ = map(int, outputs[0].splitlines()[-1].split())
    left = processes.read_one(tmp_path / "log")
    assert handled > 100
    assert len(left.records) == 1 + calls + handled
    assert len(np.unique(left.records["seq"])) == len(left.records)
    assert left.stats["hook_errors"] == 0


def test_handlers_that_raise(nursery: Nursery, tmp_path: Path) -> None:
    """A handler's exception reaches the program, wherever it is raised."""
    statuses, outputs = nursery.run("signals", tmp_path / "log", "raise", ranks=1)
    assert statuses == [0], outputs
    calls, handled, caught = map(int, outputs[0].splitlines()[-1].split())
    # Python cannot propagate an exception from a weak reference's callback; it prints that it has ignored one.
    ignored = outputs[0].count("Exception ignored in")
    left = processes.read_one(tmp_path / "log")
    assert handled > 100
    assert caught + ignored == handled, "commtrace swallowed an exception"
    assert ignored <= handled // 50
    assert calls <= left.stats["calls"] <= 1 + calls + handled
    assert len(left.records) + left.stats["dropped"] == left.stats["calls"]


def test_failures_reach_the_program_unchanged(nursery: Nursery, tmp_path: Path) -> None:
    statuses, traced = nursery.run("failing", tmp_path / "log")
    assert set(statuses) <= {0, -signal.SIGABRT}, traced
    _, untraced = nursery.run("failing", tmp_path / "untraced", traced=False)
    # Only the program's own lines: gloo sometimes aborts a process that has ended, traced or not.
    assert [_program_lines(output) for output in traced] == [_program_lines(output) for output in untraced]
    assert "returned" not in traced[0]
    for left in processes.read_all(tmp_path / "log"):
        records = left.records[np.argsort(left.records["t_begin"])]
        rank = left.tables["process"][0]["rank"]
        assert records["state"][0] == State.COMPLETE
        assert set(records["state"][1:]) == {State.FAILED}
        assert len(records) == (3 if rank == 0 else 2)
        assert left.stats["hook_errors"] == 0
        assert left.ended


def _program_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("shape", "timeout"))]


# ---- beginning -------------------------------------------------------------------------------------------------------


def test_all_threads_get_one_recorder(tmp_path: Path) -> None:
    session = Session()
    session.settings = Settings(str(tmp_path / "log"))
    asked: list[int] = []
    start = threading.Barrier(8)
    recorders: list[object] = []

    def member() -> RankIdentity:
        asked.append(1)
        return RankIdentity(0, 1)

    def begin() -> None:
        start.wait()
        recorders.append(session.begin(member, blind_spots=[]))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1
    assert set(recorders) == {session.recorder}
    session.end("stop")
    assert session.begin(member, blind_spots=[]) is None
    assert len(asked) == 1


def test_a_call_made_while_recording_begins_is_not_traced(tmp_path: Path) -> None:
    """A signal handler makes the call in the thread that begins to record, which must not wait for itself."""
    session = Session()
    session.settings = Settings(str(tmp_path / "log"))
    nested: list[object] = []

    def member() -> RankIdentity:
        nested.append(session.begin(member, blind_spots=[]))
        return RankIdentity(0, 1)

    assert session.begin(member, blind_spots=[]) is session.recorder is not None
    assert nested == [None]
    session.end("stop")


def test_a_beginning_that_is_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    session.settings = Settings(str(tmp_path / "log"))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recorder_module, "Drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.begin(lambda: RankIdentity(0, 1), blind_spots=[])
    assert not processes.rings(tmp_path / "log")
    assert session.begin(lambda: RankIdentity(0, 1), blind_spots=[]) is not None
    session.end("stop")
