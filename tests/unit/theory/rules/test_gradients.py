"""The order in which gradients become ready, by the rules and by torch's autograd, in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("yaml")

import torch

from commtrace.theory.job import ModelTensor
from commtrace.theory.rules.gradients import gradient_order, zero3_linear_order
from examples.gpt_neox import load_config
from examples.gpt_neox.model import GPTNeoX, language_model_loss


def tensors(model: Any) -> list[ModelTensor]:
    """The parameters as a job has them."""
    return [ModelTensor(name, tuple(one.shape), "float32") for name, one in model.named_parameters()]


def names(order: Sequence[ModelTensor]) -> list[str]:
    return [one.name for one in order]


def watched(model: Any) -> list[str]:
    """Filled by a backward pass with the names of the parameters, as each has its whole gradient."""
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    return seen


def layers() -> torch.nn.Module:
    """One of each kind that has a weight and a bias."""
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.LayerNorm(8),
        nn.Conv1d(6, 4, 3),
        nn.BatchNorm1d(4),
        nn.ConvTranspose1d(4, 6, 3),
        nn.GroupNorm(2, 6),
        nn.Linear(8, 2),
    )


def test_of_norms_and_convolutions_the_weight_is_first_and_of_linear_layers_the_bias() -> None:
    model = layers()
    seen = watched(model)
    model(torch.randn(3, 6, 5)).sum().backward()
    assert seen == names(gradient_order(tensors(model)))
    assert seen.index("1.weight") < seen.index("1.bias")
    assert seen.index("2.weight") < seen.index("2.bias")
    assert seen.index("0.bias") < seen.index("0.weight")


def test_with_zero_3_s_linear_layers_the_weight_is_first_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    monkeypatch.setattr(torch.nn.functional, "linear", linear.zero3_linear_wrap)
    model = layers()
    seen = watched(model)
    model(torch.randn(3, 6, 5)).sum().backward()
    assert seen == names(zero3_linear_order(gradient_order(tensors(model))))
    assert seen.index("0.weight") < seen.index("0.bias")


AGAIN = {"checkpoint_activations": True, "checkpoint_num_layers": 2, "num_layers": 3}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"no_weight_tying": False},
        {"gpt_j_residual": True, "hidden_dropout": 0.1},
        {**AGAIN, "checkpoint_reentrant": True},
        {**AGAIN, "checkpoint_reentrant": False},
        {**AGAIN, "checkpoint_reentrant": False, "gpt_j_residual": True, "precision": "bf16"},
    ],
    ids=str,
)
def test_a_gpt_neox_model_hands_out_gradients_as_expected(keys: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.yml"
    path.write_text(json.dumps({"seq_length": 6, **keys}))
    config = load_config(["tiny", str(path)])
    model = GPTNeoX(config)
    if config.precision == "bf16":
        model.to(torch.bfloat16)
    seen = watched(model)
    tokens = torch.randint(0, 250, (2, 7))
    language_model_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert seen == names(gradient_order(tensors(model)))
