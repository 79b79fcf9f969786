"""Ranges of ranks, as settings and options have them. Imports nothing, as every traced process reads its settings."""

from __future__ import annotations


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
            raise ValueError(f"{item} is not a rank or a range of ranks")
        ranges.append(range(int(first), int(last if dash else first) + 1, int(stride or 1)))
        if not ranges[-1]:
            raise ValueError(f"{item} has no rank")
    return ranges


def is_selected(rank: int, selection: str) -> bool:
    """Return whether ranges contain a rank; "" are all ranks."""
    return not selection or any(rank in ranks for ranks in rank_ranges(selection))
