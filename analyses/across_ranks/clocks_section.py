"""Tables of the clocks of a run's hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import NamedTables, NeededCalls, RunAnalysis
from commtrace.analyses.sections import Block, Report, Section, ShownTable, Tables
from commtrace.analyses.table_specs.spec import TableSpec, column, count, duration, word_column
from commtrace.formatting import MAX_SINGLE, format_count, format_duration, is_known
from commtrace.rank_ranges import shorten_names

from .clocks import USEFUL_NS, Clocks
from .corridors import RATE_SPREAD


def _rate(ppm: Any) -> str:
    return f"{ppm:.1f}" if is_known(ppm) else "-"


CLOCKS: Final = TableSpec("clocks", "Clocks of the hosts",
    "A row per host (per boot of it). Bounds follow from the calls of the log; a host that they do not bound "
    "has missing values.", (
    word_column("host", "host", "Host name."),
    word_column("reference", "reference", "Host that it is compared with."),
    column("ns", format_count, "offset_ns", "offset",
        "Its monotonic clock minus the reference's in the middle of the run: the middle of the bounds."),
    column("ppm", lambda rate: f"{rate:+.1f}" if is_known(rate) else "-", "drift_ppm", "drift, ppm",
        "Mean growth of the offset: the middle of its bounds."),
    column("ppm", _rate, "drift_half_width_ppm", "+-",
        "Half the distance between the bounds of drift_ppm."),
    duration("half_width_ns", "offset +-", "Half the largest distance between the bounds of the offset."),
    count("calls", "calls", "Calls of the host that gave bounds.", measured=True),
    count("steps", "steps", "Jumps of the clock (`clock_steps`)."),
    column("ppm", _rate, "rate_change_ppm", "rate changed, ppm",
        "Least change of its rate within the run that explains the bounds; 0: a constant rate does."),
    duration("contradiction_ns", "contradiction",
        "By how much bounds of calls contradict each other, beyond what jumps and rates explain; 0: they do not."),
    count("contradicting_calls", "calls in it", "Calls whose bounds contradict others.", measured=True),
    duration("widened_ns", "widened by", "By how much all bounds are widened because of that."),
), merge_by="host")  # fmt: skip
CLOCK_STEPS: Final = TableSpec("clock_steps", "Clock jumps",
    "A row per jump of a host's clock: the bounds before and after it contradict each other.", (
    word_column("host", "host", "Host name."),
    word_column("reference", "reference", "Host that it is compared with."),
    column("ns", format_count, "after_ns", "after", "Time after which it jumped, on the reference's clock."),
    column("ns", format_count, "before_ns", "before", "Time before which it jumped."),
    column("ns", format_count, "smallest_ns", "at least", "Lower bound of the jump."),
    column("ns", format_count, "largest_ns", "at most", "Upper bound of the jump."),
), merge_by="host")  # fmt: skip


def clock_tables(run: AnalysedRun) -> NamedTables:
    """Return the tables `clocks` and `clock_steps`."""
    clocks = run.clocks
    rows = [_row(clocks, number) for number in range(len(clocks.hosts))]
    steps = [
        (clocks.hosts[number], clocks.hosts[clocks.reference], *step)
        for number, clock in enumerate(clocks.aligned)
        for step in (() if clock is None else clock.steps)
    ]
    return {
        "clocks": pd.DataFrame(rows, columns=CLOCKS.column_names),
        "clock_steps": pd.DataFrame(steps, columns=CLOCK_STEPS.column_names),
    }


def _row(clocks: Clocks, number: int) -> tuple[object, ...]:
    clock, names = clocks.aligned[number], (clocks.hosts[number], clocks.hosts[clocks.reference])
    if clock is None:
        return *names, *(None,) * 4, 0, 0, *(None,) * 4
    lower, upper = clock.offsets(np.array([sum(clock.used_at) // 2]))
    slowest, fastest = (1e6 * rate for rate in clock.drift)
    drift = (slowest + fastest) / 2, (fastest - slowest) / 2
    odd = 1e6 * clock.rate_change, *(clock.contradiction or (0, 0, 0))
    return *names, int(lower[0] + upper[0]) // 2, *drift, clock.half_width_ns, clock.calls, len(clock.steps), *odd


ANALYSIS: Final = RunAnalysis("clocks", clock_tables, NeededCalls())


def _show_clocks(report: Report) -> Iterator[Block]:
    if len(report.tables["clocks"]) > 1:
        yield ShownTable(CLOCKS, report.rows(CLOCKS))
        if len(report.tables["clock_steps"]):
            yield ShownTable(CLOCK_STEPS, report.rows(CLOCK_STEPS), "Clock jumps")


def _findings(tables: Tables) -> Iterator[str]:
    clocks = tables["clocks"]
    jumped, changed = clocks[clocks["steps"] > 0], clocks[clocks["rate_change_ppm"] > 1e6 * RATE_SPREAD]
    contradict = clocks[clocks["contradiction_ns"] > 0]
    vague = clocks[~(clocks["half_width_ns"] <= USEFUL_NS)]  # also where it is missing
    if len(vague):
        known = vague["half_width_ns"].dropna()
        how = f"only within {format_duration(known.max())}" if len(known) == len(vague) else "not at all, or badly"
        yield (
            f"The calls bound the clock of {_names(vague)} {how}: timelines are on wall clocks, as well as the hosts "
            "synchronise them (--sections clocks)."
        )
    if len(jumped):
        yield f"The clock of {_names(jumped)} jumped during the run (--sections clocks)."
    if len(changed):
        most = changed.iloc[int(changed["rate_change_ppm"].argmax())]
        yield (
            f"The rate of the clock of {_names(changed)} changed during the run, that of {most['host']} by at least "
            f"{most['rate_change_ppm']:.0f} ppm (--sections clocks)."
        )
    if len(contradict):
        worst = format_duration(contradict["contradiction_ns"].max())
        calls = format_count(int(contradict["contradicting_calls"].sum()))
        yield (
            f"Timestamps of {_names(contradict)} and {contradict['reference'].iloc[0]} contradict each other, in "
            f"{calls} calls and by up to {worst}, as if processes of a host read different clocks. The bounds of "
            "waits are wider by as much (--sections clocks)."
        )


def _names(clocks: pd.DataFrame) -> str:
    return shorten_names(sorted(set(clocks["host"])), most=MAX_SINGLE).replace(",", ", ")


CLOCKS_SECTION: Final = Section(
    "clocks",
    "Clock offsets of the hosts, with bounds from the calls",
    (CLOCKS, CLOCK_STEPS),
    (ANALYSIS,),
    blocks=_show_clocks,
    default=False,
    look_for="Bounds on each host's clock relative to the reference's, from the calls alone.",
    findings=_findings,
)
