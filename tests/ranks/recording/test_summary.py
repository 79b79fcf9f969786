"""COMMTRACE_MODE=summary: counts and sizes are those of a full log, whatever ends the process."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pandas as pd
import processes
import pytest
from factory import LogFactory, record
from ranks import Nursery
from stuck_jobs import stuck_calls_of, wait_for_stuck_calls

from commtrace.cli import main
from commtrace.recording import kept_dumps
from commtrace.run import Run, open_run

EXACT = (
    "volume_by_operation",
    "volume_by_role",
    "volume_by_role_and_operation",
    "volume_by_phase",
    "volume_by_site",
    "volume_by_step",
    "steady_step",
    "message_sizes",
    "message_size_bins",
    "states",
    "ranks",
)
"""Tables that a summary has exactly."""


def counted(run: Run) -> dict[str, pd.DataFrame]:
    """The tables of EXACT, in an order that does not depend on the log, and the numbers of calls in `host_time`."""
    tables = {name: run.table(name) for name in EXACT}
    times = run.table("host_time")
    tables["host_time"] = times.assign(calls=times["calls_known"] + times["calls_unknown"])[["op", "measure", "calls"]]
    return {name: table.sort_values([*table.columns], ignore_index=True) for name, table in tables.items()}


def assert_equal(full: Run, summary: Run) -> None:
    """All counts and sizes are equal."""
    assert (summary.is_summary, full.is_summary) == (True, False)
    expected, found = counted(full), counted(summary)
    for name, table in expected.items():
        pd.testing.assert_frame_equal(table, found[name], check_dtype=False, obj=name)


GPT_NEOX = ("gpt_neox", "tiny", "--train-iters", "6", "--engine")
PROGRAMS = {
    "DDP": ("changed_training", "9", "more"),
    "ZeRO-2": (*GPT_NEOX, "deepspeed", "--zero-stage", "2"),
    "ddp": (*GPT_NEOX, "ddp"),
    **{f"ZeRO-{stage}": (*GPT_NEOX, "deepspeed", "--zero-stage", stage) for stage in ("0", "1", "3")},
}


@pytest.mark.parametrize(
    "program",
    [name if name in ("DDP", "ZeRO-2") else pytest.param(name, marks=pytest.mark.exhaustive) for name in PROGRAMS],
)
def test_counts_and_sizes_are_those_of_a_full_log(
    program: str, nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = PROGRAMS[program]
    if name == "gpt_neox":
        pytest.importorskip("deepspeed")
        pytest.importorskip("yaml")
    runs = []
    for mode in ("events", "summary"):
        statuses, outputs = nursery.run(name, tmp_path / mode, *arguments, MODE=mode)
        assert statuses == [0] * 2, outputs
        runs.append(open_run(tmp_path / mode))
    assert_equal(*runs)
    coverage = runs[1].table("coverage").iloc[0]
    assert coverage["records"] == coverage["calls"] == runs[0].table("coverage").iloc[0]["calls"]
    assert (coverage["not_found"], len(runs[1].notes)) == (0, 0)
    capsys.readouterr()
    verdicts = []
    for mode in ("events", "summary"):
        status = main(["check", str(tmp_path / mode)])
        verdicts.append((status, capsys.readouterr().out))
    assert verdicts[0] == verdicts[1]
    assert main(["report", str(tmp_path / "summary"), "--sections", "all"]) == 0
    assert "cannot be known from it" in " ".join(capsys.readouterr().out.split())
    for command in ("diff", "scaling", "export"):
        others = [str(tmp_path / "events")] if command == "diff" else []
        others += ["--out", str(tmp_path / "out.parquet")] if command == "export" else []
        assert main([command, str(tmp_path / "summary"), *others]) == 1
        assert "a summary does not have" in capsys.readouterr().err


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 20))])
def test_killed_at_a_random_moment(
    seed: int, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that was finished is in the log once: in a cell, or in full."""
    chance = random.Random(seed)
    finished, log = tmp_path / "finished", tmp_path / "log"
    finished.write_bytes(bytes(16))
    ranks = nursery.start("counting", log, finished, MODE="summary", drain_ms=chance.choice([1, 20, 100]))
    processes.wait_for(lambda: all(int.from_bytes(finished.read_bytes()[at : at + 8], "little") for at in (0, 8)))
    time.sleep(chance.uniform(0, 9))
    ranks.kill(0, 1)
    ranks.wait()
    run = open_run(log)
    numbers = [int.from_bytes(finished.read_bytes()[at : at + 8], "little") for at in (0, 8)]
    table = run.table("processes").set_index("rank")
    for rank, calls in enumerate(numbers):
        assert calls <= table["records"][rank] <= calls + 1
        assert table["calls"][rank] == table["records"][rank]
        assert table["lost"][rank] == 0
    assert not processes.rings(log)
    kept = [process.kept.count for process in run.processes if process.kept]
    assert len(kept) == 2
    assert all(count >= min(calls, 30 * 1024) - 1 for count, calls in zip(kept, numbers, strict=True))


def test_a_job_that_hangs(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = nursery.start("stuck", log, "absent", ranks=3, MODE="summary", drain_ms=10)
    for verdict in (wait_for_stuck_calls, stuck_calls_of):
        calls = verdict(log)
        assert (calls["waiting_ranks"].iloc[0], calls["absent_ranks"].iloc[0]) == ("0,2", "1")
        if verdict is wait_for_stuck_calls:
            ranks.kill(0, 1, 2)
            ranks.wait()


def test_the_last_seconds_are_written_at_a_hang_and_when_asked_for(
    tmp_path: Path,
    new_recorder: processes.NewRecorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kept_dumps, "LOOK_SECONDS", 0.02)
    log = tmp_path / "log"
    recorder = new_recorder(log, mode="summary", drain_ms=5)
    finished = [processes.call(recorder, number, step=number) for number in range(10)]
    for slot in finished:
        recorder.returned(slot, time.monotonic_ns(), observable=False)
    processes.wait_for(log.exists)
    (log / "keep").touch()
    processes.wait_for(lambda: [*log.glob("*/*/*-kept-1.npy")])
    monkeypatch.setattr(kept_dumps, "HANG_SECONDS", 0.1)
    time.sleep(0.3)
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
    assert main(["export", str(full), "--kept", "--out", str(tmp_path / "none.csv")]) == 1
    assert "no calls were kept" in capsys.readouterr().err
