"""Sequence parallelism: ranks share sequences, each has the whole model, and they communicate in attention only.

Ulysses (arXiv 2309.14509) uses DeepSpeed's own layer: an all_to_all gives each rank whole sequences of some of the
heads, another returns the outputs. Ring attention (context parallelism, arXiv 2310.01889) passes keys and values from
rank to rank, and each rank accumulates the attention of its queries to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

ULYSSES: Final = "ulysses"
RING: Final = "ring"


@dataclass(frozen=True)
class Parts:
    """Part of each sequence that a rank has: the `rank`-th of `ranks` equal ones."""

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    way: str = ""
    """ULYSSES or RING."""

    def of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of (b, s) as a view."""
        length = batch.shape[1] // self.ranks
        return batch[:, self.rank * length : (self.rank + 1) * length]


WHOLE: Final = Parts()
"""Part of a sequence that ranks do not share: all of it."""


Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Causal attention: a function of queries, keys, values (b, a, s, d) and a dropout probability."""


def attention_of(parts: Parts) -> Attend:
    """Return the attention function of a rank with this part of each sequence.

    It is not a module: it has no parameters, and ZeRO-3 records every module that runs.
    """
    if parts.way == RING:
        return functools.partial(_ring, parts)
    return _ulysses(parts) if parts.way == ULYSSES else _causal


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


def _ulysses(parts: Parts) -> Attend:
    """Return attention with whole heads on each rank: DeepSpeed's DistributedAttention, which expects (s, a)."""
    from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-untyped, unused-ignore]

    class LengthFirst(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
            output = _causal(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout)
            return output.transpose(1, 2)

    layer = DistributedAttention(LengthFirst(), parts.group, scatter_idx=2, gather_idx=1)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        parts = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out: torch.Tensor = layer(*parts, 0, None, dropout)
        return out.transpose(1, 2)

    return attend


def _ring(parts: Parts, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _dropout: float) -> torch.Tensor:
    return _Ring.apply(query, key, value, parts)  # type: ignore[no-untyped-call, no-any-return]


class _Ring(torch.autograd.Function):
    """Ring attention: n-1 hops of keys and values in forward, n-1 in backward, and n hops of their gradients.

    Sums are fp32, and so are the gradients of keys and values that are sent, as in ring-flash-attention.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: Parts) -> torch.Tensor:
        out = torch.zeros_like(query, dtype=torch.float32)
        sums = query.new_full((*query.shape[:-1], 1), -torch.inf, dtype=torch.float32)  # logarithms
        block_tensors = [key.contiguous(), value.contiguous()]
        for hop in range(parts.ranks):
            if hop:
                block_tensors = _passed_on(block_tensors, parts)
            scores = _scores(query, block_tensors[0], hop, parts)
            if scores is not None:
                block = scores.logsumexp(dim=-1, keepdim=True)
                both = torch.logaddexp(sums, block)
                out = out * (sums - both).exp() + (scores - both).exp() @ block_tensors[1].float()
                sums = both
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.parts = parts
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, result, sums = ctx.saved_tensors
        parts, gradient = ctx.parts, gradients[0].float()
        inner = (gradient * result.float()).sum(dim=-1, keepdim=True)
        own = torch.zeros_like(query, dtype=torch.float32)
        block_tensors = [key.contiguous(), value.contiguous()]
        block_gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in block_tensors]
        for hop in range(parts.ranks):
            if hop:
                block_tensors = _passed_on(block_tensors, parts)
            scores = _scores(query, block_tensors[0], hop, parts)
            if scores is not None:
                weights = (scores - sums).exp()
                flow = weights * (gradient @ block_tensors[1].float().transpose(-1, -2) - inner) * _scale(query)
                own += flow @ block_tensors[0].float()
                block_gradients[0] += flow.transpose(-1, -2) @ query.float()
                block_gradients[1] += weights.transpose(-1, -2) @ gradient
            # After the last hop, each gradient is on the rank that owns its keys and values.
            block_gradients = _passed_on(block_gradients, parts)
        return own.to(query.dtype), block_gradients[0].to(key.dtype), block_gradients[1].to(value.dtype), None


def _scale(query: torch.Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor, hop: int, parts: Parts) -> torch.Tensor | None:
    """Return the scores (b, a, s/n, s/n) in fp32 of the keys from `hop` ranks before; None if all are later tokens."""
    source = (parts.rank - hop) % parts.ranks
    if source > parts.rank:
        return None
    scores = query.float() @ key.float().transpose(-1, -2) * _scale(query)
    if source == parts.rank:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _passed_on(tensors: Iterable[torch.Tensor], parts: Parts) -> list[torch.Tensor]:
    """Send tensors to the next rank and receive those of the previous one: a message for each tensor."""
    group = parts.group
    assert group is not None
    before, after = (dist.get_global_rank(group, (parts.rank + step) % parts.ranks) for step in (-1, 1))
    sent = list(tensors)
    received = [torch.empty_like(tensor) for tensor in sent]
    messages = [dist.P2POp(dist.isend, tensor, after, group) for tensor in sent]
    messages += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received
