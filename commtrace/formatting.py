"""Numbers, sizes and times as text.

An unknown value (None, NaN or pandas' NA) becomes "-".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, Final

NOT_KNOWN: Final = "-"

MAX_SINGLE: Final = 32
"""Maximum number of ranks that reports show one by one."""

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


def wrap_text(text: str, width: int, first: str = "", others: str | None = None) -> list[str]:
    """Wrap a text at spaces. `first` precedes the first line, `others` the others (default: spaces of its length)."""
    import textwrap  # here, because ranks of a dry run import this module for the text of ranks

    indent = " " * len(first) if others is None else others
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


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
