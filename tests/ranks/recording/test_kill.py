"""Whenever a program is killed, its finished calls are in the log once, and the log says that it ended early."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import processes
import pytest
from draws import DRAWS
from processes import Left
from ranks import Nursery

from commtrace.recording import log_writer, ring, slots
from commtrace.recording import segment_writer as segments
from commtrace.schema import Records, State

DEFAULT_KILLS, KILLS = 10, max(25, DRAWS)  # with each recorder


def counters(path: Path) -> list[int]:
    return [int(number) for number in np.fromfile(path, "<i8")]


def assert_counted(left: Left, finished: int) -> None:
    """Assert that each finished call is in the log once, and at most the call in which the process died besides."""
    calls = left.records
    assert len(np.unique(calls["t_begin"])) == len(calls)
    assert sorted(calls["seq"].tolist()) == list(range(len(calls)))
    assert finished <= len(calls) <= finished + 1
    assert left.stats["calls"] == len(calls)
    assert left.stats["dropped"] == left.stats["removed"] == left.stats["lost"] == 0


@pytest.mark.parametrize(
    "seed",
    [*range(DEFAULT_KILLS), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(DEFAULT_KILLS, KILLS))],
)
def test_killed_at_a_random_moment(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    choose = random.Random(seed)
    finished = tmp_path / "finished"
    finished.write_bytes(bytes(16))
    log = tmp_path / "log"
    early = seed % 5 == 0
    # If a rank is killed before it has met the other, the other waits for half an hour, traced or not.
    victims = (0, 1) if early else choose.choice([(0, 1), (0,), (1,)])
    ranks = nursery.start(
        "counting", log, finished, drain_ms=choose.choice([1, 7, 100]), segment_min_bytes=choose.choice([4096, 1 << 20])
    )
    if not early:  # if early, the kill may come before the first call or while recording begins
        processes.wait_for(lambda: all(counters(finished)))
    time.sleep(choose.uniform(0, 0.3))
    ranks.kill(*victims)
    statuses = ranks.wait()

    logs = {left.tables["process"][0]["rank"]: left for left in processes.salvaged(log)}
    for rank in (0, 1):
        assert (statuses[rank] == -signal.SIGKILL) == (rank in victims), ranks.output(rank)
        if rank in logs:
            assert_counted(logs[rank], counters(finished)[rank])
            assert logs[rank].ended == (rank not in victims)
        else:
            assert counters(finished)[rank] == 0
    assert not processes.rings(log)


def test_a_survivor_recovers_records_of_killed_processes(nursery: Nursery, tmp_path: Path) -> None:
    finished, log = tmp_path / "finished", tmp_path / "log"
    finished.write_bytes(bytes(16))
    ranks = nursery.start("counting", log, finished, drain_ms=60_000)  # so that all records are in memory
    processes.wait_for(lambda: min(counters(finished)) > 20)
    ranks.kill(1)
    assert ranks.wait() == [1, -signal.SIGKILL]

    survivor, dead = processes.read_all(log)  # without `commtrace recover`
    assert_counted(survivor, counters(finished)[0])
    assert_counted(dead, counters(finished)[1])
    assert survivor.tables["end"][0]["reason"] == "exit"
    assert survivor.records["state"][np.argsort(survivor.records["t_begin"])[-1]] == State.FAILED
    assert not dead.ended
    assert dead.tables["salvage"][0]["records"] == len(dead.records)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
def test_a_training_killed_at_a_random_moment(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    """All ranks of a transformer's training are killed; both logs have all collectives of a group but the last few."""
    pytest.importorskip("yaml")
    log = tmp_path / "log"
    ranks = nursery.start("gpt_neox", log, "tiny", "--engine", "ddp", "--train-iters", 100_000)
    processes.wait_for(lambda: len(list(log.glob("*/*/*.jsonl"))) == 2 or ranks.ended(), 60)
    time.sleep(random.Random(seed).uniform(0, 1))
    ranks.kill(0, 1)
    assert ranks.wait() == [-signal.SIGKILL] * 2, ranks.output(0)

    logs = processes.salvaged(log)
    assert [left.ended for left in logs] == [False, False]
    for left in logs:
        calls = left.records
        assert len(calls) == left.stats["calls"] == len(np.unique(calls["t_begin"])) > 0
        assert left.stats["hook_errors"] == 0
        for group in np.unique(calls["group"]):
            numbers = np.sort(calls["seq"][calls["group"] == group])
            assert (np.diff(numbers) == 1).all(), "a call is missing"
        assert set(calls["kind"]) <= {row["id"] for row in left.tables["kinds"]}
        assert set(calls["site"]) <= {row["id"] for row in left.tables["sites"]}
    assert abs(len(logs[0].records) - len(logs[1].records)) < 50
    assert not processes.rings(log)


# ---- killed between any two steps of writing to disk -----------------------------------------------------------------


def die(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGKILL)


def half_a_write(fd: int, data: bytes) -> None:
    os.write(fd, data[: len(data) // 2])
    die()


def torn_put(self: ring.Ring, start: int, value: dict[str, object]) -> bool:
    for position in range(start, start + ring.COPY_BYTES):
        self.buffer[position + (self._turns[start] + 1) % 2 * ring.COPY_BYTES] = ord("x")
        if position == start + 100:
            die()
    return True


def written_then_die(self: segments.SegmentSeries, records: Records) -> None:
    original_append(self, records)
    if len(records):
        die()


original_append = segments.SegmentSeries.append

STEPS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "before the tables are made": (log_writer.LogWriter, "_open_tables", die),
    "before table lines": (log_writer.LogWriter, "_write_all", die),
    "within table lines": (log_writer, "write_all", half_a_write),
    "before records": (segments.SegmentSeries, "append", die),
    "within records": (segments, "write_all", half_a_write),
    "after records": (segments.SegmentSeries, "append", written_then_die),
    "before slots are freed": (slots.Slots, "release", die),
    "within the counters": (ring.Ring, "_put", torn_put),
    "before a segment is closed": (segments.WrittenSegment, "close", die),
    "before a closed segment is renamed": (os, "rename", die),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("segment_bytes", [4096, 1 << 20])
def test_killed_at_each_step_of_writing(step: str, segment_bytes: int, tmp_path: Path) -> None:
    owner, name, replacement = STEPS[step]

    def record() -> None:
        recorder = processes.recorder(tmp_path / "log", drain_ms=5, segment_min_bytes=segment_bytes)
        for number in range(60):
            recorder.returned(processes.call(recorder, number), 1, observable=False)
        processes.wait_for(lambda: recorder.stats()["calls"] and not recorder.slots.taken)
        setattr(owner, name, replacement)  # only this child is affected
        for number in range(60, 200):
            recorder.returned(processes.call(recorder, number), 1, observable=False)
        recorder.close("exit")

    assert processes.in_child(record) == -signal.SIGKILL or step == "before the tables are made"
    (left,) = processes.salvaged(tmp_path / "log")
    assert sorted(left.records["seq"].tolist()) == list(range(200))
    processes.assert_whole(left.records)
    assert left.stats["calls"] == 200
    assert not processes.rings(tmp_path / "log")


def test_killed_while_the_ring_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()

    def record() -> None:
        setattr(os, "rename", die)  # noqa: B010
        processes.recorder(tmp_path / "log", shm=str(shm))

    assert processes.in_child(record) == -signal.SIGKILL
    assert [path.suffix for path in sorted(shm.iterdir())] == [".jsonl", ".new"]
    monkeypatch.setattr("commtrace.recording.recovery.STALE_SECONDS", -1)
    monkeypatch.setenv("COMMTRACE_SHM", str(shm))
    assert processes.salvaged(tmp_path / "log") == []
    assert [path.suffix for path in shm.iterdir()] == []


def test_killed_within_a_call(tmp_path: Path) -> None:
    def record() -> None:
        recorder = processes.recorder(tmp_path / "log", drain_ms=60_000)
        recorder.returned(processes.call(recorder, 0), 5, observable=True)
        processes.call(recorder, 1)
        die()

    assert processes.in_child(record) == -signal.SIGKILL
    (left,) = processes.salvaged(tmp_path / "log")
    assert left.records["state"].tolist() == [State.RETURNED, State.BEGUN]
    assert not left.ended
