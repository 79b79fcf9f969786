"""Theory against trainings whose parameters are sharded: FSDP2, HSDP, and what ZeRO-3 has beyond itself."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import sharding
import trainings
from test_theory import assert_exact

from commtrace.analyses import reconciliation
from commtrace.analyses.fold import NamedTables, fold
from commtrace.analyses.theory import predict


@functools.cache
def tables(name: str) -> NamedTables:
    """The tables of theory of one training."""
    return fold(sharding.sharded()[name], [reconciliation.ANALYSIS])


@pytest.mark.parametrize("name", sharding.NAMES)
def test_sharded_trainings_are_exact(name: str) -> None:
    print(f"THEORY_SEED={trainings.seed()}")
    assert_exact(tables(name), sharding.sharded()[name])


@pytest.mark.parametrize("name", sharding.NAMES)
def test_a_job_told_from_its_configuration_is_the_one_that_was_captured(name: str, tmp_path: Path) -> None:
    print(f"THEORY_SEED={trainings.seed()}")
    told, captured = (
        trainings.described(sharding.wanted()[name], sharding.RANKS, tmp_path),
        dict(sharding.sharded()[name].job or {}),
    )
    assert predict(told) == predict(captured)
    for block in ("zero",):
        said, known = told.pop(block, {}), captured.pop(block, {})
        assert said == {key: value for key, value in known.items() if key in said}
    assert told == {key: value for key, value in captured.items() if key in told}
