"""Diagnosis of real jobs with gloo that hang, died, ended or were interrupted."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pandas as pd
import processes
import pytest
from draws import DRAWS

pytest.importorskip("torch")

from ranks import Nursery, Ranks
from stuck_jobs import others, stuck_calls_of, wait_for_stuck_calls

from commtrace.cli import main
from commtrace.run import open_run

# Operation, which other ranks wait, whether rank 1 is absent, and its disagreement.
KINDS = {
    "absent": ("all_reduce", "all", "absent", ""),
    "operation": ("all_reduce", "all", "", "operation: all_reduce on rank {others}, broadcast on rank 1"),
    "size": ("all_reduce", "all", "", "size: 4,096 bytes on rank {others}, 32 bytes on rank 1"),
    "dtype": ("all_reduce", "some", "", "dtype: float32 on rank {others}, float64 on rank 1"),
    "root": ("broadcast", "some", "", "root: rank 0 on rank {others}, rank 1 on rank 1"),
    "swapped": ("all_gather", "all", "", "operation: all_gather on rank {others}, all_reduce on rank 1"),
    "order": ("all_reduce", "all", "absent", "order: rank 1 is in all_reduce 0 of group {all}/2, which waits in turn"),
    "subgroup": ("all_reduce", "0", "absent", ""),
    "receive": ("recv", "0", "absent", ""),
    "send": ("send", "0", "absent", ""),
    "tag": ("recv", "0", "absent", "tag: 5 on rank 0, 7 on rank 1"),
    "cycle": ("recv", "cycle", "", "order: "),
    "killed": ("all_reduce", "all", "absent", ""),
}
WAITS = {"operation", "size", "dtype", "root", "swapped"}
"""Kinds in which rank 1 is in the call as well."""


pytestmark = pytest.mark.usefixtures("short_waits")


def assert_named(kind: str, size: int, calls: pd.DataFrame) -> None:
    op, waiting, absent, disagreement = KINDS[kind]
    if kind == "order":  # either side may have begun first
        calls = calls[calls["waiting_ranks"] == others(size)]
    assert len(calls)
    first = calls.iloc[0]
    assert first["op"] in (op, "broadcast" if kind == "operation" else "all_reduce" if kind == "swapped" else op)
    assert first["disagreement"].startswith(disagreement.format(others=others(size), all=f"0-{size - 1}"))
    assert bool(first["disagreement"]) == bool(disagreement)
    if absent:
        assert first["absent_ranks"] == "1"
    if waiting == "cycle":
        assert len(calls) == size
        assert {*calls["waiting_ranks"]} == {str(rank) for rank in range(size)}
    elif waiting != "some" and kind not in WAITS:
        assert first["waiting_ranks"] == (others(size) if waiting == "all" else waiting)
    assert "stuck.py:" in first["site"]
    assert "waits" in first["site"] or kind in WAITS  # a rank that aborts is no longer in the call


def assert_soon_named(kind: str, size: int, log: Path, limit: float = 60) -> None:
    """Assert the diagnosis of a living job as soon as it is right: on a busy machine, ranks enter and fail late."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return assert_named(kind, size, stuck_calls_of(log))
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def hang(nursery: Nursery, log: Path, kind: str, size: int) -> tuple[Ranks, pd.DataFrame]:
    """Start a job that hangs, and return its ranks and the diagnosis."""
    ranks = nursery.start("stuck", log, kind, ranks=size)
    return ranks, wait_for_stuck_calls(log)


SIZES = {"absent": 4, "cycle": 3}
"""Kind in the default tier -> number of ranks."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *SIZES.items(),
        *(
            pytest.param(kind, size, marks=pytest.mark.exhaustive)
            for kind in KINDS
            for size in (2, 3, 4, 8)
            if SIZES.get(kind) != size
        ),
    ],
)
def test_a_job_that_hangs_and_is_killed(kind: str, size: int, nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks, _ = hang(nursery, log, kind, size)
    rings = processes.rings(log)
    time.sleep(0.5)  # until failing ranks have failed
    assert_soon_named(kind, size, log)
    if kind not in ("size", "dtype", "killed"):  # in these kinds, ranks end by themselves
        assert processes.rings(log) == rings, "the memory of living processes stays"
    ranks.kill(*range(size))
    ranks.wait()
    assert_named(kind, size, open_run(log).table("stuck_calls"))  # from the memory of the killed processes
    assert_named(kind, size, stuck_calls_of(log))


def test_a_job_of_which_only_some_steps_are_recorded(nursery: Nursery, tmp_path: Path) -> None:
    """Calls in the other steps show which rank was absent, even after the ranks were killed."""
    log = tmp_path / "log"
    ranks = nursery.start("stuck", log, "absent", ranks=3, STEPS="1", drain_ms=10)
    assert_named("absent", 3, wait_for_stuck_calls(log))
    ranks.kill(0, 1, 2)
    ranks.wait()
    assert_named("absent", 3, stuck_calls_of(log))
    run = open_run(log)
    assert run.table("coverage")["not_selected"].tolist() == [3 * 2 * 4 - 4]  # rank 2 makes no call of the pair
    complete = run.events().loc[lambda calls: calls["state"] == "complete"]
    assert {*complete["step"]} == {1}


def test_check_has_a_status_for_it(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    ranks, _ = hang(nursery, log, "absent", 2)
    assert main(["check", str(log)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Rank 1 ")
    assert lines[0].endswith("; rank 0 waited for it (confidence: medium).")
    assert lines[1].startswith("all_reduce 5 of ranks 0-1 has not completed: rank 0 entered it at ")
    assert main(["report", str(log)]) == 0
    assert "still running" in " ".join(capsys.readouterr().out.split())
    ranks.kill(0, 1)
    ranks.wait()


def test_a_timeout_and_a_rank_that_never_came(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = nursery.start("stuck", log, "absent", 3, ranks=2)
    processes.wait_for(lambda: log.exists() and any("end" in left.tables for left in processes.read_all(log)[:1]), 40)
    ranks.kill(1)
    ranks.wait()
    (call,) = stuck_calls_of(log).itertuples()
    assert (call.waiting_ranks, call.absent_ranks) == ("0", "1")


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, DRAWS))])
def test_runs_that_end_well_or_are_interrupted(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    choose = random.Random(seed)
    size = choose.choice([2, 2, 3, 4, 8])
    nursery.run("stuck", tmp_path / "well", "well", ranks=size)
    assert not len(stuck_calls_of(tmp_path / "well"))

    log = tmp_path / "interrupted"
    ranks = nursery.start("stuck", log, "train", ranks=size)
    processes.wait_for(lambda: len(list(log.glob("*/*/*.jsonl"))) == size, 60)
    time.sleep(choose.uniform(0.1, 1))
    assert not len(stuck_calls_of(log)), "the job still runs"
    how = choose.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    # Stop all ranks first: on a busy machine, a rank would otherwise observe another one's end before its own.
    for number in (signal.SIGSTOP, how, signal.SIGCONT):
        for rank in choose.sample(range(size), size):
            ranks.kill(rank, signal_=number)
    ranks.wait()
    assert not len(stuck_calls_of(log))


@pytest.mark.long
def test_a_rank_that_does_not_end_in_a_test_shows_its_stacks(nursery: Nursery, tmp_path: Path) -> None:
    started = nursery.start("stuck", tmp_path / "log", "absent")
    with pytest.raises(AssertionError, match=r"(?s)no end after 8 s.*line \d+ in waits.*line \d+ in stop"):
        started.wait(limit=8)
