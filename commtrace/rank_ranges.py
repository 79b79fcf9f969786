"""Lists of ranks or steps as text, in settings, options, logs and reports.

Imports nothing, because every traced process imports this module to read its settings.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any, Final

MAX_RANKS: Final = 1 << 20
"""More ranks than any job has. A text or a log with more is wrong, and would take too much memory."""


_MAX_RANGES: Final = 16
"""The most ranges that ranks 0 to 31 can form."""


def rank_ranges(text: str) -> list[range]:
    """Parse numbers, ranges and ranges with a stride, separated by commas: "8,0-3,16-1016:8".

    Raises:
        ValueError: The text is something else, has a number of 2**31 or more, which no step reaches, or has a range
            whose last number (inclusive) is below its first.
    """
    ranges = []
    for item in text.split(",") if text else ():
        span, _, stride = item.partition(":")
        first, dash, last = span.partition("-")
        if not (first + last + stride).isdecimal() or item.endswith((":", "-")) or not first:
            raise ValueError(f"{item} is not a number or a range of numbers")
        if any(int(number or 0) >= 1 << 31 for number in (first, last, stride)):
            raise ValueError(f"{item:.40} has a number of more than 31 bits")
        if stride and not int(stride):
            raise ValueError(f"{item} has a stride of 0")
        ranges.append(range(int(first), int(last if dash else first) + 1, int(stride or 1)))
        if not ranges[-1]:
            raise ValueError(f"{item} is empty")
    return ranges


def is_selected(rank: int, selection: str) -> bool:
    """Return whether ranges contain a rank; "" selects all ranks."""
    return not selection or any(rank in ranks for ranks in rank_ranges(selection))


def select_steps(steps: Any, ranges: Sequence[range]) -> Any:
    """Return whether each step is selected, bool, shape (n,): it is below 0 or in a range, or there are no ranges."""
    selected = (steps < 0) | (not ranges)
    for span in ranges:
        selected |= (steps >= span.start) & (steps < span.stop) & ((steps - span.start) % span.step == 0)
    return selected


def parse_rank_list(text: str) -> list[int]:
    """Return the ranks of ranges in the order of the text: "8,0-2,16-32:8" -> [8, 0, 1, 2, 16, 24, 32].

    Raises:
        ValueError: The text is something else, or has more than MAX_RANKS ranks, or ranks of MAX_RANKS or more.
    """
    ranges = rank_ranges(text)
    if any(ranks[-1] >= MAX_RANKS for ranks in ranges) or sum(map(len, ranges)) > MAX_RANKS:
        raise ValueError(f"{text:.40} has more than {MAX_RANKS} ranks, or larger ones")
    return [rank for ranks in ranges for rank in ranks]


def format_rank_list(ranks: Sequence[int]) -> str:
    """Format ranks in their order, for `parse_rank_list`: [8, 0, 1, 2] -> "8,0-2"."""
    return ",".join(range_items(ranks))


def range_items(ranks: Sequence[int], longest_stride: int = MAX_RANKS) -> Iterator[str]:
    """Yield ranks as numbers, ranges, and ranges of three or more with a stride."""
    from itertools import count, takewhile  # both modules are built in: nothing is read
    from operator import eq

    begin = 0
    while begin < len(ranks):
        stride = ranks[begin + 1] - ranks[begin] if begin + 1 < len(ranks) else 0
        end = begin + 1
        if 0 < stride <= longest_stride:
            following = map(ranks.__getitem__, range(end, len(ranks)))
            end += sum(takewhile(bool, map(eq, following, count(ranks[end], stride))))
        if end - begin < 3 and stride != 1:  # two ranks are shorter without a stride, and the second may begin a range
            end = begin + 1
        last = f"-{ranks[end - 1]}" if end > begin + 1 else ""
        yield f"{ranks[begin]}{last}" + (f":{stride}" if last and stride > 1 else "")
        begin = end


def format_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as ascending ranges, as the kernel writes lists of cores: "0-3,8"."""
    return ",".join(range_items(sorted({*ranks}), longest_stride=1))


def format_missing(ranks: Iterable[int], count: int) -> str:
    """Format the ranks below `count` that are not among `ranks`; "" if there are none."""
    return format_ranks({*range(count)} - {*ranks})


def shorten_names(names: Sequence[Any], most: int = 8) -> str:
    """Format ascending ranks, as ranges with strides ("0-2,8-9992:8"), or host names.

    Of more than `most` items, it shows the first three and the last: "0,3,7,...,998 (400 in all)".
    """
    if names and (isinstance(names[0], str) or names[0] < 0):  # the others are names, too, or begin with the unknown
        items = [str(name) if isinstance(name, str) or name >= 0 else "-" for name in names]
    else:
        items = [*range_items(names)]
    return ",".join(items) if len(items) <= most else f"{','.join(items[:3])},...,{items[-1]} ({len(names):,} in all)"


def shorten_rank_list(ranks: str) -> str:
    """Shorten a list of ranks, as `format_ranks` writes it, if it has more than 16 ranges."""
    return shorten_names(parse_ranks(ranks)) if ranks.count(",") >= _MAX_RANGES else ranks


def name_ranks(ranks: str, noun: str = "rank") -> str:
    """Return a list of ranks with its noun, shortened: "rank 3", "ranks 0-3"."""
    return f"{noun}{'' if ranks.isdecimal() else 's'} {shorten_rank_list(ranks)}"


def parse_ranks(text: str) -> list[int]:
    """Parse ranges in any order, with or without strides: "8,0-3,16-32:8" -> [0, 1, 2, 3, 8, 16, 24, 32].

    Raises:
        ValueError: The text is not a list of numbers and ranges, or has too many or too large numbers.
    """
    return sorted({*parse_rank_list(text)})
