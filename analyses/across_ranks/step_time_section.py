"""Section of where the time of a step goes across ranks, and the sentences about delays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.sections import Block, Paragraph, Report, Section, ShownTable, Tables
from commtrace.analyses.table_specs.equivalent_ranks import ALIKE
from commtrace.formatting import MAX_SINGLE, format_duration, format_plural, format_share
from commtrace.rank_ranges import shorten_names

from . import stragglers
from .step_time_specs import CRITICAL_PATH, DELAY_BY_RANK_AND_STEP, DELAYS, STEP_TIME_PARTS, STRAGGLERS

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


STEP_TIME_SECTION: Final = Section(
    "step-time",
    "Where the time of a step goes, across ranks",
    (STEP_TIME_PARTS, CRITICAL_PATH, STRAGGLERS, DELAYS),
    (stragglers.ANALYSIS,),
    details=((DELAY_BY_RANK_AND_STEP, stragglers.BY_RANK_AND_STEP),),
    blocks=_show_step_time,
    default=False,
    findings=delay_sentences,
)
