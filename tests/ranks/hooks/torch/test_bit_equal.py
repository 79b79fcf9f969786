"""Tracing changes no bit of a training."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from hook_programs.runs import ENGINES, training


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_are_the_same_bits(engine: str, rank: int, recorder: str) -> None:
    traced, untraced = (training(used_recorder).told(rank)[engine]["losses"] for used_recorder in (recorder, None))
    assert len(traced) == 6
    assert len(set(traced)) == 6  # it trains: each step has a different loss
    assert traced == untraced
    assert training(recorder).calls(rank, engine)
