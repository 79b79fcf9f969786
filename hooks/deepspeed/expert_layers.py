"""Hook for DeepSpeed's mixtures of experts: tokens that `MOELayer` sends to experts and back, and the capacity.

Each expert has a capacity of tokens on each rank, to which its tokens are padded. The gate chooses the capacity: by its
settings, where it drops tokens, else the most tokens of an expert, on which ranks agree by an all_reduce.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from math import ceil
from typing import Any, Final

import torch

from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import imported
from commtrace.hooks.recorder_setup import guard
from commtrace.hooks.torch.expert_routing import expert_routing, marks, row_bytes, rows
from commtrace.hooks.torch.redistribution import calling_module
from commtrace.patching import Patches, around
from commtrace.schema import Purpose

_MODULE: Final = "deepspeed.moe.sharded_moe"
_CAPACITY_BYTES: Final = torch.int64.itemsize

_patches = Patches()


class _RunningLayer(threading.local):
    """The layer whose forward pass runs in this thread.

    Attributes:
        module: Its name; None outside of layers.
        chosen: Tokens that it is to send, by the settings of its gate; None where these do not determine them.
        kind: What its next exchange is for.
        trains: Whether gradients are computed.
    """

    module: str | None = None
    chosen: int | None = None
    kind = Purpose.EXPERT_DISPATCH
    trains = False


_layer: Final = _RunningLayer()


@_patches.installer
def install() -> None:
    """Hook the layer, its gate, and the function that exchanges tokens."""
    layer, gate, exchange = (imported(_MODULE, name) for name in ("MOELayer", "TopKGate", "_AllToAll"))
    if layer is None or gate is None or exchange is None:
        return
    _patches.wrap(layer, "forward", _forward)
    _patches.wrap(gate, "forward", _choose)
    _patches.replace(exchange, "forward", _marking_exchange)
    _patches.replace(exchange, "backward", _marking_gradient)
    _patches.include(expert_routing)


uninstall = _patches.undo


@around
def _forward(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    before = vars(_layer).copy()
    with guard():
        _layer.module, _layer.chosen, _layer.kind = calling_module(), None, Purpose.EXPERT_DISPATCH
        _layer.trains = torch.is_grad_enabled()
        _layer.chosen = _slots(self, args[0])
    try:
        return original(self, *args, **kwargs)
    finally:
        vars(_layer).clear()
        vars(_layer).update(before)


def _slots(layer: Any, inputs: torch.Tensor) -> int | None:
    """Return the slots for tokens of all experts of a pass, by the settings of the gate (`_capacity`).

    Capacities are whole numbers of tokens, a share of the rank's tokens in 32-bit floats. Tensor-parallel ranks send
    equal parts of them.
    """
    from deepspeed.utils import bwc, groups

    gate = layer.gate
    if not gate.drop_tokens:
        return None
    factor = gate.capacity_factor if gate.training else gate.eval_capacity_factor
    experts = layer.ep_size * layer.num_local_experts
    share = torch.tensor(rows(inputs) / experts) * torch.tensor(float(factor * gate.k))
    capacity = max(ceil(share.item()), int(gate.min_capacity))
    slots: int = experts * capacity // bwc.bwc_tensor_model_parallel_world_size(groups.mpu)
    return slots


@around
def _choose(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    module = _layer.module
    if module is None:
        return original(self, *args, **kwargs)
    purpose = purposes.current()
    with guard():
        purpose, _ = marks(Purpose.EXPERT_COUNTS, {"module": module} if module else {})
    with purposes.Marked(purpose):
        result = original(self, *args, **kwargs)
    with guard():
        if not self.drop_tokens and self.ep_group is not None and self.ep_group.size() > 1:
            expert_routing.note_counts(module, "all_reduce", _CAPACITY_BYTES)
    return result


def _marking_exchange(original: Any) -> Any:
    """Return a replacement of the function's `forward`, which its `backward` calls, too."""

    @functools.wraps(original.__func__)
    def forward(ctx: Any, group: Any, tokens: torch.Tensor) -> Any:
        module, kind, purpose = _layer.module, _layer.kind, purposes.current()
        if module is None:  # in a backward pass, or in a layer of the program itself
            unmarked = purposes.number(Purpose.EXPERT_TOKENS) if purposes.unclaimed() else purpose
            with purposes.Marked(unmarked):
                return original.__func__(ctx, group, tokens)
        with guard():
            # Padded: the payload shows the capacity of the experts, not their load.
            facts: dict[str, str | int] = {"module": module} if module else {}
            purpose, gradient = marks(kind, {**facts, "token_bytes": row_bytes(tokens), "padded": 1})
            ctx.commtrace_purpose = gradient
            _layer.kind = Purpose.EXPERT_COMBINE
        with purposes.Marked(purpose):
            result = original.__func__(ctx, group, tokens)
        with guard():
            _note(module, kind, tokens, has_gradient=_layer.trains and ctx.needs_input_grad[1])
        return result

    return staticmethod(forward)


def _note(module: str, kind: Purpose, tokens: torch.Tensor, *, has_gradient: bool) -> None:
    if kind is Purpose.EXPERT_COMBINE:
        expert_routing.note_combine(module, has_gradient=has_gradient)
        return
    received = rows(tokens)
    sent = received if _layer.chosen is None else _layer.chosen
    expert_routing.note_dispatch(module, row_bytes(tokens), sent, received, has_gradient=has_gradient)


def _marking_gradient(original: Any) -> Any:
    @functools.wraps(original.__func__)
    def backward(ctx: Any, *gradients: Any) -> Any:
        unknown = purposes.number(Purpose.EXPERT_TOKENS)
        with purposes.Marked(getattr(ctx, "commtrace_purpose", unknown)):
            return original.__func__(ctx, *gradients)

    return staticmethod(backward)
