"""A dry run records the same calls as the real run on every rank, except for their times."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from ports import free_port

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import dry_runs
import pipelines
import sequence_trainings
import sharding
import trainings

from commtrace.cli import main
from commtrace.run import Run, open_run

SMALL: Final = 512
"""Elements up to which a dry run computes tensors; so few that it does not compute most of a tiny model."""

Runs = Callable[[], Mapping[str, Run]]


class Start(NamedTuple):
    """Trainings that are dry-run in one start; their real runs are shared with other tests."""

    ranks: int
    real: dict[str, Runs]
    wanted: Mapping[str, Any]


def start_of(ranks: int, runs: Runs, wanted: Mapping[str, Any], *names: str) -> Start:
    """Return a start of all wanted trainings, or of those with the given names."""
    return Start(ranks, dict.fromkeys(names or wanted, runs), wanted)


def combined(*starts: Start) -> Start:
    """Combine starts into one."""
    real = {name: runs for start in starts for name, runs in start.real.items()}
    return Start(starts[0].ranks, real, {name: training for start in starts for name, training in start.wanted.items()})


# The calls of the others depend on computed values: how many tokens go to each expert.
SUITABLE: Final = {
    name: training for name, training in sequence_trainings.FIXED.items() if name not in sequence_trainings.BOUNDED
}

STARTS: Final = {
    "four": combined(
        start_of(4, trainings.shared, trainings.SHARED, "tp2-zero1"),
        start_of(4, sequence_trainings.runs, SUITABLE, "sp2-zero0"),
    ),
}
"""The GPT-NeoX workload, its model divided as Megatron divides it."""

MORE_STARTS: Final = {
    "ddp and zero": start_of(
        3,
        trainings.variants,
        trainings.VARIANTS,
        *("ddp", "ddp-static", "zero0", "zero1-round", "zero2-owners", "zero3-limits"),
    ),
    "tensor": start_of(4, trainings.shared, trainings.SHARED),
    "sequence": start_of(4, sequence_trainings.runs, SUITABLE),
    "pipelines of two": start_of(2, pipelines.RUNS[2], pipelines.TWO),
    "pipelines of four": start_of(4, pipelines.RUNS[4], pipelines.FOUR),
    "three at once": start_of(8, pipelines.RUNS[8], pipelines.EIGHT),
    "sharded": start_of(4, sharding.sharded, sharding.SHARDED),
}
"""Ulysses, rings, experts, pipelines, and their combinations."""


@functools.cache
def dry(folder: Path, which: str) -> dict[str, Run]:
    """Return the dry runs of a start."""
    start = {**STARTS, **MORE_STARTS}[which]
    # ZeRO-3 last: it changes linear layers for the rest of its process.
    names = sorted(start.real, key=lambda name: "zero3" in name)
    return dry_runs.trained({name: start.wanted[name] for name in names}, folder / which, start.ranks, SMALL)


def listed(starts: dict[str, Start]) -> list[tuple[str, str]]:
    """Return the (start, training) pairs of starts."""
    return [(which, name) for which, start in starts.items() for name in start.real]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for all tests of this module."""
    return tmp_path_factory.mktemp("dry")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("which", "name"), listed(STARTS))
def test_the_workload_in_every_way(which: str, name: str, folder: Path) -> None:
    dry_runs.assert_same(STARTS[which].real[name]()[name], dry(folder, which)[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("which", "name"), listed(MORE_STARTS))
def test_the_workload_in_more_ways(which: str, name: str, folder: Path) -> None:
    dry_runs.assert_same(MORE_STARTS[which].real[name]()[name], dry(folder, which)[name])


# ---- small models divided in torch's and DeepSpeed's own ways --------------------------------------------------------

WAYS: Final = {"fsdp1": 2, "fsdp2": 2, "tensor": 2, "pipeline": 2}
"""Function of tests/support/programs/sharded.py -> number of ranks."""
MORE_WAYS: Final = {"hsdp": 4, "sharded_tensor": 4, "deepspeed_pipeline": 4}


def orders(folder: Path, ways: list[str]) -> Path:
    """Write the list of ways that `sharded.py` runs, each with its own log, and return the path."""
    folder.mkdir(parents=True)
    path = folder / "orders.json"
    order = [{"log": str(folder / way), "port": free_port(), "way": way} for way in ways]
    path.write_text(json.dumps(order))
    return path


@functools.cache
def both(folder: Path, ways: tuple[str, ...], world: int) -> None:
    """Run ways for real and as dry runs."""
    real = trainings.parent().start(
        "sharded", folder / "log", orders(folder / "real", [*ways]), ranks=world, traced=False
    )
    assert real.wait(dry_runs.LIMIT_SECONDS) == [0] * world, real.output(0)[-4000:]
    path = orders(folder / "dry", [*ways])
    dry_runs.simulated("sharded", folder / "dry" / "simulated", world, path, small=SMALL)


def assert_same(way: str, ways: dict[str, int], folder: Path) -> None:
    """Assert that the real run and the dry run of a way are equal; all ways run in one start."""
    here = folder / "-".join(ways)
    both(here, (*ways,), ways[way])
    dry_runs.assert_same(open_run(here / "real" / way), open_run(here / "dry" / way))


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_torch(way: str, folder: Path) -> None:
    assert_same(way, WAYS, folder)


@pytest.mark.long
def test_the_norm_of_sharded_gradients_is_a_call_of_the_program_that_clips(folder: Path) -> None:
    """The model does not declare that gradients are clipped, so no rule expects the call."""
    assert_same("fsdp2", WAYS, folder)
    assert main(["check", str(folder / "-".join(WAYS) / "real" / "fsdp2")]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", MORE_WAYS)
def test_several_ways_at_once(way: str, folder: Path) -> None:
    assert_same(way, MORE_WAYS, folder)
