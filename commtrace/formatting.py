"""Numbers as people read them. "-" is what is not known."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

NOT_KNOWN: Final = "-"

_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TIMES: Final = (
    (1_000, 1, "ns"),
    (1_000_000, 1_000, "us"),
    (1_000_000_000, 1_000_000, "ms"),
    (float("inf"), 1_000_000_000, "s"),
)


def is_known(value: Any) -> bool:
    """Whether there is a value."""
    return value is not None and not pd.isna(value)


def format_count(value: Any) -> str:
    """1234567 -> "1,234,567"; a mean of counts keeps one digit."""
    if not is_known(value):
        return NOT_KNOWN
    return f"{int(value):,}" if float(value).is_integer() else f"{value:,.1f}"


def format_bytes(value: Any) -> str:
    """Bytes in binary units, three digits: 1536 -> "1.50 KiB"."""
    if not is_known(value):
        return NOT_KNOWN
    number, unit = float(value), 0
    while abs(number) >= 999.5 and unit < len(_BYTES) - 1:
        number, unit = number / 1024, unit + 1
    return f"{_digits(number, whole=unit == 0)} {_BYTES[unit]}"


def format_duration(value: Any) -> str:
    """Ns in the unit that suits, three digits: 1500 -> "1.50 us"."""
    if not is_known(value):
        return NOT_KNOWN
    number = float(value)
    scale, unit = next((scale, unit) for below, scale, unit in _TIMES if number < below * 0.9995)
    return f"{_digits(number / scale, whole=scale == 1)} {unit}"


def format_share(value: Any) -> str:
    """0.1234 -> "12.3 %"."""
    if not is_known(value):
        return NOT_KNOWN
    return "<0.1 %" if 0 < value < 0.0005 else f"{value:.1%}".replace("%", " %")


def format_small_share(value: Any) -> str:
    """A share of which small parts matter: 0.000512 -> "0.051 %"."""
    return NOT_KNOWN if not is_known(value) else "0 %" if value == 0 else f"{value * 100:.2g} %"


def format_bandwidth(value: Any) -> str:
    """GB/s, three digits."""
    return NOT_KNOWN if not is_known(value) else f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def format_plural(number: int, noun: str, many: str = "") -> str:
    """1, "rank" -> "1 rank"; 2 -> "2 ranks"."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"


def _digits(number: float, *, whole: bool) -> str:
    """Three digits, or all of those before the point."""
    if whole and number.is_integer():
        return f"{number:,.0f}"
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:,.0f}"
