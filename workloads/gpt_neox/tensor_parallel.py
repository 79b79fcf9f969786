"""Tensor parallelism as Megatron-LM and GPT-NeoX do it (arXiv 1909.08053): what is cut, and where ranks communicate.

A column-parallel matrix has its outputs cut, so that no rank needs another's; a row-parallel one its inputs, so that
the ranks' outputs add up. One behind the other they need one all_reduce forward (g, behind the second) and one backward
(f, in front of the first). `Shares` says which part is this rank's; with one rank nothing is cut and nothing sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Shares:
    """This rank's place among those that share a model."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    wide: bool = False
    """Sums travel in fp32, whatever the type of the activations (GPT-NeoX's `fp32_allreduce`)."""

    def range_of(self, size: int) -> tuple[int, int]:
        """First and behind the last of this rank's of `size` rows or columns, which the ranks divide."""
        each = size // self.ranks
        return self.rank * each, (self.rank + 1) * each

    def part(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's rows (0) or columns (1), in memory of their own."""
        if self.ranks == 1:
            return whole
        begin, end = self.range_of(whole.shape[dimension])
        return whole.narrow(dimension, begin, end - begin).clone()

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """f: the same forward; backward the ranks' gradients are summed."""
        return x if self.ranks == 1 else _Copied.apply(x, self)  # type: ignore[no-untyped-call]

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """g: forward the ranks' outputs are summed; the same backward."""
        return x if self.ranks == 1 else _Summed.apply(x, self)  # type: ignore[no-untyped-call]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place of `x` where its type is the one that travels."""
        travels = x.float() if self.wide else x.contiguous()
        dist.all_reduce(travels, group=self.group)
        return travels.to(x.dtype)


ALONE = Shares()
"""Of a model that is not cut."""


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shares: Shares) -> torch.Tensor:
        ctx.shares = shares
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: the gradient belongs to autograd, and may be another function's as well.
        return ctx.shares.all_reduce(gradients[0].clone()), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, shares: Shares) -> torch.Tensor:
        return shares.all_reduce(x.clone())

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits whose vocabulary is cut: (b, s, V/t) fp32 against tokens (b, s); the losses (b, s).

    Three all_reduces of one number a token: the largest logit, the token's own, the sum of exponentials.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, shares: Shares) -> torch.Tensor:
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shares.group)
        logits = logits - largest.unsqueeze(-1)
        begin, end = shares.range_of(logits.shape[-1] * shares.ranks)
        elsewhere = (labels < begin) | (labels >= end)
        own = (labels - begin).masked_fill(elsewhere, 0)
        predicted = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(predicted, group=shares.group)
        exponentials = logits.exp()
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total, group=shares.group)
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), own, elsewhere)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shares_of_one, own, elsewhere = ctx.saved_tensors
        right = torch.zeros_like(shares_of_one).scatter_(-1, own.unsqueeze(-1), (~elsewhere).float().unsqueeze(-1))
        return (shares_of_one - right) * gradients[0].unsqueeze(-1), None, None


def clip_gradients(parameters: list[torch.nn.Parameter], limit: float, shares: Shares) -> None:
    """As torch's `clip_grad_norm_`, where ranks hold parts of some parameters and the same of others.

    One all_reduce of one fp32 number: each rank's parts, and on the first what all of them have (Megatron's way).
    """
    if shares.ranks == 1:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    squares = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    for parameter in parameters:
        if parameter.grad is not None and (is_part(parameter) or shares.rank == 0):
            squares += parameter.grad.detach().float().pow(2).sum()
    dist.all_reduce(squares, group=shares.group)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, squares.sqrt())


def mark_part(parameter: torch.nn.Parameter, shares: Shares) -> torch.nn.Parameter:
    """Say that ranks hold different parts of it, as Megatron marks it for DeepSpeed's norm."""
    if shares.ranks > 1:
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


def is_part(parameter: torch.nn.Parameter) -> bool:
    """Whether ranks hold different parts of it."""
    return bool(getattr(parameter, "model_parallel", False))
