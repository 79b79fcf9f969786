"""Ranges of ranks or steps, as settings and options have them.

Imports nothing, as every traced process reads its settings.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def rank_ranges(text: str) -> list[range]:
    """Parse numbers, ranges and ranges with a stride, separated by commas: "8,0-3,16-1016:8".

    Raises:
        ValueError: The text is something else; ranges end with their last rank, which is not below the first.
    """
    ranges = []
    for item in text.split(",") if text else ():
        span, _, stride = item.partition(":")
        first, dash, last = span.partition("-")
        if not (first + last + stride).isdecimal() or item.endswith((":", "-")) or not first:
            raise ValueError(f"{item} is not a number or a range of numbers")
        ranges.append(range(int(first), int(last if dash else first) + 1, int(stride or 1)))
        if not ranges[-1]:
            raise ValueError(f"{item} is empty")
    return ranges


def is_selected(rank: int, selection: str) -> bool:
    """Return whether ranges contain a rank; "" are all ranks."""
    return not selection or any(rank in ranks for ranks in rank_ranges(selection))


def select_steps(steps: Any, ranges: Sequence[range]) -> Any:
    """Return whether ranges contain each step, an array of shape (n,) as `steps` is; those below 0 always are."""
    selected = steps < 0
    for span in ranges:
        selected |= (steps >= span.start) & (steps < span.stop) & ((steps - span.start) % span.step == 0)
    return selected
