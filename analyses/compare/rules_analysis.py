"""Comparison of the recorded calls with those that rules expect of a job.

A cell is one operation of one parallel dimension in one step of one rank. Calls of a cell are compared by payload, and
by group size in dimensions whose groups differ in size; from step DETAILED_STEPS on, by number and bytes. Calls that
match, or whose size is within its bounds, have the cause "expected". All others are unmatched, with the label of a
cause (`causes.CAUSES`) or "unexplained". Only processes that trained one model, of a scheme with rules, are compared.

The waterfall leads from the paper's closed form (equation 2 or 3 with the real number of parameters, times the element
size) to the wire bytes of one rank's step. Sums are exact; running sums are rounded to whole bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import Analysis, NamedTables
from commtrace.analyses.grouping import Array
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.summary_reader import MIXED

from . import counted_calls, step_by_purpose
from .counted_calls import count_steps
from .rules_tables import RuleComparison
from .run_calls import RankCalls, StepCalls

_FIRST_RECORDS: Final = 16


def compare_with_rules(
    table: pd.DataFrame, run: RecordedRun, jobs: Sequence[Mapping[str, Any]] = (), own: Sequence[str] = ()
) -> RuleComparison:
    """Compare the recorded calls of all processes with those that rules expect.

    Args:
        table: The merged table of ANALYSIS, with labels.
        run: The run.
        jobs: Job rows in place of the captured ones; a pipeline has one per stage.
        own: Patterns of call sites whose calls are the program's own, and are left out.
    """
    return _compare(*count_steps(table, run.labels, len(run.processes), own), run, jobs)


def _compare(
    contents: Sequence[StepCalls],
    calls_of_process: Sequence[RankCalls],
    run: RecordedRun,
    jobs: Sequence[Mapping[str, Any]] = (),
) -> RuleComparison:
    steps = _compared_steps([calls.last_step for calls in calls_of_process], run)
    rules = RuleComparison(str(run.log.path), contents, steps)
    for process, calls, end in zip(run.processes, calls_of_process, run.ends, strict=True):
        # All stages have the same number of ranks, in the order of the ranks.
        job = jobs[process.rank * len(jobs) // (run.world_size or len(run.processes))] if jobs else None
        state = replace(calls, ended=not end.is_cut, lost_records=process.lost_records)
        rules.add(process, state, job, _problem(process, calls.last_step, run))
    return rules


def _finish(table: pd.DataFrame, run: RecordedRun, *, include_matching_steps: bool = True) -> NamedTables:
    contents, calls_of_process = count_steps(table, run.labels, len(run.processes))
    ranks = [replace(calls, ended=not end.is_cut) for calls, end in zip(calls_of_process, run.ends, strict=True)]
    return {
        **_compare(contents, calls_of_process, run).tables(include_matching_steps=include_matching_steps),
        **step_by_purpose.tables(contents, [*zip(run.processes, ranks, strict=True)]),
    }


def _compared_steps(last_steps: Iterable[int], run: RecordedRun) -> Array:
    """Return the steps that are compared, ascending from -1 (start-up), given the last step of each process."""
    last = [step for step, process in zip(last_steps, run.processes, strict=True) if not _problem(process, step, run)]
    steps = np.arange(_first_complete_step(run), max(last, default=-1) + 1)
    return steps[_is_compared(steps, run)]


def _problem(process: Process, last_step: int, run: RecordedRun) -> str | None:
    """Return the reason why a process with this last step is not compared; None if it is."""
    return process.steps_problem(last_step) or run.selection_problem


def _first_complete_step(run: RecordedRun) -> int:
    """Return the first step from which no process has removed records; -1 is start-up.

    Records are written roughly in the order in which calls end. The first remaining ones may therefore be of several
    steps, and those of calls that are never waited for come last.
    """
    first = -1
    for process in run.processes:
        if process.removed and process.segments:
            records = next(process.segments[0].blocks(_FIRST_RECORDS), None)
            first = max(first, -1 if records is None else int(records["step"].max(initial=-1)) + 1)
    return first


def _is_compared(steps: Array, run: RecordedRun) -> Array:
    """Return whether the calls of each step are in the log separately from those of other steps, bool, shape (n,)."""
    compared = np.asarray(run.select_steps(steps) & (steps != MIXED))
    for process in run.processes:
        for first, last in process.summary.summed_steps if process.summary else ():
            compared &= (steps < first) | (steps > last)
    return compared


def _has_job_or_purposes(run: RecordedRun) -> bool:
    tables = [process.tables for process in run.processes]
    return any(of.jobs or any(site.purpose for site in of.sites.values()) for of in tables)


ANALYSIS: Final = Analysis(
    "reconciliation",
    counted_calls.partial,
    counted_calls.merge,
    _finish,
    _has_job_or_purposes,
    reads_cells=True,
    categorical=True,
)


DIFFERENCES: Final = replace(ANALYSIS, finish=partial(_finish, include_matching_steps=False))
"""ANALYSIS without the steps that have no differences: for many ranks and steps, they take much memory."""
