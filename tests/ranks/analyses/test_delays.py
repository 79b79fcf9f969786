"""Delays in real trainings whose computation is sleep: rank, phase, steps and amount are named correctly.

Other work on the machine also delays ranks and can hide the prepared delay. All tests here are therefore exhaustive,
and a failed attempt is repeated: a real fault fails every attempt. Tests with simulated logs check exact amounts
(tests/unit/analyses/across_ranks).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import mpi_launch
import pytest
import ranks
import recorders
from draws import DRAWS

from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.run import open_run

pytestmark = pytest.mark.exhaustive
MPIS = tuple(name for name in mpi_launch.NAMES if not mpi_launch.obstacle(name))
ATTEMPTS = 3
DELAY_MS = 120
PHASES = {
    "ddp": ("forward", "backward"),
    "zero1": ("forward", "backward"),
    "zero3": ("forward", "backward"),
    "tensor": ("forward", "backward"),
    "pipeline": ("forward", "backward"),
    **dict.fromkeys(MPIS, ("forward", "backward")),
}
NAMED = {
    ("ddp", "forward"): "begin of step to",  # DDP's first call is in backward
    ("zero1", "forward"): "begin of step to",
    ("zero1", "backward"): "begin of step to",
}
"""(scheme, phase) -> phase in the table, where the scheme makes no call between the start of the step and the delay."""


@pytest.fixture(scope="module")
def deepspeed_nursery() -> Iterator[ranks.Nursery]:
    recorders.needs("native")
    with ranks.Nursery("native", "deepspeed", DS_ACCELERATOR="cpu") as parent:
        yield parent


def delays(nursery: ranks.Nursery, folder: Path, scheme: str, size: int, *delay: object) -> list[dict[str, object]]:
    if scheme in MPIS:
        mpi_launch.succeeds(scheme, "delayed", *delay, ranks=size, log=folder)
    else:
        statuses, outputs = nursery.run("delayed", folder, scheme, *delay, ranks=size)
        assert statuses == [0] * size, "\n".join(outputs)
    run = open_run(folder)
    assert replayed_run(run).replay.error_ns == 0, "a replay gives back what was recorded"
    return [{str(name): value for name, value in row.items()} for row in run.table("delays").to_dict("records")]


def retry(folder: Path, attempt: Callable[[Path], None]) -> None:
    for number in range(1, ATTEMPTS + 1):
        try:
            attempt(folder / str(number))
        except AssertionError as error:
            print(f"attempt {number}: {str(error).splitlines()[0]}")
            if number == ATTEMPTS:
                raise
        else:
            return


def check(nursery: ranks.Nursery, folder: Path, scheme: str, size: int, rank: int, phase: str, steps: str) -> None:
    rows = delays(nursery, folder, scheme, size, rank, phase, DELAY_MS, steps)
    assert rows, "no delay"
    delay, *others = rows
    assert delay["rank"] == rank
    assert NAMED.get((scheme, phase), phase) in str(delay["phase"])
    times = 2 if scheme in ("pipeline", "tensor", *MPIS) else 1
    print(f"{scheme} on {size} ranks: {float(str(delay['delay_ns'])) / 1e6:.1f} ms of {times * DELAY_MS}")
    assert float(str(delay["delay_ns"])) == pytest.approx(times * DELAY_MS * 1e6, rel=0.05)
    if steps != "all":
        assert delay["steps"] == steps
    else:
        assert delay["recurrence"] == "every step"
    assert not others


@pytest.mark.parametrize(
    ("scheme", "size", "rank", "phase", "steps"),
    [
        ("zero3", 2, 0, "forward", "6"),
        ("ddp", 2, 1, "backward", "all"),
        ("pipeline", 4, 1, "forward", "all"),
        *((name, 4, 2, "backward", "3,6,9,12") for name in MPIS),
    ],
)
def test_a_delay_is_named(
    deepspeed_nursery: ranks.Nursery, tmp_path: Path, scheme: str, size: int, rank: int, phase: str, steps: str
) -> None:
    retry(tmp_path, lambda folder: check(deepspeed_nursery, folder, scheme, size, rank, phase, steps))


@pytest.mark.parametrize("number", range(DRAWS))
def test_delays_drawn_at_random(deepspeed_nursery: ranks.Nursery, tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    scheme, size = chance.choice([*PHASES]), chance.choice((2, 4, 8))
    steps = chance.choice(("all", str(chance.randrange(2, 12)), "3,6,9,12"))
    rank, phase = chance.randrange(size), chance.choice(PHASES[scheme])
    retry(tmp_path, lambda folder: check(deepspeed_nursery, folder, scheme, size, rank, phase, steps))


@pytest.mark.parametrize("number", range(DRAWS))
def test_nobody_is_named_without_a_delay(deepspeed_nursery: ranks.Nursery, tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    scheme, size = chance.choice([*PHASES]), chance.choice((2, 4, 8))

    def attempt(folder: Path) -> None:
        assert delays(deepspeed_nursery, folder, scheme, size) == []

    retry(tmp_path, attempt)
