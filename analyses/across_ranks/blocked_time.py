"""Blocked time: when calls blocked each process, and which part of that was waiting for other ranks.

A call blocks its rank while the program is inside it, and in a wait for its end. Waits in C++ are not recorded (DDP's
waits for gradients): an operation without an observed wait that ends between the last call of its phase and the first
one of the next phase or step counts as waited for from that last call on. Gradients that are reduced in C++ have ended
when that next one begins: on a busy machine, the thread that observes their ends runs later than the one that waited
for them. If calls overlap, because the rank has several threads, each counts from the end of those that began before
it. The time until a call's release (`call_times`) is waiting, if it blocks the rank until its end: a call that returns
before its operation ends is not waiting for other ranks, only the later wait for it is.

A step of a rank begins when the last call of its previous step stops blocking it, and ends when its own last call
does; computation before the first call of a step belongs to that step. A step is measured if all ranks recorded it and
the step before it, and at least one later step: the first step has no known begin, and the last one may not be over.

Times are ns on the clock of the reference host if the clocks are bounded well enough (`Clocks.are_useful`), else on
each host's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.durations import has_own_times, wait_begin
from commtrace.schema import Clock, Purpose

from .call_times import CallTimes
from .clocks import Clocks
from .dependencies import SOURCE, TARGET, UNCERTAIN
from .matching import MatchedCalls

FIELDS: Final = ("t_begin", "t_return", "t_wait", "t_end", "step", "phase", "clock", "flags", "purpose")
"""Columns (`match_calls`) that `BlockedTime.of` needs."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Intervals in which calls blocked a process, by begin. Those of several threads may overlap.

    Attributes:
        begin: Begin of each interval, ns, shape (intervals,).
        end: Its end, ns.
        call: The call that blocked the process, as an index into the matched calls.
        release: When the call was released, ns; -1 if it did not block until its end, or if that is not known.
        last_process: The process that released it, -1 likewise.
        is_known: Whether it is known which part of the interval is waiting, bool.
    """

    begin: Array
    end: Array
    call: Array
    release: Array
    last_process: Array
    is_known: Array

    @cached_property
    def latest(self) -> Array:
        """Index of the interval with the latest end, among each interval and those before it."""
        reach = np.maximum.accumulate(self.end)
        return np.maximum.accumulate(np.where(self.end == reach, np.arange(len(reach)), 0))

    @cached_property
    def gaps(self) -> Array:
        """Indices of the intervals before which no call blocked the process, except the first."""
        return np.flatnonzero(self.begin[1:] > self.end[self.latest[:-1]]) + 1

    @cached_property
    def blocked(self) -> Array:
        """The part of each interval in which no call that began earlier blocked the process, shape (intervals, 2)."""
        first = self.begin.copy()
        first[1:] = np.maximum(first[1:], self.end[self.latest[:-1]])
        return np.stack([first, np.maximum(self.end, first)], axis=1)

    @cached_property
    def waiting(self) -> Array:
        """The part of each of `blocked` before the release of its call, shape (intervals, 2)."""
        first, last = self.blocked.T
        return np.stack([first, np.clip(self.release, first, last)], axis=1)


@dataclass(frozen=True, eq=False)
class BlockedTime:
    """Blocked time of all processes.

    Attributes:
        calls: The calls, with the columns FIELDS and `call_times.COLUMNS`.
        call_times: Their times.
        times: `t_begin`, `t_return`, `t_wait`, `t_end`, `arrival` and `release` of the calls on one clock, ns, shape
            (calls,); 0, `release` -1, where not known. `t_end` of gradients is at most when the next phase began.
        timelines: The timeline of each process that has calls with times, by its index in the log, ascending.
    """

    calls: MatchedCalls
    call_times: CallTimes
    times: Mapping[str, Array]
    timelines: dict[int, Timeline] = field(repr=False)

    @staticmethod
    def of(calls: MatchedCalls, clocks: Clocks) -> BlockedTime:
        """Return the blocked time of processes from their calls with the columns FIELDS and `call_times.COLUMNS`."""
        call_times = CallTimes.of(calls, clocks)
        readings = {name: calls[name] for name in ("t_begin", "t_return", "t_wait", "t_end", "arrival")}
        times = {name: _on_one_clock(clocks, calls, reading) for name, reading in readings.items()}
        times["release"] = _on_one_clock(clocks, calls, call_times.release, unknown=-1)
        next_phase = _next_phases(calls, times["t_begin"])
        gradients = _unobserved(calls) & calls.has_label("purpose", Purpose.GRADIENTS.value) & (next_phase > 0)
        latest = np.where(gradients, np.maximum(next_phase, times["t_return"]), times["t_end"])
        times["t_end"] = np.minimum(times["t_end"], latest)
        return BlockedTime(calls, call_times, times, _timelines(calls, call_times, times, next_phase))

    @cached_property
    def processes(self) -> Array:
        """Indices in the log of the processes that have a timeline, ascending."""
        return np.array([*self.timelines], np.int64)

    def of_calls(self) -> dict[str, Array]:
        """Return `blocked_ns` and `waiting_ns` of each call, float64, shape (calls,); `waiting_ns` NaN if not known."""
        sums = {name: np.zeros(len(self.calls)) for name in ("blocked_ns", "waiting_ns")}
        for line in self.timelines.values():
            for name, intervals in (("blocked_ns", line.blocked), ("waiting_ns", line.waiting)):
                ns = intervals[:, 1] - intervals[:, 0]
                np.add.at(sums[name], line.call, ns if name == "blocked_ns" else np.where(line.is_known, ns, np.nan))
        return sums

    def wait_begins(self) -> Array:
        """Return when the program begins to wait for each call, ns, shape (calls,): for some, inside of the call.

        A wait that is not observed begins after the last call of its phase (module docstring).
        """
        times, calls = self.times, self.calls
        order, changes, phase = _phases(calls, times["t_begin"])
        last = np.zeros(len(changes) + 1, np.int64)
        np.maximum.at(last, phase, times["t_return"][order])
        after_phase = times["t_return"].copy()
        after_phase[order] = last[phase]
        waits = np.where(_unobserved(calls), after_phase, times["t_return"])
        return np.where(times["t_wait"] > 0, times["t_wait"], waits)

    def step_ends(self, steps: Array) -> Array:
        """Return when each process ended each of `steps`, ascending, ns, shape (processes, steps)."""
        ends = np.zeros((len(self.timelines), len(steps)), np.int64)
        for row, line in enumerate(self.timelines.values()):
            step = self.calls["step"][line.call]
            at = np.searchsorted(steps, step)
            is_one = steps[np.minimum(at, len(steps) - 1)] == step
            np.maximum.at(ends[row], at[is_one], line.end[is_one])
            ends[row] = np.maximum.accumulate(ends[row])
        return ends


class StepsOfProcesses(NamedTuple):
    """The steps that processes recorded, a row per process and step, each of shape (rows,)."""

    process: Array
    step: Array
    evaluates: Array
    """Whether the records of the step have an evaluation, bool."""


def measured_steps(recorded: StepsOfProcesses, processes: int) -> tuple[Array, Array]:
    """Return the steps that are measured, ascending, and whether each is regular, both of shape (steps,).

    A step is irregular if its records or those of the step before it have an evaluation.

    Args:
        recorded: The recorded steps.
        processes: Number of processes of the run.
    """
    steps, index, sizes = np.unique(recorded.step, return_inverse=True, return_counts=True)
    evaluates = np.bincount(index, recorded.evaluates, len(steps)) > 0
    common = steps[(sizes == processes) & (steps >= 0)]
    measured = common[:-1][np.isin(common[:-1] - 1, common)]
    irregular = steps[evaluates]
    return measured, ~(np.isin(measured, irregular) | np.isin(measured - 1, irregular))


def _on_one_clock(clocks: Clocks, calls: MatchedCalls, readings: Array, unknown: int = 0) -> Array:
    if len(clocks.hosts) < 2 or not clocks.are_useful:
        return readings
    times = clocks.to_reference(calls["process"], readings)
    return readings if times is None else np.where(readings > 0, times, unknown)


def _next_phases(calls: MatchedCalls, begin: Array) -> Array:
    """Return when the first later call of another phase or step of the process began, ns, shape (calls,); 0: none."""
    order, changes, following = _phases(calls, begin)
    process = calls["process"][order]
    has_next = following < len(changes)
    at = changes[following[has_next]]
    has_next[has_next] = process[at] == process[has_next]
    result = np.zeros(len(calls), np.int64)
    result[order[has_next]] = begin[order[changes[following[has_next]]]]
    return result


def _phases(calls: MatchedCalls, begin: Array) -> tuple[Array, Array, Array]:
    """Return the calls that have begun, by process and time, where another phase or step begins, and each one's phase.

    Phases are numbered from 0 in this order, so that the next one of phase i begins at the i-th of these places.
    """
    order = np.lexsort((begin, calls["process"]))
    order = order[begin[order] > 0]
    columns = [calls[name][order] for name in ("process", "step", "phase")]
    is_other = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    changes = np.flatnonzero(is_other) + 1
    return order, changes, np.searchsorted(changes, np.arange(len(order)), side="right")


def _unobserved(calls: MatchedCalls) -> Array:
    """Return whether no wait for each call was observed, but its end, on the host, bool, shape (calls,)."""
    return np.asarray((calls["t_wait"] == 0) & (calls["clock"] == int(Clock.FUTURE)))


def _timelines(
    calls: MatchedCalls, call_times: CallTimes, times: Mapping[str, Array], next_phase: Array
) -> dict[int, Timeline]:
    """Return the timeline of each process that has calls with times."""
    begin, returned, end = (times[name] for name in ("t_begin", "t_return", "t_end"))
    release, owner = times["release"], call_times.last_process
    known = has_own_times(calls) & (begin > 0) & (returned >= begin)
    waits_on_host = wait_begin(calls) > 0
    outlasts = known & (end > returned)
    waited = np.maximum(np.where(waits_on_host, times["t_wait"], 0), returned)
    waits = np.flatnonzero(outlasts & waits_on_host & (end > waited))
    unobserved = outlasts & _unobserved(calls) & (end <= next_phase)
    inside = np.flatnonzero(known)
    ends_inside = (end > 0) & (end <= returned)
    is_clear = call_times.known | ~_may_wait(calls)
    timelines = {}
    waits_of = positions_by_value(calls["process"][waits])
    for process, at in positions_by_value(calls["process"][inside]).items():
        own, own_waits = inside[at], waits[waits_of.get(process, [])]
        call = np.concatenate([own, own_waits])
        first = np.concatenate([begin[own], waited[own_waits]])
        last = np.concatenate([returned[own], end[own_waits]])
        candidates = own[unobserved[own]]
        chosen, since = _unobserved_waits(end[candidates], next_phase[candidates], first, last)
        extra = candidates[chosen]
        call, first, last = map(np.concatenate, ((call, extra), (first, since), (last, end[extra])))
        until_end = np.arange(len(call)) >= len(own)
        until_end[: len(own)] = ends_inside[own]
        order = np.argsort(first, kind="stable")
        call, first, last, until_end = (column[order] for column in (call, first, last, until_end))
        timelines[process] = Timeline(
            first,
            last,
            call,
            np.where(until_end, release[call], -1),
            np.where(until_end, owner[call], -1),
            is_clear[call] | ~until_end,
        )
    return timelines


def _may_wait(calls: MatchedCalls) -> Array:
    """Return whether each call may wait for other ranks, bool, shape (calls,)."""
    may_wait = (calls["depends"] & (SOURCE | TARGET | UNCERTAIN)) > 0
    return np.asarray(may_wait & calls.per_call(calls.expected > 1, otherwise=True))


def _unobserved_waits(end: Array, next_phase: Array, first: Array, last: Array) -> tuple[Array, Array]:
    """Return which operations count as waited for (module docstring), shape (n,), and since when, ns, shape (n,).

    Args:
        end: End of each operation whose wait was not observed.
        next_phase: When the next phase of each one began, not before its end.
        first: Begin of each interval of calls and waits of the process.
        last: Its end.
    """
    order = np.argsort(first, kind="stable")
    first, reach = first[order], np.maximum.accumulate(last[order])
    after = np.searchsorted(first, end)
    chosen = np.flatnonzero((reach[after - 1] < end) & (first[np.minimum(after, len(first) - 1)] >= next_phase))
    return chosen, reach[after[chosen] - 1]


def covered_ns(intervals: Array, begin: Array, end: Array) -> Array:
    """Return the time between `begin` and `end`, both of shape (n,), that intervals of shape (m, 2) cover, in ns."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return np.zeros(len(begin), np.int64)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.concatenate([[True], intervals[1:, 0] > reach[:-1]]))
    starts, ends = intervals[first, 0], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]
    covered_before = np.concatenate([[0], np.cumsum(ends - starts)])

    def covered_until(timestamps: Array) -> Array:
        at = np.searchsorted(starts, timestamps, side="right")
        last = np.where(at > 0, np.minimum(timestamps, ends[at - 1]) - starts[at - 1], 0)
        return np.where(at > 0, covered_before[np.maximum(at - 1, 0)] + last, 0)

    total: Array = covered_until(end) - covered_until(begin)
    return total
