"""Tensor parallelism as Megatron-LM and GPT-NeoX do it (arXiv 1909.08053): what is cut, and where ranks communicate.

A column-parallel matrix has its outputs cut, so that no rank needs another's; a row-parallel one its inputs, so that
the ranks' outputs add up. One behind the other they need one all_reduce forward (g, behind the second) and one backward
(f, in front of the first). `Shares` says which part is this rank's; with one rank nothing is cut and nothing sent.

With sequence parallelism (arXiv 2205.05198) activations between the two are cut along the sequence as well: an
all_gather takes the place of f, a reduce_scatter that of g, and backward the other way round. Gathered inputs are kept
for backward, as GPT-NeoX keeps them. Parameters that work on a rank's part of the sequence alone (norms, and biases
that are added behind a sum) get a part of their gradient, which ranks add up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .sequence import WHOLE, Parts


@dataclass(frozen=True)
class Shares:
    """This rank's place among those that share a model."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    wide: bool = False
    """Sums travel in fp32, whatever the type of the activations (GPT-NeoX's `fp32_allreduce`)."""
    sequence: bool = False
    """Between tensor-parallel layers a rank has a part of the sequence (GPT-NeoX's `sequence_parallel`)."""
    parts: Parts = WHOLE
    """Its part of each sequence where ranks with the whole model share them."""

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
        """f: the same forward; backward the ranks' gradients are summed. Of parts of the sequence: gathered."""
        if self.ranks == 1:
            return x
        function: Any = _Gathered if self.sequence else _Copied
        out: torch.Tensor = function.apply(x, self)
        return out

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """g: forward the ranks' outputs are summed; the same backward. For parts of the sequence: scattered."""
        if self.ranks == 1:
            return x
        function: Any = _Scattered if self.sequence else _Summed
        out: torch.Tensor = function.apply(x, self)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place of `x` where its type is the one that travels."""
        travels = x.float() if self.wide else x.contiguous()
        dist.all_reduce(travels, group=self.group)
        return travels.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' parts of a sequence, (b, s/t, h), as (b, s, h)."""
        # The sequence comes first on the way: parts of the first dimension are what these operations know.
        part = x.transpose(0, 1).contiguous()
        whole = part.new_empty(self.ranks * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole.transpose(0, 1)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over the ranks of a sequence, (b, s, h), as (b, s/t, h)."""
        whole = (x.float() if self.wide else x).transpose(0, 1).contiguous()
        part = whole.new_empty(whole.shape[0] // self.ranks, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=self.group)
        return part.transpose(0, 1).to(x.dtype)


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


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shares: Shares) -> torch.Tensor:
        ctx.shares = shares
        return shares.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.shares.reduce_scatter(gradients[0]), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shares: Shares) -> torch.Tensor:
        ctx.shares = shares
        return shares.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.shares.all_gather(gradients[0]), None


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


def sum_gradients(parameters: Iterable[torch.nn.Parameter], shares: Shares) -> None:
    """Have ranks add up the gradients of parameters that see a part of the sequence each: one all_reduce for each.

    GPT-NeoX does so for norms (`mark_norms_for_sequence_parallel_grad_sync`), Megatron-LM for biases as well.
    """
    if shares.sequence and shares.ranks > 1:
        for parameter in parameters:
            parameter.register_hook(lambda gradient: shares.all_reduce(gradient.clone()))


def mark_part(parameter: torch.nn.Parameter, shares: Shares) -> torch.nn.Parameter:
    """Say that ranks hold different parts of it, as Megatron marks it for DeepSpeed's norm."""
    if shares.ranks > 1:
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


def is_part(parameter: torch.nn.Parameter) -> bool:
    """Whether ranks hold different parts of it."""
    return bool(getattr(parameter, "model_parallel", False))
