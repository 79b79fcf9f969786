"""Analyses that a report runs besides `reconciliation`, in the order of their tables. Append one to add it."""

from __future__ import annotations

from typing import Final

from . import coverage, host_times, message_sizes, steps, timeline, tracing_cost, volume
from .across_ranks import clock_tables, stragglers, stuck_calls, waits
from .fold_engine import AnyAnalysis

ANALYSES: Final[tuple[AnyAnalysis, ...]] = (
    stuck_calls.ANALYSIS,
    coverage.ANALYSIS,
    tracing_cost.ANALYSIS,
    *volume.ANALYSES,
    volume.WHOLE_JOB,
    steps.ANALYSIS,
    message_sizes.ANALYSIS,
    host_times.ANALYSIS,
    host_times.BANDWIDTH,
    volume.BY_RANK,
    clock_tables.ANALYSIS,
    waits.SAMPLE,
    stragglers.ANALYSIS,
)

ACROSS_RANKS: Final[tuple[AnyAnalysis, ...]] = (waits.ANALYSIS,)
"""Analyses that match all calls of all ranks. They take as long as all others, so text reports omit them by default."""

DETAILS: Final[dict[str, AnyAnalysis]] = {
    analysis.name: analysis
    for analysis in (steps.BY_OPERATION, timeline.ANALYSIS, message_sizes.OVER_TIME, stragglers.BY_RANK_AND_STEP)
}
"""Analyses that figures need and no report prints, by the name of their only table."""
