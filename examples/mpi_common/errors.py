"""Errors of the MPI examples, raised before a run starts; the message says what to change."""

from __future__ import annotations

from commtrace.errors import CommtraceError


class ExampleError(CommtraceError):
    """The run cannot start with these options."""


class ShapeError(ExampleError):
    """A size cannot be divided among the ranks."""


class TransportError(ExampleError):
    """The transport is not available."""


def must_divide(size: int, name: str, parts: int, among: str, fix: str) -> None:
    """Raise ShapeError unless `size` can be divided into `parts` equal parts."""
    if size % parts:
        raise ShapeError(f"{name} ({size}) cannot be divided equally among {among} ({parts}); {fix}")
