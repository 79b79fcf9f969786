"""A dry run records what the real run does, call by call, on every rank, times aside."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import dry_runs
import trainings

from commtrace.reading.run import Run

SMALL = 512
"""So few that most of a tiny model is not computed either."""

VARIANTS = ("ddp", "ddp-static", "zero0", "zero1-round", "zero2-owners", "zero3-limits")
SHARED = ("tp2-ddp", "tp2-zero1-early", "tp4-zero1")


@functools.cache
def dry_variants(folder: Path) -> dict[str, Run]:
    """Dry runs of some of trainings.VARIANTS, on three ranks."""
    wanted = {name: trainings.VARIANTS[name] for name in VARIANTS}
    return dry_runs.trained(wanted, folder, 3, SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests of this module."""
    return tmp_path_factory.mktemp("dry")


@pytest.mark.parametrize("name", VARIANTS)
def test_ddp_and_every_stage_of_zero(name: str, folder: Path) -> None:
    dry_runs.assert_same(trainings.variants()[name], dry_variants(folder / "variants")[name])


@functools.cache
def dry_shared(folder: Path) -> dict[str, Run]:
    """Dry runs of some of trainings.SHARED, on four ranks."""
    wanted: dict[str, dict[str, Any]] = {name: trainings.SHARED[name] for name in SHARED}
    return dry_runs.trained(wanted, folder, 4, SMALL)


@pytest.mark.parametrize("name", SHARED)
def test_tensor_parallelism(name: str, folder: Path) -> None:
    dry_runs.assert_same(trainings.shared()[name], dry_shared(folder / "shared")[name])
