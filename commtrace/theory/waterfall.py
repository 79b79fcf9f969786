"""Waterfall bars: what leads from a closed form to the wire bytes of the expected calls, exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from .expected_calls import ExpectedCall, WaterfallBar, total_wire_bytes


def level_bars(start: Fraction, levels: Mapping[str, Fraction]) -> list[WaterfallBar]:
    """Return a bar for each level, with its difference to the level before; the first one's is to `start`."""
    before = (start, *levels.values())
    return [WaterfallBar(label, level - below) for (label, level), below in zip(levels.items(), before, strict=False)]


def cause_bars(calls: Iterable[ExpectedCall], ranks: int, *counted: str, prefix: str = "") -> list[WaterfallBar]:
    """Return a bar for each cause of calls, except causes that a closed form or a level has `counted`."""
    totals: dict[str, Fraction] = {}
    for call in calls:
        if call.cause not in counted:
            totals[call.cause] = totals.get(call.cause, Fraction(0)) + total_wire_bytes([call], ranks)
    return [WaterfallBar(prefix + cause, total) for cause, total in totals.items()]
