"""The analyses that a report asks for, in the order of their tables."""

from __future__ import annotations

from typing import Final

from . import (
    balance,
    cost,
    coverage,
    reconciliation,
    sizes,
    sizes_over_time,
    steps,
    steps_by_operation,
    timeline,
    times,
    volume,
    whole_job,
)
from .fold import Analysis

ANALYSES: Final[tuple[Analysis, ...]] = (
    coverage.ANALYSIS,
    cost.ANALYSIS,
    *volume.ANALYSES,
    whole_job.ANALYSIS,
    steps.ANALYSIS,
    sizes.ANALYSIS,
    times.ANALYSIS,
    times.BANDWIDTH,
    balance.ANALYSIS,
    reconciliation.ANALYSIS,
)

DETAILS: Final[dict[str, Analysis]] = {
    analysis.name: analysis for analysis in (steps_by_operation.ANALYSIS, timeline.ANALYSIS, sizes_over_time.ANALYSIS)
}
"""Those that figures need and no report prints, by the name of their only table."""
