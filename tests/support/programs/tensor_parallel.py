"""python tensor_parallel.py CASES: compare models split over all ranks with the whole models, also on every rank.

CASES is a JSON list of keys of GPT-NeoX's configuration. Compares loss, logits, gradients, and clipped gradients.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from examples.gpt_neox.config import TrainingConfig, load_config
from examples.gpt_neox.model import GPTNeoX, language_model_loss
from examples.gpt_neox.mpu import make_mpu, shares_of
from examples.gpt_neox.tensor_parallel import ALONE, Shares, clip_gradients, is_part


def trained(config: TrainingConfig, shares: Shares, tokens: torch.Tensor) -> tuple[GPTNeoX, torch.Tensor, torch.Tensor]:
    """Return the model, logits and loss after backward."""
    torch.manual_seed(5)
    model = GPTNeoX(config, shares)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zeros would hide a bias that is added twice
                whole = torch.linspace(-1, 1, parameter.numel() * (shares.ranks if is_part(parameter) else 1))
                parameter.copy_(part(whole, parameter, shares))
    torch.manual_seed(6)
    logits = model(tokens[:, :-1])
    loss = language_model_loss(logits, tokens[:, 1:], shares)
    torch.autograd.backward(loss)
    return model, logits, loss


def part(whole: torch.Tensor, like: torch.Tensor, shares: Shares) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    for dimension, (wide, narrow) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if wide != narrow:
            return whole.narrow(dimension, shares.rank * narrow, narrow)
    return whole


def compare(case: dict[str, Any], config: TrainingConfig, shares: Shares) -> None:
    """Compare a split model with the whole one."""
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    whole, logits, loss = trained(config, ALONE, tokens)
    cut, own_logits, own_loss = trained(config, shares, tokens)

    def same(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text: f"{case} {name}: {text}")

    same("loss", own_loss, loss)
    same("logits", own_logits, part(logits, own_logits, shares))
    gradients = dict(whole.named_parameters())
    for step in ("gradient", "clipped gradient"):
        for name, parameter in cut.named_parameters():
            expected = gradients[name].grad
            assert parameter.grad is not None
            assert expected is not None
            assert is_part(parameter) == (parameter.shape != expected.shape), name
            same(f"{step} of {name}", parameter.grad, part(expected, parameter, shares))
        if step == "gradient":
            torch.nn.utils.clip_grad_norm_(list(whole.parameters()), 0.05)
            clip_gradients(list(cut.parameters()), 0.05, shares)


def main(cases: list[dict[str, Any]]) -> None:
    """Compare all cases."""
    dist.init_process_group("gloo")
    keys = {"model_parallel_size": dist.get_world_size(), "num_layers": 3, "seq_length": 8, "hidden_size": 32}
    first = load_config(["tiny"], keys)
    mpu = make_mpu(first)
    for case in cases:
        config = load_config(["tiny"], {**keys, **case})
        shares = shares_of(config, mpu)
        assert shares.ranks == dist.get_world_size()
        compare(case, config, shares)
    dist.destroy_process_group()


with open(sys.argv[1]) as file:
    main(json.load(file))
