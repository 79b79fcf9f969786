"""What can go wrong before anything starts, in words that say what to change."""

from __future__ import annotations

from commtrace.errors import CommtraceError


class ExampleError(CommtraceError):
    """The run cannot start as it was asked for; the message says what to change."""


class ShapeError(ExampleError):
    """A size does not divide among the ranks."""


class TransportError(ExampleError):
    """The way in which tensors shall travel is not to be had here."""


def must_divide(whole: int, what: str, parts: int, among: str, mend: str) -> None:
    """Raise ShapeError unless `whole` divides into `parts` equal parts."""
    if whole % parts:
        raise ShapeError(f"{what} ({whole}) cannot be shared equally by {among} ({parts}); {mend}")
