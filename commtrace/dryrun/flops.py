"""Floating-point operations that a simulated rank would compute, and the calls between which it would.

Counted are matrix products, convolutions and attention, with torch's own formulas (`torch.utils.flop_counter`): two per
multiplication and addition, attention without regard to a causal mask. All other operators count as none.

Those of forward are also counted alone: they are in proportion to the batch, whether or not backward repeats some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from commtrace.recording.session import session

Formula: TypeAlias = Callable[..., int]
"""Returns the number of operations, given the arguments of an operator and, as `out_val`, its result."""

TABLE: Final = "flops"


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = gradient.shape, query.shape, key.shape, value.shape
    return int(sdpa_backward_flop_count(*shapes))


_ON_CPU: Final[dict[str, Formula]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
"""Operators that torch's registry leaves out."""


def formula_of(operator: Any) -> Formula | None:
    """Return the formula of an OpOverload, or None if it counts as no operations."""
    packet = operator.overloadpacket
    if operator.namespace == "aten" and packet.__name__ in _ON_CPU:
        return _ON_CPU[packet.__name__]
    formula: Formula | None = flop_registry.get(packet)
    return formula


class FlopCounter:
    """Operations that were counted, with their moments."""

    def __init__(self) -> None:
        self._mono_ns: list[int] = []
        self._flops: list[int] = []
        self._is_forward: list[bool] = []
        self._is_complete = True

    def count(self, formula: Formula, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count the operations of an operator that was called now."""
        try:
            flops = formula(*args, **kwargs, out_val=result)
        except Exception:  # torch's formulas check shapes; a dry run does not fail for them
            self._is_complete = False
            return
        self._mono_ns.append(time.monotonic_ns())
        self._flops.append(flops)
        self._is_forward.append(torch._C._current_autograd_node() is None)

    def record(self) -> None:
        """Add them to the log of the process, if it has one, unless some could not be counted."""
        if session.recorder is not None and self._is_complete:
            session.recorder.tables.add(TABLE, moments=self._mono_ns, flops=self._flops, is_forward=self._is_forward)
