"""Verdict on a run by the calls that rules expect.

A cell is one operation of one parallel dimension in one step of one rank. It agrees if its payload, and the sizes and
number of its calls, are as expected. If the order of gradients and modules determines how many calls carry the same
bytes (`calls_max` of the table `expected`), their number only has to be within that bound. With a tolerance above 0,
only the payload is compared.

Extra calls are the program's own if no library with rules made them and no expected call of the cell is missing;
otherwise they may replace expected calls. Calls in a group of one rank, which send nothing, are listed with them.
Expected calls that may be missing from the log alone are not compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import merged_table
from commtrace.analyses.grouping import Array, group_rows, rows_of
from commtrace.formatting import MAX_SINGLE, format_missing, format_ranks, merge_texts
from commtrace.reading.recorded_run import RecordedRun

from .causes import SPLIT_DIFFERENTLY
from .counted_calls import last_steps, sums_in
from .own_calls import OwnRow, is_declared, is_program_call, path_in_packages, sum_own_calls
from .reconciliation import ANALYSIS, compare_with_rules, compared_steps
from .rule_comparison import RuleComparison, RuledStep
from .run_calls import EqualCalls
from .step_comparison import ExplainedCalls, differences
from .step_matching import Cell, CellKey
from .theory_tables import max_calls
from .verdict import EqualRanks, JudgedStep, Verdict, format_steps, judge_run


def judge_by_rules(
    run: RecordedRun,
    comparison: RuleComparison,
    *,
    tolerance: Fraction = Fraction(0),
    strict: bool = False,
    declared: Iterable[OwnRow] = (),
    per_rank: bool = False,
) -> Verdict:
    """Return the verdict on a run.

    Args:
        run: The run.
        comparison: Its comparison with the expected calls.
        tolerance: Share of the expected payload of a cell by which the recorded payload may differ.
        strict: Whether only declared calls are the program's own.
        declared: Calls that were declared to be the program's own, and were left out of the comparison.
        per_rank: Whether each rank's losses are a sentence of their own.
    """
    steps = [_judge_step(step, tolerance, strict=strict) for step in comparison.compared]
    classes = [EqualRanks(ranks, comparison.steps, compared) for ranks, compared in comparison.ranks_by_comparison()]
    own, incomplete = [*declared], defaultdict[str, list[int]](list)
    for same in classes:
        for number, in_steps in same.steps_by_number().items():
            for calls in steps[number].own:
                times = len(in_steps)
                own += [(*_origin(calls), rank, calls.calls * times, calls.bytes * times) for rank in same.ranks]
            for cause in steps[number].incomplete:
                incomplete[f"{format_steps(in_steps.tolist())}: {cause}"] += same.ranks
    reasons = [f"rank {format_ranks(ranks)}, {reason}" for reason, ranks in merge_texts(incomplete).items()]
    return judge_run(
        classes,
        [step.judged for step in steps],
        [*_losses(run, per_rank=per_rank), *reasons, *_not_compared(comparison, run)],
        own=sum_own_calls(own),
    )


def check_by_rules(
    run: AnalysedRun, jobs: Sequence[Mapping[str, Any]] = (), own: Sequence[str] = (), **options: Any
) -> tuple[Verdict, RuleComparison]:
    """Compare a run with the calls that rules expect.

    Args:
        run: The run.
        jobs: Job rows in place of the captured ones; a pipeline has one per stage.
        own: Patterns of call sites whose calls are the program's own.
        **options: Options of `judge_by_rules`.
    """
    analysis = replace(ANALYSIS, reads_records=None) if jobs else ANALYSIS
    table = merged_table(run, analysis)
    is_own = _is_declared(table, own)
    steps = compared_steps(last_steps(table, len(run.processes)), run)
    comparison = compare_with_rules(table.loc[~is_own], run, jobs)
    declared = _own_rows(sums_in(table.loc[is_own], steps), run)
    return judge_by_rules(run, comparison, declared=declared, **options), comparison


def describe_losses(losses: Sequence[tuple[int, str]], *, per_rank: bool = False) -> list[str]:
    """Return a sentence per rank on what it lost; for many ranks, unless `per_rank`, a sentence per loss."""
    if per_rank or len(losses) <= MAX_SINGLE:
        return [f"rank {rank}: {loss}" for rank, loss in losses]
    by_loss: dict[str, list[int]] = {}
    for rank, loss in losses:
        by_loss.setdefault(loss, []).append(rank)
    return [f"rank {format_ranks(ranks)}: {loss}" for loss, ranks in merge_texts(by_loss).items()]


# ---- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RuledJudgement:
    judged: JudgedStep
    own: Sequence[EqualCalls]
    """The program's own calls."""
    incomplete: frozenset[str]
    """Causes of expected calls that may be missing from the log alone."""


def _judge_step(step: RuledStep, tolerance: Fraction, *, strict: bool) -> _RuledJudgement:
    compared = step.comparison
    most = max_calls(step.expected)
    unmatched: dict[CellKey, list[ExplainedCalls]] = defaultdict(list)
    for cause, calls in compared.explained:
        unmatched[calls.key.role, calls.key.op].append((cause, calls))
    own: list[EqualCalls] = []
    differing: list[ExplainedCalls] = []
    for cell in compared.cells:
        of_cell = unmatched[cell.key]
        is_short = any(calls.calls < 0 for _, calls in of_cell)
        program = [] if strict or is_short else [calls for _, calls in of_cell if _is_own(calls)]
        own += program
        rest = [(cause, calls) for cause, calls in of_cell if calls not in program]
        if not _agrees(cell, rest, tolerance, most.get(cell.key)):
            differing += rest
    incomplete = frozenset(cause for cause, _ in differing if compared.context.is_incomplete(cause))
    shown = [(cause, calls) for cause, calls in differing if cause not in incomplete]
    volume = compared.measured.volume
    own_volume = sum(calls.calls for calls in own), sum(calls.bytes for calls in own)
    volumes = compared.expected.volume, (volume[0] - own_volume[0], volume[1] - own_volume[1])
    return _RuledJudgement(JudgedStep(differences(compared, shown, ({}, {})), volumes), own, incomplete)


def _is_own(calls: EqualCalls) -> bool:
    return is_program_call(calls.site, calls.key.phase) or calls.key.role == "self"


def _agrees(cell: Cell, rest: Sequence[ExplainedCalls], tolerance: Fraction, most: int | None) -> bool:
    """Return whether a cell agrees.

    Args:
        cell: The cell.
        rest: Its unmatched calls that are not the program's own.
        tolerance: Share of the expected payload by which the recorded payload may differ.
        most: The most calls in any order of gradients and modules; None if their number is certain.
    """
    difference = sum(calls.bytes for _, calls in rest)
    if tolerance:
        missing_bytes = -sum(calls.bytes for _, calls in rest if calls.calls < 0)
        return abs(difference) <= tolerance * (cell.matched_bytes + missing_bytes)
    if rest and most is not None:
        measured_calls = cell.matched_calls + sum(calls.calls for _, calls in rest if calls.calls > 0)
        return difference == 0 and 0 < measured_calls <= most and all(cause == SPLIT_DIFFERENTLY for cause, _ in rest)
    return not rest


def _origin(calls: EqualCalls) -> tuple[str, str]:
    """Return call site and operation of an own call."""
    alone = " (in a group of one rank, sends nothing)" if calls.key.role == "self" else ""
    return f"{calls.site}{alone}", calls.key.op


# ---- declared calls --------------------------------------------------------------------------------------------------


def _is_declared(table: pd.DataFrame, patterns: Sequence[str]) -> Array:
    """Return which rows of the merged table are calls declared to be the program's own, bool, shape (n,)."""
    first, groups = group_rows([table[name].cat.codes.to_numpy() for name in ("phase", "site")])
    names = zip(table["phase"].iloc[first], table["site"].iloc[first], strict=True)
    own = [is_declared(patterns, str(phase), path_in_packages(str(site))) for phase, site in names]
    return np.array(own, bool)[groups]


def _own_rows(sums: pd.DataFrame, run: RecordedRun) -> Iterator[OwnRow]:
    for row in rows_of(sums):
        alone = " (in a group of one rank, sends nothing)" if row.role == "self" else ""
        rank = run.processes[int(row.process)].rank
        yield f"{row.site}{alone}", str(row.op), rank, int(row.calls), int(row.payload_bytes)


# ---- what was not compared -------------------------------------------------------------------------------------------


def _losses(run: RecordedRun, *, per_rank: bool) -> list[str]:
    problems = ((process.rank, (process.losses, process.summary_problem)) for process in run.processes)
    losses = [(rank, problem) for rank, of_rank in problems for problem in of_rank if problem]
    return describe_losses(losses, per_rank=per_rank)


def _not_compared(comparison: RuleComparison, run: RecordedRun) -> Iterator[str]:
    reasons: dict[str, list[int]] = defaultdict(list)
    for row in comparison.theory:
        if row.get("not_predicted") is not None:
            reasons[str(row["not_predicted"])].append(int(str(row["rank"])))
    for reason, of_reason in merge_texts(reasons).items():
        yield f"rank {format_ranks(of_reason)}: {reason}"
    # Ranks that a dry run left out are not missing.
    world_size = None if run.simulated else run.world_size
    if missing := format_missing([*run.ranks, *run.ranks_not_selected], world_size or 0):
        yield f"rank {missing} of {world_size}: no log"
    if not comparison.theory:
        yield "no process of the run left a log"
