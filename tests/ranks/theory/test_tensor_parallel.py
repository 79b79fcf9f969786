"""A tensor-parallel model computes what the undivided model does, whatever is recomputed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import trainings

CASES = [
    {},
    {"no_weight_tying": False},
    {"gpt_j_residual": True},
    {"make_vocab_size_divisible_by": 37},
    {"checkpoint_activations": True, "checkpoint_reentrant": True},
    {"checkpoint_activations": True, "checkpoint_reentrant": False, "checkpoint_num_layers": 2},
    {"checkpoint_activations": True, "checkpoint_reentrant": False, "gpt_j_residual": True},
    {"fp32_allreduce": True},
    {"sequence_parallel": True},
    {"sequence_parallel": True, "gpt_j_residual": True, "no_weight_tying": False},
    {"sequence_parallel": True, "checkpoint_activations": True, "checkpoint_reentrant": True},
    {"sequence_parallel": True, "checkpoint_activations": True, "checkpoint_reentrant": False},
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_model_that_ranks_share_is_the_whole_one(ranks: int, tmp_path: Path) -> None:
    """Loss, logits, gradients and clipping are equal; parameters that all ranks hold are not counted twice."""
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps(CASES))
    started = trainings.parent().start("tensor_parallel", tmp_path / "log", cases, ranks=ranks, traced=False)
    assert started.wait() == [0] * ranks, started.output(0)[-4000:]
