"""Table rows that the native recorder looks up in Python, once each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch

from commtrace.hooks.groups import Group
from commtrace.hooks.torch.c10d_operators import Operator
from commtrace.hooks.torch.tracer import TorchTracer

_Answer = TypeVar("_Answer")


def _default_on_error(default: Any) -> Callable[[Callable[..., _Answer]], Callable[..., _Answer]]:
    """Decorate a method of `Rows`: on an error, count it and return the default."""

    def decorate(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
        @functools.wraps(method)
        def answer(self: Rows, *args: Any) -> Any:
            try:
                return method(self, *args)
            except Exception:
                self.tracer.recorder.fault()
                return default

        return answer

    return decorate


class Rows:
    """The rows of one recording. No method raises: an error is counted, and the answer is a default."""

    def __init__(self, tracer: TorchTracer, recording: Any, operators: Sequence[Operator]) -> None:
        """Look up in the tracer's tables; `operators` are indexed by the numbers of their plans."""
        self.tracer = tracer
        self._recording = recording
        self._operators = operators

    @_default_on_error(None)
    def group(self, pg: Any) -> tuple[Group, int] | None:
        """Return a process group and the sequence number of its next collective. From here on C++ counts them."""
        group, next_seq = self.tracer.groups.of(pg), self._recording.next_seq
        first, ref = next(group.collectives), group.ref
        group.collectives = iter(lambda: next_seq(ref()), None)
        return group, first

    @_default_on_error(0)
    def kind(self, operator: int, dtype: torch.dtype | None, reduce_op: int) -> int:
        """Return the row of an operator (by its plan's number), element type and reduction."""
        return self.tracer.kind(self._operators[operator], dtype, reduce_op)

    @_default_on_error(0)
    def classify(self, frame: FrameType) -> int:
        """Return the properties of a frame, as bits of `call_site`."""
        return self.tracer.sites.classify(frame.f_code)

    @_default_on_error(0)
    def site(self, frame: FrameType, caller: FrameType | None = None) -> int:
        """Return the row of a frame's line, and of its caller's where that is part of the call site."""
        return self.tracer.sites.number(frame, caller)

    @_default_on_error(False)
    def in_training(self) -> bool:
        """Return whether the running forward, without gradients, belongs to training."""
        return self.tracer.sites.in_training()

    @_default_on_error((0, False))
    def site_of_backward(self) -> tuple[int, bool]:
        """Return the site of a call on a thread of autograd's own, and whether it is new."""
        tables = self.tracer.recorder.tables
        lookups = tables.lookups
        return self.tracer.sites.of_backward(), tables.lookups != lookups
