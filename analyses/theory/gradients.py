"""In which order gradients become ready, and into which partition they belong."""

from __future__ import annotations

from collections.abc import Sequence

from .job import Tensor
from .rules import DEEPSPEED, TORCH, rule


@rule(
    "torch/nn/parallel/distributed.py DistributedDataParallel._ddp_init_helper (its comment on reversed buckets)", TORCH
)
def gradient_order(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Backward passes layers in the reverse of forward, which is taken for the order of registration.

    True to the byte where modules run in the order in which they were made; within a linear layer autograd
    hands out the bias's gradient first, which is the reverse of registration as well.
    """
    return list(reversed(parameters))


@rule("deepspeed.runtime.zero.linear.LinearFunctionForZeroStage3.backward", DEEPSPEED)
def weights_first(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Of `gradient_order`, where ZeRO-3 has put its own linear layers in place (memory_efficient_linear).

    Their backward returns the weight's gradient before the bias's.
    """
    result = list(parameters)
    for at in range(len(result) - 1):
        if _linear(result[at + 1], result[at]):
            result[at], result[at + 1] = result[at + 1], result[at]
    return result


def _linear(weight: Tensor, bias: Tensor) -> bool:
    same = weight.name.rpartition(".")[0] == bias.name.rpartition(".")[0]
    return same and len(weight.shape) == 2 and bias.shape == weight.shape[:1]
