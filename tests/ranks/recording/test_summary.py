"""With COMMTRACE_MODE=summary every call is in the log once, however the process ends, and the last ones in full."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import processes
import pytest
from factory import LogFactory, record
from ranks import Nursery
from stuck_jobs import stuck_calls_of, wait_for_stuck_calls

from commtrace.cli import main
from commtrace.recording import kept_records, log_writer, summary_files, summary_writer
from commtrace.run import open_run


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))])
def test_killed_at_a_random_moment(
    seed: int, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every finished call is in the log once: in a cell or in full."""
    chance = random.Random(seed)
    finished, log = tmp_path / "finished", tmp_path / "log"
    finished.write_bytes(bytes(16))
    ranks = nursery.start("counting", log, finished, MODE="summary", drain_ms=chance.choice([1, 20, 100]))
    processes.wait_for(lambda: all(int.from_bytes(finished.read_bytes()[i : i + 8], "little") for i in (0, 8)))
    time.sleep(chance.uniform(0, 9))
    ranks.kill(0, 1)
    ranks.wait()
    run = open_run(log, recover=True)
    numbers = [int.from_bytes(finished.read_bytes()[i : i + 8], "little") for i in (0, 8)]
    table = run.table("processes").set_index("rank")
    for rank, calls in enumerate(numbers):
        assert calls <= table["records"][rank] <= calls + 1
        assert table["calls"][rank] == table["records"][rank]
        assert table["lost"][rank] == 0
    assert not processes.rings(log)
    kept = [process.kept.count for process in run.processes if process.kept]
    assert len(kept) == 2
    assert all(count >= min(calls, 30 * 1024) - 1 for count, calls in zip(kept, numbers, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("keep_seconds", [30, 1])
def test_killed_after_many_calls(keep_seconds: int, new_recorder: processes.NewRecorder, tmp_path: Path) -> None:
    """More calls are made than are kept between two snapshots; with the shortest keep time, some may be lost."""
    calls = 50_000

    def call_and_die() -> None:
        recorder = new_recorder(tmp_path, mode="summary", drain_ms=5, keep_seconds=float(keep_seconds))
        for number in range(calls):
            while not recorder.slots.free:
                time.sleep(0.001)
            recorder.returned(processes.call(recorder, number, step=0), time.monotonic_ns(), observable=False)
        processes.wait_for(lambda: recorder.slots.taken == 0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert processes.in_child(call_and_die, 60) == -signal.SIGKILL
    run = open_run(tmp_path, recover=True)
    ((records, lost),) = run.table("processes")[["records", "lost"]].to_numpy().tolist()
    assert records + lost == run.table("volume_by_operation")["calls"].sum() + lost == calls
    assert lost == 0 or keep_seconds == 1


def test_rows_are_written_once_when_the_disk_is_full_for_a_while(
    new_recorder: processes.NewRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up after some tables of a write."""
    failures: list[Path] = []

    def append_rows(path: Path, *arguments: Any) -> int:
        if len(failures) < 3 and path.name.endswith("-times.npy"):
            failures.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return summary_files.append_rows(path, *arguments)

    monkeypatch.setattr(log_writer, "append_rows", append_rows)
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(summary_writer, "FOLD_SECONDS", 0.01)
    monkeypatch.setattr(summary_writer, "WRITE_SECONDS", 0.02)
    recorder = new_recorder(tmp_path, mode="summary", drain_ms=5)
    calls = 0
    while len(failures) < 3:
        recorder.returned(processes.call(recorder, calls, step=calls), time.monotonic_ns(), observable=False)
        calls += 1
        time.sleep(0.005)
    recorder.close("exit")
    run = open_run(tmp_path)
    assert run.table("volume_by_step")["calls"].tolist() == [1] * calls
    assert run.table("host_time")["calls_known"].max() == calls


@pytest.mark.parametrize("files", ["*.*", "*-cells.npy", "*-steps.npy", "*-times.npy"])
def test_calls_after_a_file_was_removed_are_in_the_log(
    files: str, new_recorder: processes.NewRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_writer, "FOLD_SECONDS", 0.01)
    monkeypatch.setattr(summary_writer, "WRITE_SECONDS", 0.02)
    recorder = new_recorder(tmp_path, mode="summary", drain_ms=5)
    for first in (0, 100):
        for number in range(first, first + 100):
            recorder.returned(processes.call(recorder, number, step=number), time.monotonic_ns(), observable=False)
        processes.wait_for(lambda: [*tmp_path.glob("*/*/*-steps.npy")])
        for path in tmp_path.glob(f"*/*/{files}") if first == 0 else ():
            path.unlink()
    recorder.close("exit")
    coverage = open_run(tmp_path).table("coverage").iloc[0]
    assert coverage["records"] + coverage["not_found"] == coverage["calls"] == 200
    assert coverage["records"] >= 100


@pytest.mark.long
def test_a_job_that_hangs(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = nursery.start("stuck", log, "absent", ranks=3, MODE="summary", drain_ms=10)
    for read in (wait_for_stuck_calls, stuck_calls_of):
        calls = read(log)
        assert (calls["waiting_ranks"].iloc[0], calls["absent_ranks"].iloc[0]) == ("0,2", "1")
        if read is wait_for_stuck_calls:
            ranks.kill(0, 1, 2)
            ranks.wait()


def test_the_last_seconds_are_written_at_a_hang_and_when_asked_for(
    tmp_path: Path,
    new_recorder: processes.NewRecorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kept_records, "CHECK_SECONDS", 0.02)
    log = tmp_path / "log"
    recorder = new_recorder(log, mode="summary", drain_ms=5, stall_seconds=0.1, stall_factor=1.0)
    finished = [processes.call(recorder, number, step=number) for number in range(10)]
    for slot in finished:
        recorder.returned(slot, time.monotonic_ns(), observable=False)
    processes.wait_for(log.exists)
    (log / "keep").touch()
    processes.wait_for(lambda: [*log.glob("*/*/*-kept-1.npy")])
    processes.wait_for(lambda: any("stacks" in path.read_text() for path in log.glob("*/*/*.jsonl")))
    assert len([*log.glob("*/*/*-kept-*.npy")]) == 1, "no call is in flight"
    processes.call(recorder, 10, step=10)
    processes.wait_for(lambda: [*log.glob("*/*/*-kept-2.npy")])
    recorder.close("exit")
    out = tmp_path / "calls.csv"
    assert main(["export", str(log), "--kept", "--out", str(out)]) == 0
    assert "11 calls" in capsys.readouterr().out
    table = pd.read_csv(out)
    assert (table["step"].tolist(), table["seq"].tolist()) == ([*range(11)], [*range(11)])
    assert table["state"].tolist() == ["unobservable"] * 10 + ["begun"]
    assert open_run(log).table("coverage")["records"].tolist() == [11]
    full = tmp_path / "full"
    LogFactory(full).process(0).known().write([record()]).end()
    assert main(["export", str(full), "--kept", "--out", str(tmp_path / "none.csv")]) == 2
    assert "no calls were kept" in capsys.readouterr().err
