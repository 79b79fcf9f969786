"""An autograd function of tensor parallelism, which the programs beside this file call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Reduce(torch.autograd.Function):
    """An all_reduce in forward and in backward."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient
