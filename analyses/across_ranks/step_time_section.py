"""Where the time of a step goes across ranks: critical paths, delays and stragglers, as an analysis and a section."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, TypeAlias

import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.sections import Block, Paragraph, Report, Section, ShownTable, Tables
from commtrace.analyses.table_specs.equivalent_ranks import ALIKE
from commtrace.formatting import MAX_SINGLE, format_duration, format_plural, format_share
from commtrace.rank_ranges import shorten_names

from . import stragglers
from .critical_paths import StepPaths, critical_path, step_time_parts, step_times
from .step_time_specs import (
    CRITICAL_PATH,
    DELAY_BY_RANK_AND_STEP,
    DELAYS,
    STEP_TIME_PARTS,
    STEP_TIMES,
    STRAGGLERS,
    TABLES,
)

MAX_DELAYS: Final = 3
MAX_STEPS_NAMED: Final = 6
MAX_PATH_PARTS: Final = 8
MAX_STRAGGLERS: Final = 16


def _show_step_time(report: Report) -> Iterator[Block]:
    path = report.tables["critical_path"]
    if not len(report.tables["step_time_parts"]):
        yield Paragraph(
            "Not available: this needs three training steps of all ranks, with ends of calls observed on the host, and "
            "enough calls between hosts to compare their clocks."
        )
        return
    yield ShownTable(STEP_TIME_PARTS, report.rows(STEP_TIME_PARTS))
    keys = ["which", "step", "rank", "part", "op", "role", "phase", "site"]
    sums = path.groupby(keys, as_index=False, sort=False, dropna=False).agg({"begin_ns": "min", "ns": "sum"})
    longest = sums.loc[sums["which"] == "slowest"].nlargest(MAX_PATH_PARTS, "ns")
    title = f"Critical path of the slowest step, the {len(longest)} longest parts"
    yield ShownTable(CRITICAL_PATH, longest, title)
    rows = report.rows(STRAGGLERS)
    if ALIKE not in rows:
        rows = rows.nlargest(MAX_STRAGGLERS, "waiting_ns").sort_values("rank")
    yield ShownTable(STRAGGLERS, rows, "Stragglers: ranks that others wait for")
    if len(report.tables["delays"]):
        rows = report.rows(DELAYS)
        yield ShownTable(DELAYS, rows, "Delays: ranks that compute longer than the others")


def delay_sentences(tables: Tables) -> Iterator[str]:
    """Yield a sentence for each of the largest delays."""
    for delay in rows_of(tables["delays"].head(MAX_DELAYS)):
        steps = f"in {format_plural(delay.delayed_steps, 'step')}"
        if delay.delayed_steps <= MAX_STEPS_NAMED:
            steps = f"in step{'' if delay.delayed_steps == 1 else 's'} {delay.steps}"
        when = delay.recurrence  # "every 10 steps"
        when = {"every step": "in every step", "irregular": steps, "once": steps}.get(when, when)
        yield (
            f"Rank {delay.rank} delays the job: {when} it computes {format_duration(delay.delay_ns)} longer than the "
            f"other ranks ({delay.phase}), {format_share(delay.share)} of the step."
        )
    ranks = tables["delays"]["rank"].unique().tolist()
    if len(ranks) > MAX_SINGLE:
        yield f"{len(ranks):,} ranks delay the job: {shorten_names(sorted(ranks))} (--sections step-time)."


def _path_tables(tables: Mapping[str, _PathTable], run: AnalysedRun) -> NamedTables:
    """Return tables computed from the paths of the steps; empty tables for a run without paths."""
    paths = run.step_paths
    if paths is None:
        return {name: pd.DataFrame(columns=TABLES[name].column_names) for name in tables}
    parts = stragglers.computation(paths)
    return {name: table(run, paths, parts) for name, table in tables.items()}


def _step_time_parts(run: AnalysedRun, paths: StepPaths, parts: list[stragglers.Computation]) -> pd.DataFrame:
    return step_time_parts(paths)


def _step_times(run: AnalysedRun, paths: StepPaths, parts: list[stragglers.Computation]) -> pd.DataFrame:
    return step_times(run, paths, stragglers.total_computation(paths, parts).excess)


def _critical_path(run: AnalysedRun, paths: StepPaths, parts: list[stragglers.Computation]) -> pd.DataFrame:
    return critical_path(run, paths)


_PathTable: TypeAlias = Callable[[AnalysedRun, StepPaths, list[stragglers.Computation]], pd.DataFrame]
_TABLES: Final[Mapping[str, _PathTable]] = {
    "step_time_parts": _step_time_parts, "step_times": _step_times, "critical_path": _critical_path,
    "stragglers": stragglers.stragglers, "delays": stragglers.delays,
}  # fmt: skip
ANALYSIS: Final = RunAnalysis("step_times", partial(_path_tables, _TABLES))
BY_RANK_AND_STEP: Final = RunAnalysis(
    "delay_by_rank_and_step", partial(_path_tables, {"delay_by_rank_and_step": stragglers.delay_by_rank_and_step})
)
STEP_TIME_SECTION: Final = Section(
    "step-time",
    "Where the time of a step goes, across ranks",
    (STEP_TIME_PARTS, STEP_TIMES, CRITICAL_PATH, STRAGGLERS, DELAYS),
    (ANALYSIS,),
    details=((DELAY_BY_RANK_AND_STEP, BY_RANK_AND_STEP),),
    blocks=_show_step_time,
    default=False,
    findings=delay_sentences,
)
