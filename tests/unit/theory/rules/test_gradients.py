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
    """Return the parameters as a job has them."""
    return [ModelTensor(name, tuple(parameter.shape), "float32") for name, parameter in model.named_parameters()]


def names(order: Sequence[ModelTensor]) -> list[str]:
    return [tensor.name for tensor in order]


def record_gradients(model: Any) -> list[str]:
    """Return a list to which a backward pass adds the name of each parameter when its gradient is complete."""
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    return ready


def layers() -> torch.nn.Module:
    """Return a model with layers of all kinds that have a weight and a bias."""
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
    ready = record_gradients(model)
    model(torch.randn(3, 6, 5)).sum().backward()
    assert ready == names(gradient_order(tensors(model)))
    assert ready.index("1.weight") < ready.index("1.bias")
    assert ready.index("2.weight") < ready.index("2.bias")
    assert ready.index("0.bias") < ready.index("0.weight")


def test_with_zero_3_s_linear_layers_the_weight_is_first_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = pytest.importorskip("deepspeed.runtime.zero.linear")
    monkeypatch.setattr(torch.nn.functional, "linear", linear.zero3_linear_wrap)
    model = layers()
    ready = record_gradients(model)
    model(torch.randn(3, 6, 5)).sum().backward()
    assert ready == names(zero3_linear_order(gradient_order(tensors(model))))
    assert ready.index("0.weight") < ready.index("0.bias")


CHECKPOINTED = {"checkpoint_activations": True, "checkpoint_num_layers": 2, "num_layers": 3}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"no_weight_tying": False},
        {"gpt_j_residual": True, "hidden_dropout": 0.1},
        {**CHECKPOINTED, "checkpoint_reentrant": True},
        {**CHECKPOINTED, "checkpoint_reentrant": False},
        {**CHECKPOINTED, "checkpoint_reentrant": False, "gpt_j_residual": True, "precision": "bf16"},
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
    ready = record_gradients(model)
    tokens = torch.randint(0, 250, (2, 7))
    language_model_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert ready == names(gradient_order(tensors(model)))
