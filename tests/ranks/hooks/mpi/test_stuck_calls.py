"""Diagnosis of real mpi4py programs that hang, died or were interrupted."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import mpi_launch
import pandas as pd
import processes
import pytest
from draws import DRAWS
from stuck_jobs import others, stuck_calls_of

# Operation, ranks that wait ("others": all but rank 1), ranks that are absent, and the disagreement.
KINDS = {
    "absent": ("all_reduce", "others", "1", ""),
    "left": ("all_reduce", "others", "1", ""),
    "operation": (None, None, "", "operation: all_reduce on rank {others}, barrier on rank 1"),
    "size": ("all_reduce", None, "", "size: 8,192 bytes on rank {others}, 64 bytes on rank 1"),
    "root": ("broadcast", None, "", "root: rank 0 on rank {others}, rank 1 on rank 1"),
    "swapped": (None, None, "", "operation: barrier on rank {others}, all_reduce on rank 1"),
    "order": ("barrier", "others", "1", "order: rank 1 is in barrier 0 of group {all}/second, which waits in turn"),
    "unnamed": ("barrier", None, "", "communicator: may not be the same, because it has no name and the call sites "
                "differ"),
    "subgroup": ("all_reduce", "0", "1", ""),
    "receive": ("recv", "0", "1", ""),
    "receive of any tag": ("recv", "0", "1", ""),
    "send": ("send", "0", "1", ""),
    "tag": ("recv", "0", "1", "tag: 5 on rank 0, 7 on rank 1"),
    "cycle": ("recv", None, None, "order: "),
}  # fmt: skip
INTERRUPTIONS = {
    "openmpi": [signal.SIGTERM, signal.SIGINT, signal.SIGKILL],
    # MPICH's launcher passes SIGINT on to the ranks: the first to exit leaves the others waiting, which is a hang.
    "mpich": [signal.SIGTERM, signal.SIGKILL],
}
DEFAULT = {"tag": 2, "cycle": 3}
"""Kind in the default tier -> number of ranks."""


pytestmark = pytest.mark.usefixtures("short_waits")


def assert_named(kind: str, size: int, calls: pd.DataFrame) -> None:
    op, waiting, absent, disagreement = KINDS[kind]
    if kind == "order":  # either side may have begun first
        calls = calls[calls["waiting_ranks"] == others(size)]
    first = calls.iloc[0]
    assert op in (None, first["op"])
    assert first["disagreement"].startswith(disagreement.format(others=others(size), all=f"0-{size - 1}"))
    assert bool(first["disagreement"]) == bool(disagreement)
    assert waiting is None or first["waiting_ranks"] == (others(size) if waiting == "others" else waiting)
    assert absent in (None, first["absent_ranks"])
    assert "stuck.py:" in first["site"]
    assert "waits" in first["site"] or kind == "size"


def is_named(kind: str, size: int, calls: pd.DataFrame) -> bool:
    """Return whether the diagnosis is complete: all ranks have reached the call in which they hang."""
    try:
        assert_named(kind, size, calls)
    except (AssertionError, IndexError):
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *DEFAULT.items(),
        *(
            pytest.param(kind, size, marks=pytest.mark.exhaustive)
            for size in (2, 3, 4, 8)
            for kind in KINDS
            if DEFAULT.get(kind) != size
        ),
    ],
)
def test_a_program_that_hangs_and_is_killed(kind: str, size: int, mpi: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with mpi_launch.started(mpi, "stuck", kind, ranks=size, log=log):
        processes.wait_for(lambda: is_named(kind, size, stuck_calls_of(log)), 60)
        time.sleep(1)  # until failing ranks have failed
        assert_named(kind, size, stuck_calls_of(log))
    assert_named(kind, size, stuck_calls_of(log))


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, DRAWS))])
def test_runs_that_end_well_or_are_interrupted(seed: int, mpi: str, tmp_path: Path) -> None:
    choose = random.Random(seed)
    size = choose.choice([2, 3, 4])
    mpi_launch.run(mpi, "stuck", "well", ranks=size, log=tmp_path / "well")
    assert not len(stuck_calls_of(tmp_path / "well"))

    log = tmp_path / "interrupted"
    with mpi_launch.started(mpi, "stuck", "train", ranks=size, log=log) as process:
        processes.wait_for(lambda: len(list(log.glob("*/*/*.jsonl"))) == size, 60)
        time.sleep(choose.uniform(0.1, 1))
        assert not len(stuck_calls_of(log)), "the program still runs"
        os.killpg(process.pid, choose.choice(INTERRUPTIONS[mpi]))
        process.wait(30)
    assert not len(stuck_calls_of(log))
