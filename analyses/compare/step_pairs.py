"""Which steps of two runs are compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.rank_ranges import select_steps

from .run_calls import START_UP, RankCalls, RunCalls


class StepPairs(NamedTuple):
    """Steps of a rank in two runs.

    Attributes:
        steps: Numbers of the compared steps, in the run that has more of them, int64, shape (n,).
        contents: Index into `RunCalls.contents` of each run for each step, int64, shape (n,).
        open_steps: The steps of the longer run without a counterpart.
        flags: Further attributes of `StepContext` for each step, in their order, bool, shape (n,).
    """

    steps: Array
    contents: tuple[Array, Array]
    open_steps: list[int]
    flags: Sequence[Array] = ()


def pair_steps(runs: tuple[RunCalls, RunCalls], ranks: tuple[RankCalls, RankCalls]) -> StepPairs:
    """Return the steps of a rank to compare.

    Steps with equal numbers are compared. The last step of a program also has what it communicates
    at its end: if one run has more steps, the last steps of both are compared, and a further step
    must equal a step of the other run. If it does not, it is compared with the other's last step
    but one, if that equals the step before it. If one of the runs recorded selected steps, only
    steps in both selections are compared, without the last step of the shorter run if its selection
    has further ones: it may be the last step of its program.
    """
    last_a, last_b = (run.last_step for run in runs)
    if last_a < last_b:
        swapped = pair_steps(runs[::-1], ranks[::-1])
        return swapped._replace(contents=swapped.contents[::-1])
    end = min([last_a, *(rank.last_complete_step for rank in ranks if not rank.ended)])
    selections = [run.step_ranges for run in runs]
    if any(selections):
        compares_last = last_a == last_b or not select_steps(np.array([last_b + 1]), selections[1]).all()
        steps = np.arange(START_UP, min(last_b + 1 if compares_last else max(last_b, 0), end + 1))
        for ranges in selections:
            steps = steps[select_steps(steps, ranges)]
        return StepPairs(steps, (ranks[0].at(steps), ranks[1].at(steps)), [] if compares_last else [last_b])
    first_further = max(last_b, 0) if last_a > last_b else end + 1
    steps = np.arange(START_UP, end + 1)
    a, b = ranks[0].at(steps), ranks[1].at(steps)
    is_further = steps >= first_further
    b[is_further] = _counterparts(a[is_further], runs, ranks[1])
    if last_b > 0:
        b[is_further & (steps == last_a)] = ranks[1].at(np.array([last_b]))
    is_open = b < 0
    return StepPairs(steps[~is_open], (a[~is_open], b[~is_open]), steps[is_open].tolist())


def _counterparts(further: Array, runs: tuple[RunCalls, RunCalls], shorter: RankCalls) -> Array:
    """Return the content of the shorter run to compare with each further step of the longer one; -1 without one."""
    a, b = runs
    known_steps = shorter.at(np.arange(int(b.last_step > 0), b.last_step + 1))
    known = {b.contents[content].digest: content for content in known_steps[_changes(known_steps)].tolist()}
    default = -1
    if b.last_step > 1:
        before_last = [b.contents[content].digest for content in shorter.at(b.last_step - np.array([1, 2])).tolist()]
        if before_last[0] == before_last[1]:
            default = int(shorter.at(np.array([b.last_step - 1]))[0])
    distinct, at = np.unique(further, return_inverse=True)
    found = [known.get(a.contents[content].digest, default) for content in distinct.tolist()]
    return np.array(found, np.int64)[at]


def _changes(contents: Array) -> Array:
    """Return the positions at which a content differs from the one before."""
    return np.flatnonzero(np.diff(contents, prepend=-1))
