"""Stragglers: which rank the others wait for, and where its delay began.

A delay is computation beyond the median of the other ranks in the same step. Waiting does not
count, so a rank that only passes on the delay of another has none. Significant delays lie on the
steps' critical paths, where they make the job longer. They occur

    in every step    if the median over the steps is at least MIN_SHARE of a step and
                     MIN_DEVIATIONS spreads
    in some steps    if the part above that median is at least MIN_SHARE_ONCE of a step,
                     MIN_DEVIATIONS spreads, and MIN_RATIO times the largest delays of any other
                     rank, over the same number of steps

The spread is 1.4826 times the median absolute deviation: the standard deviation of a normal
distribution. The phase of a delay is the one with the most additional computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array, group_rows, rows_of
from commtrace.analyses.robust_deviation import robust_deviation
from commtrace.rank_ranges import format_ranks

from .critical_paths import StepPaths
from .step_time_specs import DELAYS, STRAGGLERS

MIN_SHARE: Final = 0.05
MIN_SHARE_ONCE: Final = 0.2
MIN_DEVIATIONS: Final = 5
MIN_RATIO: Final = 3
MIN_ON_PATH: Final = 0.25
"""Minimum part of a significant delay that lies on the critical paths."""
MAX_WALKS: Final = 400
"""Number of waits whose origin is searched for: the longest ones."""


class _Delay(NamedTuple):
    """A significant delay of a rank (row): `excess` in each step `at` of `StepPaths.steps`."""

    row: int
    every_step: bool
    at: Array
    excess: Array


@dataclass(frozen=True, eq=False)
class Computation:
    """Computation of all ranks, in total or between the same two phases.

    Attributes:
        phase: The phases: "backward", "forward to backward", "begin of step to forward"; "": in total.
        ns: Computation of each rank in each step, float64, shape (processes, steps).
        on_path: The part of it on the step's critical path.
    """

    phase: str
    ns: Array
    on_path: Array

    @cached_property
    def excess(self) -> Array:
        """How much longer each rank computed than the median of the others, shape (processes, steps)."""
        others = len(self.ns) - 1
        if not others:
            return np.asarray(self.ns - np.median(self.ns))
        order = np.argsort(self.ns, axis=0)
        place, ordered = np.argsort(order, axis=0), np.take_along_axis(self.ns, order, axis=0)
        # The n-th of the others is the n-th of all if the rank itself is after it, else the next.
        middle = [np.where(n < place, ordered[n], ordered[n + 1]) for n in ((others - 1) // 2, others // 2)]
        return np.asarray(self.ns - (middle[0] + middle[1]) / 2)


def computation(paths: StepPaths) -> list[Computation]:
    """Return the computation of all ranks, by the phases before and after it."""
    gaps, calls = paths.gaps, paths.calls
    step_after = calls["step"][gaps.after]
    step = np.searchsorted(paths.steps, step_after)
    within = paths.steps[np.minimum(step, len(paths.steps) - 1)] == step_after
    starts = calls["step"][gaps.before] != step_after
    before = np.where(starts, -1, calls["phase"][gaps.before])
    at = np.flatnonzero(within)
    first, pairs = group_rows([before[at], calls["phase"][gaps.after[at]]])
    rows = np.searchsorted(paths.processes, gaps.process[at])
    shape = len(paths.processes), len(paths.steps)
    result = []
    for pair, example in enumerate(at[first].tolist()):
        own = at[pairs == pair]
        cells = np.ravel_multi_index((rows[pairs == pair], step[own]), shape)
        ns, path_ns = (
            np.bincount(cells, weights, shape[0] * shape[1]).reshape(shape)
            for weights in (gaps.end[own] - gaps.begin[own], paths.on_path[own])
        )
        result.append(Computation(_phases(paths, example), ns, path_ns))
    return result


def _phases(paths: StepPaths, gap: int) -> str:
    names = paths.calls.text("phase", np.array([paths.gaps.before[gap], paths.gaps.after[gap]]))
    before, after = str(names[0]), str(names[1])
    step = paths.calls["step"]
    if step[paths.gaps.before[gap]] != step[paths.gaps.after[gap]]:
        return f"begin of step to {after}"
    return after if before == after else f"{before} to {after}"


def total_computation(paths: StepPaths, parts: list[Computation]) -> Computation:
    """Return the computation of all ranks, between any phases."""
    shape = 2, len(paths.processes), len(paths.steps)
    sums = sum((np.array([part.ns, part.on_path]) for part in parts), np.zeros(shape))
    return Computation("", *sums)


def delays(run: AnalysedRun, paths: StepPaths, parts: list[Computation]) -> pd.DataFrame:
    """Return the table `delays`: significant delays, the largest first. A job of one rank delays nobody."""
    step_ns, ranks = paths.step_ns(), [*_ranks(run, paths).values()]
    total = total_computation(paths, parts)
    rows = []
    for delay in _significant(total.excess, float(np.median(step_ns))) if len(ranks) > 1 else ():
        on_path = np.minimum(delay.excess, total.on_path[delay.row, delay.at]).clip(min=0)
        if on_path.sum() >= MIN_ON_PATH * delay.excess.sum():
            longest = max(parts, key=lambda part: _rise(part.excess[delay.row], delay))
            rows.append(
                {
                    "rank": ranks[delay.row],
                    "phase": longest.phase,
                    "recurrence": "every step" if delay.every_step else _recurrence(paths.steps[delay.at]),
                    "steps": format_ranks(paths.steps[delay.at].tolist()),
                    "delayed_steps": len(delay.at),
                    "delay_ns": float(np.median(delay.excess)),
                    "on_path_ns": float(on_path.mean()),
                    "share": float(np.median(delay.excess / step_ns[delay.at])),
                }
            )
    table = pd.DataFrame(rows, columns=DELAYS.column_names)
    return table.sort_values("delay_ns", ascending=False, kind="stable", ignore_index=True)


def _rise(excess: Array, delay: _Delay) -> float:
    """Return by how much the excess of one phase, shape (steps,), is larger in the delayed steps than in the others."""
    others = np.delete(excess, delay.at)
    return float(np.median(excess[delay.at]) - (np.median(others) if len(others) else 0))


def _significant(excess: Array, step_ns: float) -> Iterator[_Delay]:
    median = np.median(excess, axis=1, keepdims=True)
    rest = excess - median
    spread = robust_deviation(excess)
    ordered = np.sort(rest, axis=1)
    for row in range(len(excess)):
        if median[row, 0] >= max(MIN_SHARE * step_ns, MIN_DEVIATIONS * spread[row]):
            yield _Delay(row, True, np.arange(excess.shape[1]), excess[row])
        at = np.flatnonzero(rest[row] >= max(MIN_SHARE_ONCE * step_ns, MIN_DEVIATIONS * spread[row]))
        if not len(at):
            continue
        # On a busy machine, any rank is late at times: compare with the largest delays elsewhere.
        others = np.delete(ordered[:, -len(at)], row)
        largest_elsewhere = max(others.max(initial=0), np.delete(rest[row], at).max(initial=0))
        if float(np.median(rest[row, at])) >= MIN_RATIO * largest_elsewhere:
            yield _Delay(row, False, at, rest[row, at])


def _recurrence(steps: Array) -> str:
    """Return how often a delay recurs: "once", "every 10 steps" or "irregular"."""
    distances = np.diff(steps)
    if not len(distances):
        return "once"
    return f"every {distances[0]} steps" if len(distances) > 1 and (distances == distances[0]).all() else "irregular"


def _ranks(run: AnalysedRun, paths: StepPaths) -> dict[int, int]:
    """Return the rank of each process of the paths, by its index in the log."""
    return {process: run.processes[process].rank for process in paths.processes.tolist()}


def delay_by_rank_and_step(run: AnalysedRun, paths: StepPaths, parts: list[Computation]) -> pd.DataFrame:
    """Return the table `delay_by_rank_and_step`: the excess of each rank, over all phases."""
    delay = np.rint(total_computation(paths, parts).excess).astype(np.int64)
    ranks = [*_ranks(run, paths).values()]
    steps = np.tile(paths.steps, len(ranks))
    return pd.DataFrame({"rank": np.repeat(ranks, len(paths.steps)), "step": steps, "delay_ns": delay.ravel()})


def stragglers(run: AnalysedRun, paths: StepPaths, parts: list[Computation]) -> pd.DataFrame:
    """Return the table `stragglers`: a row per rank."""
    waits, ranks = _waits(paths), _ranks(run, paths)
    all_steps_ns = float(paths.step_ns().sum())
    origins = _origins(paths, parts, waits)
    owners = waits.groupby("owner").agg(caused=("ns", "sum"), last=("instance", "nunique"))
    waited = waits["process"].value_counts()
    rows = []
    for process, caused, last in owners.reindex(paths.processes, fill_value=0).itertuples():
        by_origin = origins.get(process, Counter())
        looked_at = by_origin.total()
        passed = {origin: ns for origin, ns in by_origin.items() if origin >= 0 and origin != process}
        rows.append(
            {
                "rank": ranks[process],
                "operations": int(waited.get(process, 0) + last),
                "last": int(last),
                "waiting_ns": caused / len(paths.steps),
                "waiting_share": caused / (len(ranks) * all_steps_ns),
                "own_share": by_origin[process] / looked_at if looked_at else np.nan,
                "passed_on_share": sum(passed.values()) / looked_at if looked_at else np.nan,
                "passed_on_from": format_ranks(ranks[origin] for origin in passed),
            }
        )
    return pd.DataFrame(rows, columns=STRAGGLERS.column_names)


def _waits(paths: StepPaths) -> pd.DataFrame:
    """Return the waits of processes for each other within the steps, of calls that were matched on all ranks.

    Returns:
        A row per wait: `process`, `owner` (the process it waited for), `instance`, `release` (when
        its wait was over), `ns`.
    """
    begin, end = int(paths.ends[:, 0].min()), int(paths.ends[:, -1].max())
    tables = []
    for process, line in paths.blocked.timelines.items():
        first, release = line.waiting.T
        at = np.flatnonzero((release > first) & (line.last_process != process))
        at = at[(line.begin[at] >= begin) & (line.end[at] <= end)]
        tables.append(
            pd.DataFrame(
                {
                    "process": process,
                    "owner": line.last_process[at],
                    "instance": paths.calls["instance"][line.call[at]],
                    "release": release[at],
                    "ns": (release - first)[at],
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


def _origins(paths: StepPaths, parts: list[Computation], waits: pd.DataFrame) -> dict[int, Counter[int]]:
    """Return the origins of the longest waits: ns by awaited process and by origin (-1: unclear).

    The origin is the computation with the largest excess over other ranks on the path from the
    awaited call back to the begin of its step, if the excess is at least half of the wait.
    """
    excess = {part.phase: part.excess for part in parts}
    row_of = {process: row for row, process in enumerate(paths.processes.tolist())}
    origins: dict[int, Counter[int]] = {}
    starts = paths.ends.max(axis=0)
    for wait in rows_of(waits.nlargest(MAX_WALKS, "ns")):
        step = int(np.searchsorted(starts, wait.release, side="right")) - 1
        if not 0 <= step < len(paths.steps):
            continue
        begin = int(paths.ends[:, step].min())
        amounts: Counter[tuple[int, str]] = Counter()
        for piece in paths.walk(int(wait.owner), int(wait.release), begin):
            if piece.gap >= 0:
                amounts[piece.process, _phases(paths, piece.gap)] += piece.end - piece.begin
        candidates = [(0.0, -1)] + [
            (min(ns, excess[phase][row_of[process], step]), process)
            for (process, phase), ns in amounts.items()
            if phase in excess
        ]
        delay, origin = max(candidates)
        origin = origin if delay >= wait.ns / 2 else -1
        origins.setdefault(int(wait.owner), Counter())[origin] += int(wait.ns)
    return origins
