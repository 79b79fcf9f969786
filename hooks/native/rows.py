"""Answers to the questions of the native recorder: the numbers of rows that are new to it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch

from commtrace.hooks.torch.c10d_operators import Operator
from commtrace.hooks.torch.tracer import TorchTracer

_Answer = TypeVar("_Answer")


def _never_raising(default: _Answer) -> Callable[[Callable[..., _Answer]], Callable[..., _Answer]]:
    def decorate(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
        @functools.wraps(method)
        def asked(self: Rows, *args: Any) -> _Answer:
            try:
                return method(self, *args)
            except Exception:
                self.tracer.recorder.fault()
                return default

        return asked

    return decorate


class GroupRow(NamedTuple):
    """A group, as far as C++ needs it."""

    number: int
    size: int
    rank: int
    ranks: Sequence[int]
    first: int  # sequence number of the next collective


class _Collectives:
    """The counter of a group's collectives, kept by C++, for calls that Python records."""

    def __init__(self, recording: Any, pg: Any) -> None:
        self._recording, self._pg = recording, weakref.ref(pg)

    def __iter__(self) -> _Collectives:
        return self

    def __next__(self) -> int:
        return int(self._recording.next_seq(self._pg()))


_NO_GROUP: Final[GroupRow | None] = None


class Rows:
    """The rows of one recording. No method raises: an error is counted, and the answer is a default."""

    def __init__(self, tracer: TorchTracer, recording: Any, operators: Sequence[Operator]) -> None:
        """Answer from the tracer's tables; `operators` are indexed by the numbers of their plans."""
        self.tracer = tracer
        self._recording = recording
        self._operators = operators

    @_never_raising(_NO_GROUP)
    def group(self, pg: Any) -> GroupRow | None:
        """Return the row of a process group."""
        group = self.tracer.groups.of(pg)
        first = next(group.collectives)
        group.collectives = _Collectives(self._recording, pg)
        return GroupRow(group.number, group.size, group.rank, group.ranks, first)

    @_never_raising(0)
    def kind(self, operator: int, dtype: torch.dtype | None, reduce_op: int) -> int:
        """Return the row of an operator (by its plan's number), element type and reduction."""
        return self.tracer.kind(self._operators[operator], dtype, reduce_op)

    @_never_raising(0)
    def classify(self, frame: FrameType) -> int:
        """Return the properties of a frame, as bits of `call_site`."""
        return self.tracer.sites.classify(frame.f_code)

    @_never_raising(0)
    def site(self, frame: FrameType) -> int:
        """Return the row of a frame's line."""
        return self.tracer.sites.number(frame)

    @_never_raising(False)
    def in_training(self) -> bool:
        """Return whether the running forward, without gradients, belongs to training."""
        return self.tracer.sites.in_training()

    @_never_raising((0, False))
    def site_of_backward(self) -> tuple[int, bool]:
        """Return the site of a call on a thread of autograd's own, and whether it is new."""
        tables = self.tracer.recorder.tables
        lookups = tables.lookups
        return self.tracer.sites.of_backward(), tables.lookups != lookups
