"""The analyses that a report asks for, in the order of their tables."""

from __future__ import annotations

from typing import Final

from . import balance, coverage, reconciliation, sizes_over_time, steps, steps_by_operation, timeline, volume, whole_job
from . import call_times as times
from . import message_sizes as sizes
from . import tracing_cost as cost
from .engine import Analysis

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
