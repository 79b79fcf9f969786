"""python shared_sequences.py CASES: compare models with sequences split over all ranks with models on whole sequences.

CASES is a JSON list of keys of GPT-NeoX's configuration. Compares loss, logits, and reduced gradients.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from examples.gpt_neox.config import TrainingConfig, load_config
from examples.gpt_neox.deepspeed_engine import forbid_compiling
from examples.gpt_neox.model import GPTNeoX, language_model_loss
from examples.gpt_neox.mpu import make_mpu, shares_of
from examples.gpt_neox.sequence import ULYSSES
from examples.gpt_neox.tensor_parallel import ALONE, Shares


def trained(config: TrainingConfig, shares: Shares, tokens: torch.Tensor) -> tuple[GPTNeoX, torch.Tensor, torch.Tensor]:
    """Return the model, logits and loss after backward."""
    torch.manual_seed(5)
    model = GPTNeoX(config, shares)
    logits = model(shares.parts.of(tokens[:, :-1]))
    loss = language_model_loss(logits, shares.parts.of(tokens[:, 1:]), shares)
    torch.autograd.backward(loss)
    return model, logits, loss.detach()


def compare(case: dict[str, Any], config: TrainingConfig, shares: Shares) -> None:
    """Compare a model with split sequences with the same model on whole sequences."""
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    parts = shares.parts
    assert parts.ranks == dist.get_world_size()
    whole, logits, loss = trained(config, ALONE, tokens)
    own, own_logits, own_loss = trained(config, shares, tokens)

    def same(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text: f"{case} {name}: {text}")

    length = logits.shape[1] // parts.ranks
    same("logits", own_logits, logits[:, parts.rank * length :][:, :length])
    # With Ulysses, every rank has the loss of the whole sequences, and gradients are summed. In a ring, a rank has the
    # loss of its part, and losses and gradients are averaged.
    share = 1.0 if parts.way == ULYSSES else 1.0 / parts.ranks
    if parts.way != ULYSSES:
        dist.all_reduce(own_loss)
    same("loss", own_loss * share, loss)
    gradients = dict(whole.named_parameters())
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        expected = gradients[name].grad
        assert expected is not None
        same(f"gradient of {name}", parameter.grad * share, expected)


def main(cases: list[dict[str, Any]]) -> None:
    """Compare all cases."""
    forbid_compiling()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    shares: dict[str, Shares] = {}
    for case in cases:
        way = next(key for key in case if key.endswith("parallel_size"))
        keys = {"num_layers": 2, "seq_length": 16, **case, way: dist.get_world_size()}
        config = load_config(["tiny"], keys)
        if way not in shares:
            shares[way] = shares_of(config, make_mpu(config))
        compare(case, config, shares[way])
    deepspeed.comm.destroy_process_group()


with open(sys.argv[1]) as file:
    main(json.load(file))
