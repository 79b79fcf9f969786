"""An autograd function that communicates in both passes, in the place of Megatron-Core's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Reduce(torch.autograd.Function):
    """Sums over all ranks, in both passes."""

    @staticmethod
    def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total
