"""Comparison of two runs call by call: what differs between the calls of their ranks and steps.

Equal calls are counted, and their order in each group is compared, so one inserted call does not
shift the others. Calls that moved are found by aligning the two sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from commtrace.formatting import format_plural, format_ranks

from .causes import StepContext
from .run_calls import RankCalls, RunCalls, StepComparisons
from .settings import compare_settings
from .step_comparison import NO_KEY, DifferenceRow, compare_step, differences
from .step_pairs import pair_steps
from .verdict import EqualRanks, JudgedStep, Verdict, judge_run, sentences_of_ranks, table_row


def compare_calls(a: RunCalls, b: RunCalls) -> Verdict:
    """Compare two runs."""
    comparison = _RunComparison(a, b)
    for rank in sorted({*a.ranks} & {*b.ranks}):
        comparison.add(rank, (a.ranks[rank], b.ranks[rank]))
    return comparison.verdict()


class _RunComparison:
    """Comparison of two runs. Ranks that are equal in both runs are compared once."""

    def __init__(self, a: RunCalls, b: RunCalls) -> None:
        self._runs = a, b
        self._lines = {**a.lines, **b.lines}
        self._steps = StepComparisons(self._compare)
        self._judged: list[JudgedStep] = []
        self._classes: dict[tuple[object, ...], tuple[EqualRanks, list[int]]] = {}
        self._reasons: dict[str, list[int]] = defaultdict(list)
        self._notes: dict[str, list[int]] = defaultdict(list)

    def add(self, rank: int, both: tuple[RankCalls, RankCalls]) -> None:
        """Add a rank that both runs have."""
        for run, calls in zip(self._runs, both, strict=True):
            for reason in filter(None, (calls.losses, calls.problem)):
                self._reasons[f"{run.name}: {reason}"].append(rank)
        if any(calls.lost_records or calls.problem for calls in both):
            return
        for run, calls in zip(self._runs, both, strict=True):
            if not calls.ended:
                text = "did not exit cleanly (killed, or still running); its last step is not compared"
                self._reasons[f"{run.name}: {text}"].append(rank)
        key = tuple((calls.first.tobytes(), calls.content.tobytes(), calls.ended) for calls in both)
        if key not in self._classes:
            pairs = pair_steps(self._runs, both)
            ranks: list[int] = []
            self._classes[key] = EqualRanks(ranks, pairs.steps, self._steps.compare(pairs.contents)), pairs.open_steps
        same, open_steps = self._classes[key]
        same.ranks.append(rank)
        if note := self._note(open_steps):
            self._notes[note].append(rank)

    def verdict(self) -> Verdict:
        """Return the verdict on the added ranks."""
        a, b = self._runs
        rank_rows = [*self._missing_ranks()]
        classes = [same for same, _ in self._classes.values()]
        compared = [rank for same in classes for rank in same.ranks]
        return judge_run(
            classes,
            self._judged,
            sentences_of_ranks(self._reasons, compared),
            rank_rows,
            notes=tuple(sentences_of_ranks(self._notes, compared)),
            settings=compare_settings(a.facts, b.facts),
            own=b.own,
        )

    def _compare(self, content_a: int, content_b: int) -> int:
        """Compare steps with these indices into `RunCalls.contents`, and return the number of the comparison."""
        a, b = self._runs
        expected, measured = a.contents[content_a], b.contents[content_b]
        found = []
        if expected != measured:
            step = compare_step(measured, StepContext(expected), self._lines)
            found = differences(step, step.explained, (a.lines, b.lines))
        self._judged.append(JudgedStep(found, (expected.volume, measured.volume)))
        return len(self._judged) - 1

    def _note(self, open_steps: Sequence[int]) -> str:
        """Return a note on the steps that only one of the runs has."""
        a, b = self._runs
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

    def _missing_ranks(self) -> Iterator[tuple[Any, ...]]:
        """Yield a row for the ranks that only one run has; those that a dry run did not run become a note."""
        a, b = self._runs
        for run, other, is_a in ((a, b, True), (b, a, False)):
            only = sorted({*run.ranks} - {*other.ranks})
            if only and other.partial:
                self._notes[f"not in {other.name}, a dry run of other ranks; not compared"] = only
            elif only:
                calls, size = (sum(numbers) for numbers in zip(*(run.volume(rank) for rank in only), strict=True))
                calls_a, calls_b = (calls, 0) if is_a else (0, calls)
                row = DifferenceRow("rank", NO_KEY, calls_a, calls_b, difference_bytes=-size if is_a else size)
                yield table_row(row, format_ranks(only), "-")
