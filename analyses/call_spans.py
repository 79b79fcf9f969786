"""Calls as spans of time for the exports to viewers: times of all ranks on one clock, tracks without overlaps, runs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from commtrace.analyses.across_ranks.clocks import Clocks, to_one_clock, wall_clock_offsets
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array
from commtrace.errors import LogError
from commtrace.rank_ranges import format_ranks
from commtrace.schema import Fields


class AlignedTimes:
    """Times of calls in ns since the first of them, each of shape (calls,); -1: not known.

    Args:
        run: The run.
        calls: Its calls, or some of them.
        clocks: The clocks of its hosts.

    Attributes:
        known: Whether the times of each call are known, bool.
        first_ns: When the first call began on the clock of all processes.
        first_unix_ns: The same in ns since 1970; 0: not known.
        begin: When each call was entered.
        started: When it became active: its begin, on a device its start.
        returned: When it returned; of a call that never did, the last timestamp of its process.
        end: When its operation had ended.
        wait: When the program began to wait for it.
    """

    def __init__(self, run: AnalysedRun, calls: Fields, clocks: Clocks) -> None:
        process = calls["process"]
        times, known = to_one_clock(run, clocks, process, calls["t_begin"])
        self.known, shift = known & (calls["t_begin"] > 0), times - calls["t_begin"]
        at = np.flatnonzero(self.known)
        self.first_ns = self.first_unix_ns = 0
        if len(at):
            earliest = at[times[at].argmin()]
            self.first_ns, offset = int(times[earliest]), wall_clock_offsets(run).get(int(process[earliest]))
            self.first_unix_ns = 0 if offset is None else int(calls["t_begin"][earliest]) + offset
        self.begin, self.returned, self.end, self.wait, start = (
            np.where(calls[name] > 0, calls[name] + shift - self.first_ns, -1)
            for name in ("t_begin", "t_return", "t_end", "t_wait", "t_start")
        )
        self.started = np.maximum(self.begin, start)
        last = np.zeros(len(run.processes), np.int64)
        np.maximum.at(last, process, np.maximum.reduce([self.begin, self.returned, self.end]))
        self.returned = np.where(self.returned >= self.begin, self.returned, last[process])


def changes(values: Array) -> Array:
    """Return whether each value differs from the one before, bool, shape (n,); the first does."""
    return np.concatenate([[True], values[1:] != values[:-1]]) if len(values) else np.zeros(0, bool)


def ends_of_runs(new: Array, end: Array) -> Array:
    """Return for each position the latest `end` of its run. A run begins where `new` is true."""
    firsts = np.flatnonzero(new)
    return np.repeat(np.maximum.reduceat(end, firsts), np.diff(np.append(firsts, len(end)))) if len(end) else end


def lanes(at: Array, begin: Array, end: Array) -> list[Array]:
    """Distribute calls, ordered by begin, to tracks without overlaps: each call goes to the first free track."""
    lane_of = np.zeros(len(at), np.int64)
    overlaps_earlier = np.append(False, begin[1:] < np.maximum.accumulate(end)[:-1])
    overlapping = np.flatnonzero(overlaps_earlier | np.append(overlaps_earlier[1:], False))
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for i, first, last in zip(
        *(values.tolist() for values in (overlapping, begin[overlapping], end[overlapping])), strict=True
    ):
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane_of[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, int(lane_of[i])))
    return [at[lane_of == lane] for lane in range(int(lane_of.max(initial=-1)) + 1)]


def common_clocks(run: AnalysedRun, ranks: Sequence[int] | None) -> Clocks:
    """Return the clocks of a run, without bounds if those of some host with these ranks are not useful.

    Times of single processes are then on one clock, the hosts' wall clock, as those of all processes are.
    """
    chosen = np.flatnonzero([ranks is None or process.rank in ranks for process in run.processes])
    if run.clocks.to_reference(chosen, np.zeros(len(chosen), np.int64)) is not None:
        return run.clocks
    return replace(run.clocks, aligned=[None] * len(run.clocks.hosts))


def require_times(run: AnalysedRun) -> None:
    """Raise LogError if a run has no single calls with times: a dry run, or a summary."""
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; export a recorded run")
    run.require_times("an export of single calls")


def no_calls(run: AnalysedRun) -> LogError:
    """Return the error that no call of a run is selected."""
    return LogError(f"{run.log.path}: no call of these ranks and steps; the run has ranks {format_ranks(run.ranks)}")
