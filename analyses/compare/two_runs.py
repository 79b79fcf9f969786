"""Comparison of two runs call by call: what differs between the calls of their ranks and steps.

Equal calls are counted, and their order in each group is compared, so one inserted call does not
shift the others. Calls that moved are found by aligning the two sequences.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from commtrace.formatting import format_plural
from commtrace.rank_ranges import format_ranks
from commtrace.reading.recorded_run import RecordedRun
from commtrace.statements import Statement

from .compared_ranks import Comparison
from .recorded_calls import read_calls
from .run_calls import RunCalls
from .setting_differences import compare_settings
from .step_differences import NO_KEY, DifferenceRow
from .step_pairs import pair_steps
from .verdict import Verdict, judge, sentences_of_ranks, table_row

ROUTED_NOTE: Final = (
    "a dry run, whose results of calls are not real, routes other numbers of tokens to experts: "
    "of calls with tokens of experts, sizes are not compared"
)


def compare_logs(accepted: RecordedRun, recorded: RecordedRun, own: Sequence[str], name: str) -> Verdict:
    """Compare a run with an earlier one or a dry run, called `name` in texts.

    In a dry run, sizes that follow the routing of tokens may differ.
    """

    def compare(*, with_routing: bool) -> Verdict:
        expected, measured = (read_calls(run, own, with_routing=with_routing) for run in (accepted, recorded))
        return compare_calls(replace(expected, name=name), measured)

    verdict = compare(with_routing=True)
    if verdict.equal or not accepted.simulated or "expert" not in recorded.labels.distinct("role"):
        return verdict
    without = compare(with_routing=False)
    if without.table.equals(verdict.table):
        return verdict
    return replace(without, notes=(*without.notes, ROUTED_NOTE))


def compare_calls(a: RunCalls, b: RunCalls) -> Verdict:
    """Compare two runs: each rank with that of the same number. A rank that only one of them has is a difference."""
    comparison = Comparison(a, b, functools.partial(pair_steps, (a, b)))
    reasons: dict[str, list[int]] = defaultdict(list)
    notes: dict[str, list[int]] = defaultdict(list)
    for rank in sorted({*a.ranks} & {*b.ranks}):
        both = [(run.name, run.ranks[rank]) for run in (a, b)]
        for name, calls in both:
            for reason in filter(None, (calls.losses, calls.problem)):
                reasons[Statement.joined(": ", (name, reason))].append(rank)
        if any(calls.lost_records or calls.problem for _, calls in both):
            continue
        for name in (name for name, calls in both if not calls.ended):
            text = "did not run to its end (failed, killed, or still running); its last step is not compared"
            reasons[f"{name}: {text}"].append(rank)
        equal_ranks = comparison.add(rank, (a.ranks[rank], b.ranks[rank]))
        if note := _note(a, b, equal_ranks.pairs.open_steps):
            notes[note].append(rank)
    rank_rows = [*_missing_ranks(a, b, notes)]
    compared = [rank for equal in comparison.ranks for rank in equal.ranks]
    return judge(
        comparison,
        sentences_of_ranks(reasons, compared),
        rank_rows=rank_rows,
        notes=tuple(sentences_of_ranks(notes, compared)),
        settings=compare_settings(a, b),
    )


def _note(a: RunCalls, b: RunCalls, open_steps: Sequence[int]) -> str:
    """Return a note on the steps that only one of the runs has; "" if there are none."""
    if a.step_ranges or b.step_ranges:
        without = f", without step {open_steps[0]}, the last one of a run" if open_steps else ""
        return f"only steps that COMMTRACE_STEPS selected in both runs are compared{without}"
    if a.last_step == b.last_step:
        return ""
    more, less = (a, b) if a.last_step > b.last_step else (b, a)
    text = f"{more.name} has {format_plural(more.last_step + 1, 'step')}, {less.name} {less.last_step + 1}"
    if open_steps:
        return f"{text}; step {format_ranks(open_steps)} could not be compared: {less.name} has no repeating step"
    return f"{text}; the further steps are compared with these"


def _missing_ranks(a: RunCalls, b: RunCalls, notes: dict[str, list[int]]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for the ranks that only one run has; those that a dry run did not run become a note."""
    for run, other, is_a in ((a, b, True), (b, a, False)):
        only = sorted({*run.ranks} - {*other.ranks})
        if only and other.partial:
            notes[f"not in {other.name}, a dry run of other ranks; not compared"] = only
        elif only:
            calls, size = (sum(numbers) for numbers in zip(*(run.volume(rank) for rank in only), strict=True))
            calls_a, calls_b = (calls, 0) if is_a else (0, calls)
            row = DifferenceRow("rank", NO_KEY, calls_a, calls_b, difference_bytes=-size if is_a else size)
            yield table_row(row, format_ranks(only), "-")
