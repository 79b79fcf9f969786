"""Waterfall bars: the exact differences between a closed form and the wire bytes of the expected calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from .expected_calls import ExpectedCall, WaterfallBar, total_wire_bytes


def level_bars(start: Fraction, levels: Mapping[str, Fraction]) -> list[WaterfallBar]:
    """Return a bar for each level: its difference from the previous level (from `start` for the first)."""
    before = (start, *levels.values())
    return [WaterfallBar(label, level - below) for (label, level), below in zip(levels.items(), before, strict=False)]


def cause_bars(calls: Iterable[ExpectedCall], ranks: int, *counted: str, prefix: str = "") -> list[WaterfallBar]:
    """Return a bar for each cause of calls, except `counted` causes, which a closed form or a level includes."""
    totals: dict[str, Fraction] = {}
    for call in calls:
        if call.cause not in counted:
            totals[call.cause] = totals.get(call.cause, Fraction(0)) + total_wire_bytes([call], ranks)
    return [WaterfallBar(prefix + cause, total) for cause, total in totals.items()]
