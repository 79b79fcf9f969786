"""Numbers, sizes, times and lists of ranks as text.

An unknown value (None, NaN or pandas' NA) becomes "-".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

from commtrace.rank_ranges import parse_rank_list, range_items

NOT_KNOWN: Final = "-"

MAX_SINGLE: Final = 32
"""Maximum number of ranks that reports show one by one."""

_MAX_RANGES: Final = 16
"""The most ranges that ranks 0 to 31 can form."""
_MANY_RANGES: Final = re.compile(rf"\b\d+(?:-\d+)?(?:,\d+(?:-\d+)?){{{_MAX_RANGES},}}")
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TIME_UNITS: Final = ("ns", "us", "ms", "s")


def is_known(value: Any) -> bool:
    """Return whether a scalar holds a value: it is not None, NaN or NA."""
    import pandas as pd  # here, because ranks of a dry run import this module for the text of ranks

    return value is not None and not pd.isna(value)


def format_count(value: Any) -> str:
    """Format a count with thousands separators: 1234567 -> "1,234,567". A mean of counts keeps one decimal."""
    if not is_known(value):
        return NOT_KNOWN
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.1f}"


def format_bytes(value: Any) -> str:
    """Format bytes in binary units with three digits: 1536 -> "1.50 KiB"."""
    return _with_unit(value, 1024, _BYTE_UNITS)


def format_power_of_two(exponent: int) -> str:
    """Format 2**exponent bytes: 20 -> "1 MiB"."""
    return f"{1 << exponent % 10} {_BYTE_UNITS[exponent // 10]}"


def format_duration(ns: Any) -> str:
    """Format nanoseconds in a suitable unit, with three digits: 1500 -> "1.50 us"."""
    return _with_unit(ns, 1000, _TIME_UNITS)


def format_moment(ns: Any) -> str:
    """Format ns since 1970 as date and time in UTC, to the second."""
    return f"{datetime.fromtimestamp(int(ns) // 10**9, timezone.utc):%Y-%m-%d %H:%M:%S}" if is_known(ns) else NOT_KNOWN


def format_share(value: Any) -> str:
    """Format a fraction as a percentage: 0.1234 -> "12.3 %"."""
    if not is_known(value):
        return NOT_KNOWN
    return "<0.1 %" if 0 < value < 0.0005 else f"{value:.1%}".replace("%", " %")


def format_small_share(value: Any) -> str:
    """Format a fraction as a percentage with two significant digits: 0.000512 -> "0.051 %"."""
    return NOT_KNOWN if not is_known(value) else "0 %" if value == 0 else f"{value * 100:.2g} %"


def format_bandwidth(value: Any) -> str:
    """Format GB/s with three digits, without the unit."""
    return NOT_KNOWN if not is_known(value) else f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def format_signed(value: Any, format_value: Callable[[Any], str] = format_count) -> str:
    """Format a difference with its sign, "+" or "-"; zero has none: 1536, format_bytes -> "+1.50 KiB"."""
    if not is_known(value):
        return NOT_KNOWN
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{format_value(abs(value))}"


def format_plural(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: (1, "rank") -> "1 rank", (2, "rank") -> "2 ranks"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


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
    items = [str(name) if isinstance(name, str) or name >= 0 else NOT_KNOWN for name in names]
    if not any(isinstance(name, str) or name < 0 for name in names):
        items = [*range_items(names)]
    return ",".join(items) if len(items) <= most else f"{','.join(items[:3])},...,{items[-1]} ({len(names):,} in all)"


def shorten_rank_list(ranks: str) -> str:
    """Shorten a list of ranks, as `format_ranks` writes it, if it has more than 16 ranges."""
    return shorten_names(parse_ranks(ranks)) if ranks.count(",") >= _MAX_RANGES else ranks


def name_ranks(ranks: str, noun: str = "rank") -> str:
    """Return a list of ranks with its noun, shortened: "rank 3", "ranks 0-3"."""
    return f"{noun}{'' if ranks.isdecimal() else 's'} {shorten_rank_list(ranks)}"


def shorten_ranks(text: str) -> str:
    """Shorten the lists of ranks in a text, as `format_ranks` writes them, that have more than 16 ranges."""
    return _MANY_RANGES.sub(lambda match: shorten_names(parse_ranks(match[0])), text)


def parse_ranks(text: str) -> list[int]:
    """Parse ranges in any order, with or without strides: "8,0-3,16-32:8" -> [0, 1, 2, 3, 8, 16, 24, 32].

    Raises:
        ValueError: The text is not a list of numbers and ranges, or has too many or too large numbers.
    """
    return sorted({*parse_rank_list(text)})


def _with_unit(value: Any, factor: int, units: Sequence[str]) -> str:
    """Format a number in a suitable unit with three digits, or with all digits before the decimal point.

    Each unit is `factor` times the previous one; integers in the first unit keep all digits.
    """
    if not is_known(value):
        return NOT_KNOWN
    number, unit = float(value), 0
    while abs(number) >= 999.5 and unit < len(units) - 1:
        number, unit = number / factor, unit + 1
    exact = unit == 0 and number.is_integer()
    digits = 0 if exact or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:,.{digits}f} {units[unit]}"
