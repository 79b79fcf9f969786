"""The analyses that a report asks for, in the order of their tables."""

from __future__ import annotations

from typing import Final

from . import balance, cost, coverage, reconciliation, sizes, steps, times, volume
from .fold import Analysis

ANALYSES: Final[tuple[Analysis, ...]] = (
    coverage.ANALYSIS,
    cost.ANALYSIS,
    *volume.ANALYSES,
    steps.ANALYSIS,
    sizes.ANALYSIS,
    times.ANALYSIS,
    times.BANDWIDTH,
    balance.ANALYSIS,
    reconciliation.ANALYSIS,
)
