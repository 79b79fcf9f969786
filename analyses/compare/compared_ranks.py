"""Comparison of the recorded calls of all ranks with the expected ones. Equal ranks and steps are compared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from commtrace.analyses.grouping import Array, group_rows

from .causes import StepContext
from .run_calls import RankCalls, RunCalls
from .step_differences import ComparedStep, compare_step
from .step_pairs import StepPairs


@dataclass(frozen=True, eq=False)
class EqualRanks:
    """Ranks whose steps are compared alike.

    Attributes:
        ranks: The ranks.
        pairs: Their compared steps.
        compared: Index into `Comparison.steps` for each of these steps, int64, shape (n,).
    """

    ranks: list[int]
    pairs: StepPairs
    compared: Array

    def steps_by_comparison(self) -> dict[int, Array]:
        """Return the numbers of the steps, ascending, for each index in `compared`."""
        order = np.argsort(self.compared, kind="stable")
        indices, begins = np.unique(self.compared[order], return_index=True)
        return dict(zip(indices.tolist(), np.split(self.pairs.steps[order], begins[1:]), strict=False))


class Comparison:
    """Comparison of the recorded calls of ranks with the expected ones.

    Attributes:
        runs: The expected and the recorded calls.
        steps: The distinct comparisons of steps.
    """

    def __init__(
        self, expected: RunCalls, measured: RunCalls, pair: Callable[[tuple[RankCalls, RankCalls]], StepPairs]
    ) -> None:
        """Create a comparison of ranks, whose steps are paired by the function `pair`."""
        self.runs = expected, measured
        self.steps: list[ComparedStep] = []
        self._pair = pair
        self._numbers: dict[tuple[int, ...], int] = {}
        self._ranks: dict[tuple[object, ...], EqualRanks] = {}

    @property
    def ranks(self) -> list[EqualRanks]:
        """The ranks that were added, and not removed from their `EqualRanks` since."""
        return [equal for equal in self._ranks.values() if equal.ranks]

    def add(self, rank: int, calls: tuple[RankCalls, RankCalls]) -> EqualRanks:
        """Add a rank with its expected and its recorded calls; return the ranks that are equal to it."""
        key = *calls[0].key, *calls[1].key
        if key not in self._ranks:
            pairs = self._pair(calls)
            self._ranks[key] = EqualRanks([], pairs, self._compare_steps(pairs))
        self._ranks[key].ranks.append(rank)
        return self._ranks[key]

    def _compare_steps(self, pairs: StepPairs) -> Array:
        """Return the index of the comparison of each pair, int64, shape (n,)."""
        columns = [*pairs.contents, *pairs.flags]
        first, groups = group_rows(columns)
        distinct = [*zip(*(column[first].tolist() for column in columns), strict=True)]
        return np.array([self._compare_once(*numbers) for numbers in distinct], np.int64)[groups]

    def _compare_once(self, expected: int, measured: int, *flags: bool) -> int:
        key = expected, measured, *flags
        if key not in self._numbers:
            context = StepContext(self.runs[0].contents[expected], measured > 0, *flags)
            self._numbers[key] = len(self.steps)
            self.steps.append(compare_step(self.runs[1].contents[measured], context))
        return self._numbers[key]
