"""Table rows that the native recorder looks up in Python, once each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch

from commtrace.hooks.call_site import in_training
from commtrace.hooks.groups import Group
from commtrace.hooks.torch.c10d_operators import Operator
from commtrace.hooks.torch.tracer import TorchTracer

_Result = TypeVar("_Result")


def _default_on_error(default: Any) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorate a method of `Rows`: on an error, count it and return the default."""

    def decorate(method: Callable[..., _Result]) -> Callable[..., _Result]:
        @functools.wraps(method)
        def wrapper(self: Rows, *args: Any) -> Any:
            try:
                return method(self, *args)
            except Exception:
                self.tracer.recorder.counters.count_fault()
                return default

        return wrapper

    return decorate


class Rows:
    """The rows of one recording. No method raises: errors are counted, and a default is returned."""

    def __init__(self, tracer: TorchTracer, recording: Any, operators: Sequence[Operator]) -> None:
        """Look up rows in the tracer's tables; `operators` is indexed by plan number."""
        self.tracer = tracer
        self._recording = recording
        self._operators = operators

    @_default_on_error(None)
    def group(self, pg: Any) -> tuple[Group, int] | None:
        """Return a process group and the sequence number of its next collective. C++ counts them from then on."""
        group, next_seq = self.tracer.groups.get(pg), self._recording.next_seq
        first, ref = next(group.collectives), group.ref
        group.collectives = iter(lambda: next_seq(ref()), None)
        return group, first

    @_default_on_error(0)
    def kind(self, operator: int, dtype: torch.dtype | None, reduce_op: int) -> int:
        """Return the row of an operator (by plan number), element type and reduction."""
        return self.tracer.kind(self._operators[operator], dtype, reduce_op)

    @_default_on_error(0)
    def classify(self, frame: FrameType) -> int:
        """Return the properties of a frame, as bits of `call_site`."""
        return self.tracer.sites.classify(frame.f_code)

    @_default_on_error(0)
    def site(self, frame: FrameType, caller: FrameType | None, purpose: int) -> int:
        """Return the row of a frame's line and a purpose, with its caller's line if that is part of the call site."""
        return self.tracer.sites.number(frame, caller, purpose)

    @_default_on_error(False)
    def in_training(self, modules: Sequence[object]) -> bool:
        """Return whether the running forward pass, without gradients, belongs to training.

        `modules` are those that are being called, the innermost first.
        """
        return in_training(reversed(modules))

    @_default_on_error((0, False))
    def site_of_backward(self, purpose: int) -> tuple[int, bool]:
        """Return the site of a call on one of autograd's own threads, and whether it is new."""
        tables = self.tracer.recorder.tables
        lookups = tables.lookups
        return self.tracer.sites.find_backward_site(purpose), tables.lookups != lookups
