"""Three implementations of attention over a sequence that is divided among ranks, with equal results.

Each is a function of this rank's queries, keys and values, (b, s/n, h) of its s/n tokens, the number of heads a, and
the transport between n ranks; it returns the attention's output for the same tokens, (b, s/n, h). Every token attends
to every other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch.nn import functional

from examples.mpi_common.collectives import exchange, gather
from examples.mpi_common.transports import Transport

Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Transport], torch.Tensor]


def all_gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, transport: Transport) -> torch.Tensor:
    """Gather keys and values of the whole sequence; queries stay (transformer-sequence-parallelism)."""
    return attend(q, gather(k, 1, transport), gather(v, 1, transport), heads)


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, transport: Transport) -> torch.Tensor:
    """Attend over the whole sequence of a/n heads, exchanged by all_to_all (DeepSpeed-Ulysses, 2309.14509)."""
    q, k, v = (exchange(x, 2, 1, transport) for x in (q, k, v))
    return exchange(attend(q, k, v, heads // transport.size), 1, 2, transport)


def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, transport: Transport) -> torch.Tensor:
    """Pass keys and values around the ring, computing on one block at a time (Ring Attention, 2310.01889)."""
    out: torch.Tensor = _RingAttention.apply(q, k, v, heads, transport)  # type: ignore[no-untyped-call]
    return out


ATTENTIONS: Final[dict[str, Attention]] = {"all_gather": all_gather, "ring": ring, "ulysses": ulysses}
"""Implementations by name."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    """Attend with queries (b, q, h) to keys and values (b, k, h): (b, q, h)."""
    return _joined(functional.scaled_dot_product_attention(_by_head(q, heads), _by_head(k, heads), _by_head(v, heads)))


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Map (b, s, h) to (b, a, s, d)."""
    split: torch.Tensor = x.unflatten(-1, (heads, -1))
    return split.transpose(1, 2)


def _joined(x: torch.Tensor) -> torch.Tensor:
    """Map (b, a, s, d) to (b, s, h)."""
    return x.transpose(1, 2).flatten(2)


class _RingAttention(torch.autograd.Function):
    """Attention by softmax over blocks that arrive one after the other, and its gradient.

    Forward keeps the logarithm of each query's normalizer, from which backward recomputes the weights of each block
    (FlashAttention, 2205.14135). The gradient of a block is passed on one round later and is complete on its rank
    after the last round: n - 1 messages for keys and values, n - 1 for their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, transport: Transport
    ) -> torch.Tensor:
        queries = _by_head(q, heads) / math.sqrt(q.shape[-1] // heads)
        out = torch.zeros_like(queries)
        log_sum = queries.new_full((*queries.shape[:-1], 1), -math.inf)
        for block in _rounds(torch.stack((k, v)), transport):
            keys, values = (_by_head(x, heads) for x in block)
            scores = queries @ keys.mT
            block_sum = scores.logsumexp(-1, keepdim=True)
            joint = torch.logaddexp(log_sum, block_sum)
            out = out * (log_sum - joint).exp() + (scores - joint).exp() @ values
            log_sum = joint
        ctx.heads, ctx.transport = heads, transport
        result = _joined(out)
        ctx.save_for_backward(q, k, v, result, log_sum)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        heads, transport = ctx.heads, ctx.transport
        scale = 1 / math.sqrt(q.shape[-1] // heads)
        queries, d_out = _by_head(q, heads) * scale, _by_head(gradient, heads)
        spread = (d_out * _by_head(out, heads)).sum(-1, keepdim=True)
        d_queries = torch.zeros_like(queries)
        own = travelling = None
        for block in _rounds(torch.stack((k, v)), transport):
            keys, values = (_by_head(x, heads) for x in block)
            weights = (queries @ keys.mT - log_sum).exp()
            d_scores = weights * (d_out @ values.mT - spread)
            d_queries += d_scores @ keys
            d_block = torch.stack((_joined(d_scores.mT @ queries), _joined(weights.mT @ d_out)))
            if own is None:
                own = d_block
            else:  # add to the previous rank's gradient of this block, and send it to the next rank
                travelling = transport.shift(d_block if travelling is None else travelling() + d_block)
        assert own is not None
        d_k, d_v = own if travelling is None else own + travelling()
        return _joined(d_queries) * scale, d_k, d_v, None, None


def _rounds(block: torch.Tensor, transport: Transport) -> Iterator[torch.Tensor]:
    """Yield the blocks of all ranks, from this rank's down, while the next block is received."""
    for _ in range(transport.size - 1):
        receive = transport.shift(block)
        yield block
        block = receive()
    yield block
