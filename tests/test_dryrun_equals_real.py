"""A dry run records what the real run does, call by call, on every rank, times aside."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import dry_runs
import processes
import trainings

from commtrace.reading.run import Run, open_run

SMALL = 512
"""So few that most of a tiny model is not computed either."""

VARIANTS = ("ddp", "zero1-round", "zero3-limits")
MORE_VARIANTS = ("ddp-static", "zero0", "zero2-owners")
SHARED = ("tp2-ddp", "tp2-zero1-early", "tp4-zero1")


@functools.cache
def dry_variants(folder: Path, names: tuple[str, ...]) -> dict[str, Run]:
    """Dry runs of some of trainings.VARIANTS, on three ranks."""
    return dry_runs.trained({name: trainings.VARIANTS[name] for name in names}, folder, 3, SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests of this module."""
    return tmp_path_factory.mktemp("dry")


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_ddp_and_every_stage_of_zero(name: str, folder: Path) -> None:
    dry_runs.assert_same(trainings.variants()[name], dry_variants(folder / "variants", VARIANTS)[name])


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_VARIANTS)
def test_further_settings_of_ddp_and_zero(name: str, folder: Path) -> None:
    dry_runs.assert_same(trainings.variants()[name], dry_variants(folder / "more", MORE_VARIANTS)[name])


@functools.cache
def dry_shared(folder: Path) -> dict[str, Run]:
    """Dry runs of some of trainings.SHARED, on four ranks."""
    wanted: dict[str, dict[str, Any]] = {name: trainings.SHARED[name] for name in SHARED}
    return dry_runs.trained(wanted, folder, 4, SMALL)


@pytest.mark.long
@pytest.mark.parametrize("name", SHARED)
def test_tensor_parallelism(name: str, folder: Path) -> None:
    dry_runs.assert_same(trainings.shared()[name], dry_shared(folder / "shared")[name])


WAYS: Final = {"fsdp2": 2, "tensor": 2}
"""Functions of tests/programs/sharded.py, and on how many ranks."""
MORE_WAYS: Final = {"pipeline": 2, "hsdp": 4, "sharded_tensor": 4, "deepspeed_pipeline": 4}


def orders(folder: Path, ways: list[str]) -> Path:
    """What `sharded.py` is to do, each into a log of its own."""
    folder.mkdir(parents=True)
    path = folder / "orders.json"
    order = [{"log": str(folder / way), "port": processes.free_port(), "way": way} for way in ways]
    path.write_text(json.dumps(order))
    return path


@functools.cache
def both(folder: Path, ways: tuple[str, ...], world: int) -> None:
    """Real runs and dry ones; those that wait for each other's messages in a start of their own."""
    real = trainings.parent().start(
        "sharded", folder / "log", orders(folder / "real", [*ways]), ranks=world, traced=False
    )
    assert real.wait(dry_runs.LIMIT_SECONDS) == [0] * world, real.output(0)[-4000:]
    path = orders(folder / "dry", [*ways])
    dry_runs.simulated("sharded", folder / "dry" / "simulated", world, path, small=SMALL)


def assert_same(way: str, ways: dict[str, int], folder: Path) -> None:
    """What runs alone is a start of its own, everything else is one."""
    together = tuple(other for other in ways if "pipeline" not in other)
    run = (way,) if "pipeline" in way else together
    here = folder / run[0]
    here.mkdir(exist_ok=True)
    both(here, run, ways[way])
    dry_runs.assert_same(open_run(here / "real" / way), open_run(here / "dry" / way))


@pytest.mark.parametrize("way", WAYS)
def test_sharding_tensors_and_pipelines(way: str, folder: Path) -> None:
    assert_same(way, WAYS, folder)


@pytest.mark.long
@pytest.mark.parametrize("way", MORE_WAYS)
def test_several_ways_at_once(way: str, folder: Path) -> None:
    assert_same(way, MORE_WAYS, folder)
