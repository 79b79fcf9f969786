"""Differentiable collectives. `n` is the number of ranks; the parts of a dimension are in the order of ranks.

If every rank uses a gathered tensor for a different part of the work, each has a different gradient, and gradients
must be summed. If every rank does the same with it, each has the complete gradient already.
"""

from __future__ import annotations

from typing import Any

import torch

from .transports import Transport

Gradients = tuple[torch.Tensor | None, ...]


def gather(x: torch.Tensor, dim: int, transport: Transport) -> torch.Tensor:
    """Gather parts for ranks that use the result differently: all_gather forward, reduce_scatter backward."""
    return _apply(_Gather, x, dim, transport)


def gather_same(x: torch.Tensor, dim: int, transport: Transport) -> torch.Tensor:
    """Gather parts for ranks that all do the same with the result: all_gather forward, nothing backward."""
    return _apply(_GatherSame, x, dim, transport)


def exchange(x: torch.Tensor, split: int, join: int, transport: Transport) -> torch.Tensor:
    """Divide along `split` and join along `join`: all_to_all forward, the inverse backward."""
    return _apply(_Exchange, x, split, join, transport)


def share(x: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Share a tensor among ranks that use it differently: nothing forward, all_reduce backward (Megatron's f)."""
    return _apply(_Share, x, transport)


def add_up(x: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Sum over ranks that all do the same with the result: all_reduce forward, nothing backward (Megatron's g)."""
    return _apply(_AddUp, x, transport)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


def _split(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Split a tensor into (n, part)."""
    return torch.stack(x.chunk(n, dim))


def _join(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Join (n, part) into one tensor."""
    return torch.cat(parts.unbind(0), dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, transport: Transport) -> torch.Tensor:
        ctx.dim, ctx.transport = dim, transport
        return _join(transport.all_gather(x), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return ctx.transport.reduce_scatter(_split(gradient, ctx.dim, ctx.transport.size)), None, None


class _GatherSame(_Gather):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return gradient.chunk(ctx.transport.size, ctx.dim)[ctx.transport.rank], None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: int, join: int, transport: Transport) -> torch.Tensor:
        ctx.split, ctx.join, ctx.transport = split, join, transport
        return _join(transport.all_to_all(_split(x, split, transport.size)), join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        parts = ctx.transport.all_to_all(_split(gradient, ctx.join, ctx.transport.size))
        return _join(parts, ctx.split), None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        ctx.transport = transport
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        return ctx.transport.all_reduce(gradient), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, transport: Transport) -> torch.Tensor:
        return transport.all_reduce(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Gradients:
        return gradient, None
