"""Verdict on a run by the calls that rules expect, and what could not be compared with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import merged_table
from commtrace.formatting import MAX_SINGLE
from commtrace.rank_ranges import format_missing
from commtrace.reading.recorded_run import RecordedRun
from commtrace.statements import RankList, Statement, merge_texts

from .rules_analysis import ANALYSIS, compare_with_rules
from .rules_tables import RuleComparison
from .verdict import Verdict, judge, of_ranks


def check_by_rules(
    run: AnalysedRun,
    jobs: Sequence[Mapping[str, Any]] = (),
    own: Sequence[str] = (),
    *,
    strict: bool = False,
    tolerance: Fraction = Fraction(0),
    per_rank: bool = False,
) -> tuple[Verdict, RuleComparison]:
    """Compare a run with the calls that rules expect.

    Args:
        run: The run.
        jobs: Job rows in place of the captured ones; a pipeline has one per stage.
        own: Patterns of call sites whose calls are the program's own.
        strict: Whether only these are the program's own.
        tolerance: Share of the expected payload of a cell by which the recorded payload may differ.
        per_rank: Whether each rank's losses are a sentence of their own.
    """
    table = merged_table(run, replace(ANALYSIS, reads_records=None) if jobs else ANALYSIS)
    rules = compare_with_rules(table, run, jobs, own)
    problems = ((process.rank, (process.losses, process.summary_problem)) for process in run.processes)
    losses = [(rank, problem) for rank, of_rank in problems for problem in of_rank if problem]
    not_compared = [*describe_losses(losses, per_rank=per_rank), *_not_compared(rules, run)]
    return judge(rules.comparison, not_compared, strict=strict, tolerance=tolerance), rules


def describe_losses(losses: Sequence[tuple[int, str]], *, per_rank: bool = False) -> list[str]:
    """Return a sentence per rank on what it lost; for many ranks, unless `per_rank`, a sentence per loss."""
    if per_rank or len(losses) <= MAX_SINGLE:
        return [of_ranks([rank], loss) for rank, loss in losses]
    by_loss: dict[str, list[int]] = {}
    for rank, loss in losses:
        by_loss.setdefault(loss, []).append(rank)
    return [of_ranks(ranks, loss) for loss, ranks in merge_texts(by_loss).items()]


def _not_compared(rules: RuleComparison, run: RecordedRun) -> Iterator[str]:
    reasons: dict[str, list[int]] = defaultdict(list)
    for row in rules.theory:
        if isinstance(reason := row.get("not_predicted"), str):
            reasons[reason].append(int(str(row["rank"])))
    for reason, of_reason in merge_texts(reasons).items():
        yield of_ranks(of_reason, reason)
    # Ranks that a dry run left out are not missing.
    world_size = None if run.simulated else run.world_size
    if missing := format_missing([*run.ranks, *run.ranks_not_selected], world_size or 0):
        yield Statement("rank {} of {}: no log", RankList(missing), world_size or 0)
    if not rules.theory:
        yield "no process of the run left a log"
