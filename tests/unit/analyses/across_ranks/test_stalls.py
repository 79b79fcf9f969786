"""The table of ranks without progress, from logs with samples of stacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from factory import UNIX_NS, LogFactory, ProcessFactory, record

from commtrace.analyses.across_ranks import stalls
from commtrace.analyses.across_ranks.stalls import find_stalls
from commtrace.analyses.across_ranks.stuck_calls_section import diagnosis
from commtrace.analyses.grouping import rows_of
from commtrace.reading.recorded_run import RecordedRun
from commtrace.recording.ring import Silence
from commtrace.run import open_run

SECOND = 10**9
LIBRARY = "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
WAIT = ["/usr/lib/python3.11/threading.py", 331, "Condition.wait"]
LOADER = [LIBRARY, 733, "_BaseDataLoaderIter.__next__"]
PROGRAM = ["/home/user/project/train.py", 77, "main"]
RUNNER = ["/venv/lib/python3.11/site-packages/accelerate/launch.py", 9, "run"]


def thread(**fields: Any) -> dict[str, Any]:
    """Return a thread of a sample: the main thread, which waits for a lock below the program's line 77."""
    known = {"name": "MainThread", "main": True, "state": "S", "system_call": "futex", "cpu_ns": 0}
    return {**known, "frames": [WAIT, LOADER, PROGRAM, RUNNER], **fields}


def sampled(
    log: LogFactory, rank: int, *threads: dict[str, Any], calls: int = 1, counted: int = 1, **fields: Any
) -> ProcessFactory:
    """Write a process that was killed `counted` calls after its start, with a sample taken after `calls`."""
    process = log.process(rank, pid=100 + rank, world_size=2).write([record(t_begin=number) for number in range(1, 2)])
    process.add(
        "stacks", mono_ns=60 * SECOND, calls=calls, pause_ns=22 * SECOND, in_call=False, window_ns=SECOND // 10,
        threads=[*threads], **fields,
    )  # fmt: skip
    process.stats(mono_ns=60 * SECOND, calls=counted)
    return process


def stalled(folder: Path) -> pd.DataFrame:
    return open_run(folder).table("stalled_threads")


def test_the_places_of_a_stack(tmp_path: Path) -> None:
    other = thread(name="worker", main=False, frames=[WAIT, LOADER])
    sampled(LogFactory(tmp_path), 0, thread(), other)
    first, second = rows_of(stalled(tmp_path))
    assert (first.rank, first.thread, first.is_main, first.in_call) == (0, "MainThread", True, False)
    assert first.function == "torch/utils/data/dataloader.py:733 _BaseDataLoaderIter.__next__"
    assert first.line == "project/train.py:77 main"
    assert first.innermost == "python3.11/threading.py:331 Condition.wait"
    assert first.stack.count(" < ") == 3
    assert (first.stalled_ns, first.activity) == (22 * SECOND, "waiting for a lock or thread")
    assert first.sampled_ns - UNIX_NS == pytest.approx(60 * SECOND, abs=SECOND)
    assert first.sampled_ns - first.since_ns == 22 * SECOND
    assert pd.isna(second.line)
    assert second.function == second.innermost == "python3.11/threading.py:331 Condition.wait"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "activity", "share"),
    [
        ({"cpu_ns": SECOND // 20, "system_call": "futex"}, "computing", 0.5),
        ({"cpu_ns": 2 * SECOND}, "computing", 1.0),
        ({"cpu_ns": None, "system_call": ""}, "waiting", None),
        ({"state": "D", "system_call": "read"}, "waiting for storage", 0.0),
        ({"system_call": "fsync"}, "waiting for storage", 0.0),
        ({"state": "R", "system_call": "", "storage_bytes": 1}, "waiting for storage", 0.0),
        ({"system_call": "futex", "storage_bytes": 0}, "waiting for a lock or thread", 0.0),
        ({"system_call": "clock_nanosleep"}, "sleeping", 0.0),
        ({"system_call": "epoll_wait"}, "waiting for data", 0.0),
        ({"system_call": "wait4"}, "waiting for a process", 0.0),
        ({"system_call": "ioctl"}, "waiting", 0.0),
    ],
)
def test_activities(fields: dict[str, Any], activity: str, share: float | None, tmp_path: Path) -> None:
    sampled(LogFactory(tmp_path), 0, thread(**fields))
    (row,) = rows_of(stalled(tmp_path))
    assert row.activity == activity
    assert pd.isna(row.cpu_share) if share is None else row.cpu_share == share


@pytest.mark.parametrize(
    ("children", "activity_of_children"),
    [
        ({"children_cpu_ns": SECOND // 20}, "waiting while its child processes compute"),
        (
            {"children_cpu_ns": SECOND // 200, "children_use_storage": True},
            "waiting while its child processes use storage",
        ),
    ],
)
@pytest.mark.parametrize(
    ("fields", "activity"),
    [
        ({"system_call": "read"}, None),
        ({"cpu_ns": SECOND // 10}, "computing"),
        ({"main": False}, "waiting for a lock or thread"),
    ],
)
def test_a_process_of_which_children_work(
    fields: dict[str, Any], activity: str | None, children: dict[str, Any], activity_of_children: str, tmp_path: Path
) -> None:
    sampled(LogFactory(tmp_path), 0, thread(**fields), **children)
    (row,) = rows_of(stalled(tmp_path))
    assert row.activity == (activity or activity_of_children)


def test_a_process_that_went_on_or_closed_its_log_is_not_stalled(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    sampled(log, 0, thread(), calls=1, counted=2)
    sampled(log, 1, thread()).end()
    assert not len(stalled(tmp_path))


@pytest.mark.parametrize(
    "threads",
    [
        "text",
        [7],
        [thread(frames=[["file"]])],
        [thread(frames=3)],
        [thread(cpu_ns=-1)],
        [thread(storage_bytes=-1)],
        None,
    ],
)
def test_a_damaged_sample(threads: Any, tmp_path: Path) -> None:
    process = sampled(LogFactory(tmp_path), 0, thread())
    process.add("stacks", mono_ns=61 * SECOND, calls=1, pause_ns=SECOND, in_call=True, window_ns=1, threads=threads)
    assert stalled(tmp_path)["stalled_ns"].tolist() == [22 * SECOND]  # of the sample before it
    assert [note.kind for note in open_run(tmp_path).notes] == ["garbled"]


@pytest.mark.parametrize(
    ("silence", "state", "activity"),
    [
        ("", "S", None),
        ("resumed", "S", None),
        ("storage", "S", None),
        ("stopped", "T", stalls.STOPPED),
        ("lock", "R", stalls.LOCK + stalls.COMPUTING),
        ("lock", "S", stalls.LOCK + stalls.WAITING),
        ("lock", "D", stalls.STORAGE),
    ],
)
def test_a_live_process_without_turns(silence: Silence, state: str, activity: str | None, tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0).write([record()])
    run = open_run(tmp_path)
    (process,) = run.processes
    live = replace(process, live_at_ns=100 * SECOND, live_turn_ns=60 * SECOND, silence=silence, live_state=state)
    found = find_stalls(RecordedRun(replace(run.log, processes=(live,))))["stalled_threads"]
    assert [*zip(found["activity"], found["stalled_ns"], strict=True)] == (
        [(activity, 40 * SECOND)] if activity else []
    )


@pytest.mark.parametrize(("silence", "seconds"), [("", 60), ("late", 20), ("resumed", 20), ("storage", 60)])
def test_time_in_which_a_process_was_stopped_is_no_stall(silence: Silence, seconds: int, tmp_path: Path) -> None:
    """All ranks evaluate without a call, and the job is suspended meanwhile."""
    log = LogFactory(tmp_path)
    sampled(log, 0, thread())
    run = open_run(tmp_path)
    (process,) = run.processes
    assert process.tables.stacks is not None
    sample_ns = process.tables.stacks.mono_ns
    pause = process.tables.stacks.pause_ns
    live = replace(
        process, live_at_ns=sample_ns + 60 * SECOND, live_turn_ns=sample_ns + 20 * SECOND, silence=silence
    )  # fmt: skip
    found = find_stalls(RecordedRun(replace(run.log, processes=(live,))))["stalled_threads"]
    assert found["stalled_ns"].tolist() == [pause + seconds * SECOND]


def test_what_the_diagnosis_says(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in (0, 1):
        sampled(log, rank, thread(), thread(name="other", main=False))
    run = open_run(tmp_path)
    (sentence,) = diagnosis({name: run.table(name) for name in ("stuck_calls", "stuck_ranks", "stalled_threads")})
    for part in ("Ranks 0-1", "22.0 s", "dataloader.py:733", "train.py:77"):
        assert part in sentence
