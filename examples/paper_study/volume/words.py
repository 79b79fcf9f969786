"""Sentences made from data: what the paper says, and whether what was found confirms, sharpens or contradicts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from commtrace.formatting import format_bytes, format_share

COMMAND: Final = "commtrace study DIR --part volume"
"""Repeats what a section shows."""

CONFIRMED: Final = "Confirmed"
SHARPENED: Final = "Sharpened"
CONTRADICTED: Final = "Contradicted"


def finding(paper: str, verdict: str, *found: str) -> str:
    """A statement of the paper, and what the data say of it."""
    return f"The paper: {paper} **{verdict}**: {' '.join(part for part in found if part)}"


def between(values: Iterable[float], words: str = "share") -> str:
    """ "12.3 %", or "12.3 % to 45.6 %". `words`: share, bytes or times."""
    some = sorted(values)
    write = {"share": format_share, "bytes": format_bytes, "times": times}[words]
    low, high = write(some[0]), write(some[-1])
    return low if low == high else f"{low} to {high}"


def times(value: float) -> str:
    """1.5 -> "1.500"."""
    return f"{value:.3f}"


def listed(names: Iterable[str]) -> str:
    """a, b and c."""
    some = [*dict.fromkeys(names)]
    return some[0] if len(some) == 1 else f"{', '.join(some[:-1])} and {some[-1]}" if some else "none"


def falling(values: Sequence[float], least: float) -> bool:
    """Each is lower than the one before it, and the last by at least so much than the first."""
    return len(values) > 1 and all(one > other for one, other in pairwise(values)) and values[0] - values[-1] >= least


def growing(values: Sequence[float]) -> bool:
    """None is lower than the one before it, and the last is higher than the first."""
    return len(values) > 1 and all(one <= other for one, other in pairwise(values)) and values[-1] > values[0]
