"""Sections of the subjects that compare ranks: stuck calls, waits, clocks, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.grouping import rows_of
from commtrace.analyses.sections import Block, Paragraph, Report, Section, ShownTable, Tables
from commtrace.analyses.table_specs import TABLES
from commtrace.analyses.table_specs.equivalent_ranks import ALIKE
from commtrace.formatting import (
    MAX_SINGLE,
    format_duration,
    format_moment,
    format_plural,
    format_ranks,
    format_share,
    is_known,
    shorten_names,
    shorten_ranks,
)

from . import clock_tables, stragglers, stuck_calls, waits

MAX_DELAYS: Final = 3
MAX_STEPS_NAMED: Final = 6
MAX_PATH_PARTS: Final = 8
MAX_STRAGGLERS: Final = 16
MAX_STUCK_CALLS: Final = 3
"""Stuck calls that the diagnosis describes."""
SIGNIFICANT_WAIT: Final = 0.2
"""Share of the time in calls from which waiting is a finding."""


def diagnosis(tables: Tables) -> Iterator[str]:
    """Yield the diagnosis of a job that hangs or died: incomplete calls, the ranks in them, where the others are."""
    calls, ranks = tables["stuck_calls"], tables["stuck_ranks"]
    for number, call in enumerate(rows_of(calls.head(MAX_STUCK_CALLS))):
        at_call = ranks.loc[ranks["stuck_call"] == number]
        failed = (at_call.loc[at_call["part"] == "waiting", "state"] == "failed").all()
        name = call.op + (f" {call.seq:,}" if is_known(call.seq) else "")
        yield shorten_ranks(f"{name} of ranks {call.group_ranks} {_stuck(call, failed=bool(failed))}.")
        shown = at_call if call.disagreement else at_call.loc[at_call["part"] == "absent"]
        where = shown.fillna({"state": "", "call": ""}).groupby(["part", "call", "state", "site", "end"], sort=False)
        for (part, last, state, site, end), group in [*where][:MAX_STUCK_CALLS]:
            of_group = shorten_ranks(format_ranks(group["rank"]))
            yield f"{_named(of_group, 'Rank')} {_place(part, last, state, site, group)}; {_END[end]}."
    if len(calls) > MAX_STUCK_CALLS:
        yield f"{format_plural(len(calls) - MAX_STUCK_CALLS, 'more stuck call')}: table `stuck_calls` (--json)."


def _named(ranks: str, noun: str = "rank") -> str:
    return f"{noun}{'' if ranks.isdecimal() else 's'} {ranks}"


def _stuck(call: Any, *, failed: bool) -> str:
    """Describe a stuck call; `failed`: it failed on all ranks that were in it."""
    texts = []
    since, site = f"at {format_moment(call.since_ns)} UTC", call.site or "call site not recorded"
    if call.waiting_ranks and failed:
        texts.append(f"it failed on {_named(call.waiting_ranks)} ({site})")
    elif call.waiting_ranks:
        waited = f"and stayed in it for at least {format_duration(call.waited_ns)}"
        texts.append(f"{_named(call.waiting_ranks)} entered it {since} {waited} ({site})")
    if call.absent_ranks:
        texts.append(f"{_named(call.absent_ranks)} did not enter it{', or ended in it' * failed}")
    if call.disagreement:
        texts.append(f"the ranks disagree ({call.disagreement})")
    elif not call.absent_ranks:
        texts.append("all its ranks entered it, and agree")
    return ("did not complete: " if failed else "has not completed: ") + "; ".join(texts)


def _place(part: str, call: str, state: str, site: str, ranks: pd.DataFrame) -> str:
    """Return where ranks are."""
    if not call:
        return "made no call"
    ago = format_duration((ranks["alive_ns"] - ranks["begin_ns"]).max())
    at = f" at {site}" if site else ""
    last_seen = f"{ago} before the {'rank was' if len(ranks) == 1 else 'ranks were'} last seen"
    return f"{'last entered' if part == 'absent' else 'entered'} {call}{at} ({state}), {last_seen}"


_END: Final = {
    "runs": "still running",
    "exit": "log closed",
    "died": "ended without closing its log",
    "unknown": "not known whether it is running",
}


STUCK_SECTION: Final = Section(
    "stuck",
    "Calls that do not end",
    (TABLES["stuck_calls"], TABLES["stuck_ranks"]),
    (stuck_calls.ANALYSIS,),
    look_for="The calls in which the job hangs, or died, and where each of their ranks is.",
    alarms=diagnosis,
)


def _show_waits(report: Report) -> Iterator[Block]:
    if report.run.simulated:
        yield Paragraph("Not available: this is a dry run, which sends nothing.")
        return
    for name in ("wait_patterns", "waits_by_operation", "waits_by_role", "waits_by_rank", "waits_by_site"):
        rows = report.rows(TABLES[name])
        complete = name in ("wait_patterns", "waits_by_operation") or ALIKE in rows
        if name != "waits_by_role" or len(rows) > 1:
            yield ShownTable(TABLES[name], rows if complete else rows.head(report.sites or len(rows)))
    yield Paragraph("Wait: the part of a call before the last rank that it depends on arrives. By step: --json.")


def _waiting(tables: Tables) -> Iterator[str]:
    """Yield the share of the time in calls that is certainly waiting, if it is large."""
    waiting = tables["waiting"].iloc[0]
    duration, least = waiting["duration_ns"], waiting["wait_min_ns"]
    if duration and least / duration >= SIGNIFICANT_WAIT:
        most = waiting["wait_max_ns"] / duration
        between = "" if most - least / duration < 0.005 else f" to {format_share(most)}"
        yield (
            f"{format_share(least / duration)}{between} of the time in calls is waiting for ranks that arrive later "
            "(--sections waiting)."
        )


WAITING_SECTION: Final = Section(
    "waiting",
    "Wait and transfer",
    (
        TABLES["waiting"],
        TABLES["wait_patterns"],
        *(TABLES[f"waits_by_{key}"] for key in ("operation", "role", "rank", "site", "step")),
    ),
    (waits.SAMPLE,),
    on_request=(waits.ANALYSIS,),
    blocks=_show_waits,
    default=False,
    findings=_waiting,
)


def _show_clocks(report: Report) -> Iterator[Block]:
    if len(report.tables["clocks"]) > 1:
        yield ShownTable(TABLES["clocks"], report.rows(TABLES["clocks"]))
        if len(report.tables["clock_steps"]):
            yield ShownTable(TABLES["clock_steps"], report.rows(TABLES["clock_steps"]), "Clock jumps")


def _clock_jumps(tables: Tables) -> Iterator[str]:
    if len(tables["clock_steps"]):
        hosts = shorten_names(sorted(set(tables["clock_steps"]["host"])), most=MAX_SINGLE).replace(",", ", ")
        yield f"The clock of {hosts} jumped during the run (--sections clocks)."


CLOCKS_SECTION: Final = Section(
    "clocks",
    "Clock offsets of the hosts, with bounds from the calls",
    (TABLES["clocks"], TABLES["clock_steps"]),
    (clock_tables.ANALYSIS,),
    blocks=_show_clocks,
    default=False,
    look_for="Bounds on each host's clock relative to the reference's, from the calls alone.",
    findings=_clock_jumps,
)


def _show_step_time(report: Report) -> Iterator[Block]:
    parts, path = TABLES["step_time_parts"], report.tables["critical_path"]
    if not len(report.tables["step_time_parts"]):
        yield Paragraph(
            "Not available: this needs three training steps of all ranks, with ends of calls observed on the host, and "
            "enough calls between hosts to compare their clocks."
        )
        return
    yield ShownTable(parts, report.rows(parts))
    keys = ["which", "step", "rank", "part", "op", "role", "phase", "site"]
    sums = path.groupby(keys, as_index=False, sort=False, dropna=False).agg({"begin_ns": "min", "ns": "sum"})
    longest = sums.loc[sums["which"] == "slowest"].nlargest(MAX_PATH_PARTS, "ns")
    title = f"Critical path of the slowest step, the {len(longest)} longest parts"
    yield ShownTable(TABLES["critical_path"], longest, title)
    rows = report.rows(TABLES["stragglers"])
    if ALIKE not in rows:
        rows = rows.nlargest(MAX_STRAGGLERS, "waiting_ns").sort_values("rank")
    yield ShownTable(TABLES["stragglers"], rows, "Stragglers: ranks that others wait for")
    if len(report.tables["delays"]):
        rows = report.rows(TABLES["delays"])
        yield ShownTable(TABLES["delays"], rows, "Delays: ranks that compute longer than the others")


def delay_sentences(tables: Tables) -> Iterator[str]:
    """Yield a sentence for each of the largest delays."""
    for delay in rows_of(tables["delays"].head(MAX_DELAYS)):
        steps = f"in {format_plural(delay.delayed_steps, 'step')}"
        if delay.delayed_steps <= MAX_STEPS_NAMED:
            steps = f"in step{'' if delay.delayed_steps == 1 else 's'} {delay.steps}"
        regular = delay.recurrence.startswith("every ")
        when = {"every step": "in every step"}.get(delay.recurrence, delay.recurrence if regular else steps)
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
    tuple(TABLES[name] for name in ("step_time_parts", "critical_path", "stragglers", "delays")),
    (stragglers.ANALYSIS,),
    details=((TABLES["delay_by_rank_and_step"], stragglers.BY_RANK_AND_STEP),),
    blocks=_show_step_time,
    default=False,
    findings=delay_sentences,
)
