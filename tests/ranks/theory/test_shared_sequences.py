"""Ranks that share sequences in either way compute what one rank does with full ones, whatever is recomputed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import trainings

AGAIN = {"checkpoint_activations": True}
WAYS = ("sequence_parallel_size", "context_parallel_size")
CASES = [
    {way: 0, **keys}  # 0: over all ranks
    for way in WAYS
    for keys in ({}, {**AGAIN, "checkpoint_reentrant": True}, {**AGAIN, "checkpoint_reentrant": False})
]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_that_share_sequences_are_one(ranks: int, tmp_path: Path) -> None:
    """Loss, logits and gradients are those of one rank."""
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps(CASES))
    started = trainings.parent().start("shared_sequences", tmp_path / "log", cases, ranks=ranks, traced=False)
    assert started.wait() == [0] * ranks, started.output(0)[-4000:]
