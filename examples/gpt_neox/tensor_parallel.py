"""Tensor parallelism as in Megatron-LM and GPT-NeoX (arXiv 1909.08053): sharded matrices and their communication.

A column-parallel matrix is sharded by its outputs, which other ranks do not need; a row-parallel matrix by its inputs,
and the ranks' outputs are summed. One after the other, they need one all_reduce in forward (g, after the second) and
one in backward (f, before the first). `Shares` determines this rank's part; a single rank shards and sends nothing.

With sequence parallelism (arXiv 2205.05198), activations outside of these pairs are sharded along the sequence: f is an
all_gather and g a reduce_scatter, and the reverse in backward. Gathered inputs are kept for backward, as in GPT-NeoX.
Parameters that are applied to a rank's part of the sequence (norms, and biases that are added after a sum) get a part
of their gradient, which is summed over the ranks.
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
    """Place of this rank among those that share a model."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    wide: bool = False
    """Reduce in fp32, whatever the type of the activations (GPT-NeoX's `fp32_allreduce`)."""
    sequence: bool = False
    """Between tensor-parallel layers a rank has a part of the sequence (GPT-NeoX's `sequence_parallel`)."""
    parts: Parts = WHOLE
    """Part of each sequence under sequence parallelism with whole models."""

    def range_of(self, size: int) -> tuple[int, int]:
        """Return the range (begin, end) of this rank's part of `size` rows or columns."""
        each = size // self.ranks
        return self.rank * each, (self.rank + 1) * each

    def part(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return a copy of this rank's rows (0) or columns (1)."""
        if self.ranks == 1:
            return whole
        begin, end = self.range_of(whole.shape[dimension])
        return whole.narrow(dimension, begin, end - begin).clone()

    def copied(self, x: torch.Tensor) -> torch.Tensor:
        """Apply Megatron's f: identity forward, all_reduce backward; with sequence parallelism all_gather forward."""
        if self.ranks == 1:
            return x
        function: Any = _Gathered if self.sequence else _Copied
        out: torch.Tensor = function.apply(x, self)
        return out

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Apply Megatron's g: all_reduce forward, identity backward; with sequence parallelism reduce_scatter."""
        if self.ranks == 1:
            return x
        function: Any = _Scattered if self.sequence else _Summed
        out: torch.Tensor = function.apply(x, self)
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, computed in place if `x` has the communicated type."""
        reduced = x.float() if self.wide else x.contiguous()
        dist.all_reduce(reduced, group=self.group)
        return reduced.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the ranks' parts of a sequence: (b, s/t, h) to (b, s, h)."""
        # The sequence dimension comes first, because all_gather_into_tensor concatenates along the first dimension.
        part = x.transpose(0, 1).contiguous()
        whole = part.new_empty(self.ranks * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part, group=self.group)
        return whole.transpose(0, 1)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter a sequence over the ranks: (b, s, h) to (b, s/t, h)."""
        whole = (x.float() if self.wide else x).transpose(0, 1).contiguous()
        part = whole.new_empty(whole.shape[0] // self.ranks, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole, group=self.group)
        return part.transpose(0, 1).to(x.dtype)


ALONE = Shares()
"""Shares of a model that is not divided."""


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shares: Shares) -> torch.Tensor:
        ctx.shares = shares
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: the gradient belongs to autograd, and another function may use it, too.
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
    """Cross entropy with a sharded vocabulary: logits (b, s, V/t) in fp32 and tokens (b, s) to losses (b, s).

    Three all_reduces of one number per token: the largest logit, the label's logit, the sum of exponentials.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, shares: Shares) -> torch.Tensor:
        """Return the losses (b, s)."""
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
        """Return the gradient of the logits: softmax minus the one-hot labels."""
        softmax, own, elsewhere = ctx.saved_tensors
        one_hot = torch.zeros_like(softmax).scatter_(-1, own.unsqueeze(-1), (~elsewhere).float().unsqueeze(-1))
        return (softmax - one_hot) * gradients[0].unsqueeze(-1), None, None


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float, shares: Shares) -> None:
    """Clip gradients as `clip_grad_norm_` does, if ranks hold parts of some parameters and copies of others.

    One all_reduce of one fp32 number, as in Megatron: each rank's parts and, on the first rank, the other parameters.
    """
    if shares.ranks == 1:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return
    squares = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    for parameter in parameters:
        if parameter.grad is not None and (is_part(parameter) or shares.rank == 0):
            squares += parameter.grad.detach().float().pow(2).sum()
    dist.all_reduce(squares, group=shares.group)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, squares.sqrt())


def sum_gradients(parameters: Iterable[torch.nn.Parameter], shares: Shares) -> None:
    """Sum the gradients of parameters that are applied to a part of the sequence: one all_reduce for each.

    GPT-NeoX does so for norms (`mark_norms_for_sequence_parallel_grad_sync`), Megatron-LM for biases as well.
    """
    if shares.sequence and shares.ranks > 1:
        for parameter in parameters:
            parameter.register_hook(lambda gradient: shares.all_reduce(gradient.clone()))


def mark_part(parameter: torch.nn.Parameter, shares: Shares) -> torch.nn.Parameter:
    """Mark a parameter as divided among ranks, as Megatron does for DeepSpeed's norm."""
    if shares.ranks > 1:
        parameter.model_parallel = True  # type: ignore[attr-defined]
    return parameter


def is_part(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter is divided among ranks."""
    return bool(getattr(parameter, "model_parallel", False))
