"""The last steps of a recorded run as events that wait for each other, from the one model of calls and times.

Of each rank, in the order of time: its calls and its waits begin and end (`blocked_time`); of each operation, all on
whose arrival it depends have arrived (`call_times`), and it ends on each rank. The delays between them are

    computation   between calls, where none blocks the rank
    call          in a call, but not in its operation: its launch and its return
    transfer      of an operation, after the last rank that it depends on has arrived and, of operations of one group
                  that run in the background, after the one before it has ended
    order         none: one event cannot precede the other

The recorded delays give back the recorded times exactly; `Replay.error_ns` is the proof for the run at hand. Waits are
no delays: they follow. A wait that took no time is an event, too, since it takes some when operations take longer.

A rank's first event is the end of the step before. Operations that began before it keep their recorded ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.across_ranks.blocked_time import Timeline
from commtrace.analyses.across_ranks.call_times import receives, sends
from commtrace.analyses.across_ranks.critical_paths import MAX_CALLS, StepPaths, read_step_paths
from commtrace.analyses.across_ranks.dependencies import SOURCE, TARGET, UNCERTAIN
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array, group_rows
from commtrace.durations import wait_begin
from commtrace.errors import LogError
from commtrace.rank_ranges import format_ranks
from commtrace.schema import Clock, Flag

from .event_graph import CircularEventsError, EventGraph

_AT_ONCE_NS: Final = 50_000
"""Longest wait for an operation that had ended before: the time that the observation takes."""


class Part(IntEnum):
    """What a delay is."""

    ORDER = 0
    COMPUTATION = 1
    CALL = 2
    TRANSFER = 3


PART_NAMES: Final = {Part.COMPUTATION: "computation", Part.CALL: "calls", Part.TRANSFER: "transfer"}


@dataclass(frozen=True, eq=False)
class Replay:
    """The events of the last steps of a run.

    Attributes:
        paths: The steps, and their calls.
        graph: The events.
        delays: Recorded delay of each edge, ns, float64, shape (edges,).
        part: What it is (`Part`), shape (edges,).
        call: Its call; of computation, the call that follows; shape (edges,).
        process: Row in `paths.processes` of the process that is delayed.
        step: Row in `paths.steps` of the call's step.
        waits: Whether the edge is the wait for the arrival of other ranks, bool.
        before: Of computation, the call before it, -1 at the begin of a step and for other parts.
        ends: The event that ends each step on each process, shape (processes, steps).
        begin_ns: When the first step began: the end of the step before it on the last rank.
        recorded: Recorded time of each event, ns; NaN where there is none.
        message: Bytes of a transfer that is not the recorded one of its call, -1: it is that one, or no transfer; shape
            (edges,).
        begun: The event at which each recorded call began, -1: none; shape (calls,).
        ended: The event at which the operation of each recorded call ended, -1: none; shape (calls,).
    """

    paths: StepPaths
    graph: EventGraph
    delays: Array
    part: Array
    call: Array
    process: Array
    step: Array
    waits: Array
    before: Array
    ends: Array
    begin_ns: float
    recorded: Array
    message: Array
    begun: Array
    ended: Array

    def transfers(self, edges: Array) -> tuple[Array, Array]:
        """Return one edge of each transfer among edges, shape (transfers,), and the number of each edge's transfer.

        Args:
            edges: Edges that are transfers, ascending, shape (n,).
        """
        _, first, number = np.unique(self.graph.target[edges], return_index=True, return_inverse=True)
        return edges[first], number

    def payload(self, edges: Array) -> Array:
        """Return the bytes of the message of each edge that is a transfer, int64, shape of `edges`."""
        own = self.paths.calls["payload"][self.call[edges]]
        return np.where(self.message[edges] >= 0, self.message[edges], own).astype(np.int64)

    def step_ns(self, delays: Array) -> Array:
        """Return the duration of each step, ns, shape (..., steps), for delays of shape (..., edges)."""
        return self.durations(self.graph.times(delays))

    def durations(self, times: Array) -> Array:
        """Return the duration of each step, ns, shape (..., steps), from the times of events, shape (..., events)."""
        ends = times[..., self.ends].max(axis=-2)
        begin = np.broadcast_to(self.begin_ns, (*ends.shape[:-1], 1))
        return np.diff(np.concatenate([begin, ends], axis=-1), axis=-1)

    @cached_property
    def error_ns(self) -> float:
        """Largest difference between a replayed time and the recorded one."""
        known = np.isfinite(self.recorded)
        return float(np.abs(self.graph.times(self.delays)[known] - self.recorded[known]).max(initial=0))


class _Host(NamedTuple):
    """Calls and waits of a process in the order of time, each of shape (intervals,)."""

    begin: Array
    end: Array
    call: Array
    is_call: Array
    """Whether the interval is the call itself, not a wait for its operation."""
    step: Array
    """The step that it belongs to."""

    def groups(self, begin_ns: int) -> tuple[Array, Array]:
        """Return the first interval of each group of intervals without computation between them, and each one's group.

        Args:
            begin_ns: When the first step began.
        """
        reached = np.concatenate([[begin_ns], np.maximum.accumulate(self.end)[:-1]])
        is_first = self.begin >= reached
        is_first[:1] = True
        return np.flatnonzero(is_first), np.cumsum(is_first) - 1


class _Edges:
    """Edges of a graph that is being built."""

    def __init__(self) -> None:
        self._columns: list[list[Array]] = [[] for _ in range(6)]

    def add(
        self, source: Array, target: Array, delay: Array | float, part: Part, call: Array, *,
        waits: bool = False, before: Array | int = -1,
    ) -> None:  # fmt: skip
        """Add edges with columns of shape (n,), or the same values for all."""
        values = (source, target, delay, int(part) + 16 * waits, call, before)
        types = (np.int64, np.int64, np.float64, np.int64, np.int64, np.int64)
        for column, value, kind in zip(self._columns, values, types, strict=True):
            column.append(np.broadcast_to(np.asarray(value, kind), np.shape(source)))

    def columns(self) -> list[Array]:
        """Return source, target, delay, part, whether it is a wait, call, and call before."""
        source, target, delay, coded, call, before = (np.concatenate(column) for column in self._columns)
        return [source, target, delay, coded % 16, coded >= 16, call, before]


def read_replay(run: AnalysedRun, columns: Sequence[str], steps: Sequence[int] | None = None) -> Replay:
    """Return the events of the last steps of a run.

    Args:
        run: The run; no dry run.
        columns: Columns (`match_calls`) that its calls shall have besides those of `StepPaths`.
        steps: Consecutive steps; None: all that can be replayed.

    Raises:
        LogError: The steps cannot be replayed; the message says why.
    """
    run.require_times("a replay")
    paths = read_step_paths(run, run.clocks, MAX_CALLS, columns)
    if paths is None:
        raise LogError(
            f"{run.log.path}: its steps cannot be replayed: this needs three training steps of all ranks, with ends of "
            "calls observed on the host, and enough calls between hosts to compare their clocks"
        )
    replay = replay_of(paths if steps is None else _only(run, paths, steps))
    try:
        replay.graph.times(replay.delays)
    except CircularEventsError as error:
        raise LogError(
            f"{run.log.path}: its steps cannot be replayed, since its times contradict each other: {error}"
        ) from None
    return replay


def _only(run: AnalysedRun, paths: StepPaths, steps: Sequence[int]) -> StepPaths:
    """Return the paths of some steps. Raises LogError."""
    wanted = np.unique(steps)
    at = np.flatnonzero(np.isin(paths.steps, wanted))
    if len(at) < len(wanted) or int(np.ptp(wanted)) >= len(wanted):
        named = format_ranks(wanted[wanted >= 0].tolist()) if wanted.max() >= 0 else "before the first one"
        raise LogError(
            f"{run.log.path}: steps {named} cannot be replayed; choose consecutive ones from "
            f"{format_ranks(paths.steps.tolist())}: the first recorded step has no known begin, and the last one may "
            "not be over"
        )
    return replace(paths, steps=paths.steps[at], ends=paths.ends[:, at[0] : at[-1] + 2])


def replay_of(paths: StepPaths) -> Replay:
    """Return the events of the steps of `paths`, whose calls also have the column "flags"."""
    return _Builder(paths).build()


class _Builder:
    """Builds the events: 0 .. processes - 1 begin the steps, then come two per interval, then those of operations."""

    def __init__(self, paths: StepPaths) -> None:
        self._paths, self._calls, self._times = paths, paths.calls, paths.blocked.times
        self._ended = paths.blocked.times["t_end"].copy()
        """When each operation ended, ns; an estimate where its end was observed late."""
        self._wait_begin, self._place = wait_begin(paths.calls), np.zeros(len(paths.calls), np.int64)
        lines = paths.blocked.timelines
        self._hosts = [self._host(lines[process], paths.ends[row, 0]) for row, process in enumerate(lines)]
        counts = [len(host.begin) for host in self._hosts]
        processes = len(counts)
        self._first = processes + 2 * np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._events = int(self._first[-1])
        self._begun = np.full(len(self._calls), -1, np.int64)
        """Event at which each call began, -1: not in the graph."""
        for first, host in zip(self._first.tolist(), self._hosts, strict=False):
            at = np.flatnonzero(host.is_call)
            self._begun[host.call[at]] = first + 2 * at
        self._edges = _Edges()

    def build(self) -> Replay:
        """Return the events."""
        paths = self._paths
        recorded = [paths.ends[:, 0].astype(float)]
        for host in self._hosts:
            recorded.append(np.stack([host.begin, host.end], axis=1).ravel().astype(float))
        ended, operations, starts = self._operations()
        for row, host in enumerate(self._hosts):
            self._add_host(row, host, ended)
        ends = self._add_step_ends(self._events + len(operations))
        source, target, delay, part, waits, call, before = self._edges.columns()
        recorded += [operations, paths.ends[:, 1:].ravel().astype(float)]
        none = np.full(self._events - len(recorded[0]), -np.inf)
        start = np.concatenate([recorded[0], none, starts, np.full(ends.size, -np.inf)])
        rows = np.zeros(int(self._calls["process"].max()) + 1, np.int64)
        rows[paths.processes] = np.arange(len(paths.processes))
        step = np.searchsorted(paths.steps, self._calls["step"][call])
        return Replay(
            paths, EventGraph(start, source, target), delay, part, call, rows[self._calls["process"][call]],
            np.minimum(step, len(paths.steps) - 1), waits.astype(bool), before, ends,
            float(paths.ends[:, 0].max()), np.concatenate(recorded), np.full(len(call), -1), self._begun, ended,
        )  # fmt: skip

    # ---- calls and waits of one process ------------------------------------------------------------------------------

    def _host(self, line: Timeline, begin_ns: int) -> _Host:
        is_call = np.zeros(len(line.call), bool)
        is_call[np.unique(line.call, return_index=True)[1]] = True  # a call precedes the waits for it
        step = self._calls["step"][line.call]
        kept = (step <= self._paths.steps[-1]) & ((step >= self._paths.steps[0]) | (line.end > begin_ns))
        host = _Host(line.begin[kept], line.end[kept], line.call[kept], is_call[kept], step[kept])
        if not len(host.begin):
            return host
        at, waited, moments = self._short_waits(host, np.setdiff1d(host.call[host.is_call], host.call[~host.is_call]))
        # A wait that took no time does not make the step of its call longer.
        waits = _Host(moments, moments, waited, np.zeros(len(at), bool), host.step[np.maximum(at - 1, 0)])
        return _Host(*(np.insert(column, at, values) for column, values in zip(host, waits, strict=True)))

    def _short_waits(self, host: _Host, own: Array) -> tuple[Array, Array, Array]:
        """Return the waits that took no time, since the operation had ended before: places, calls, and moments.

        Args:
            host: The intervals of a process.
            own: Its calls without a wait among them, ascending.
        """
        calls, times = self._calls, self._times
        self._place[host.call[host.is_call]] = np.flatnonzero(host.is_call)
        outlasts = (times["t_end"][own] > times["t_return"][own]) | ((calls["flags"][own] & int(Flag.ASYNC)) > 0)
        own = own[outlasts & (times["t_end"][own] > 0)]
        explicit = own[self._wait_begin[own] > 0]
        moments = np.maximum(times["t_wait"][explicit], times["t_return"][explicit])
        at = np.maximum(np.searchsorted(host.begin, moments, side="left"), self._place[explicit] + 1)
        # Waits in C++ are not recorded: they count from the last call of the phase on (`blocked_time`).
        unobserved = own[(calls["t_wait"][own] == 0) & (calls["clock"][own] == int(Clock.FUTURE))]
        phase, step = calls["phase"][host.call], calls["step"][host.call]
        changes = np.append(np.flatnonzero((phase[1:] != phase[:-1]) | (step[1:] != step[:-1])) + 1, len(phase))
        after = changes[np.minimum(np.searchsorted(changes, self._place[unobserved], side="right"), len(changes) - 1)]
        reach = np.maximum.accumulate(host.end)
        at, waited = np.concatenate([at, after]), np.concatenate([explicit, unobserved])
        moments = np.concatenate([moments, reach[after - 1]])
        order = np.lexsort((times["t_end"][waited], moments, at))
        order = order[times["t_end"][waited[order]] <= moments[order]]
        return at[order], waited[order], moments[order]

    def _add_host(self, row: int, host: _Host, ended: Array) -> None:
        """Add the edges of a process. `ended`: the event at which the operation of each call ended, -1: not known."""
        times, count = self._times, len(host.begin)
        if not count:
            return
        begins = self._first[row] + 2 * np.arange(count)
        ends = begins + 1
        first, group = host.groups(self._paths.ends[row, 0])
        reach = np.concatenate([self._paths.ends[row, :1], np.maximum.accumulate(host.end)[first[1:] - 1]])
        gap = host.begin[first] - reach
        step, previous = self._calls["step"], np.concatenate([[-1], host.call[first[1:] - 1]])
        starts = (previous < 0) | (step[previous] != step[host.call[first]])
        before = np.where(starts, -1, previous)
        # Computation begins when all calls of the group before it have ended.
        source = np.concatenate([[row], ends[group < group[-1]]])
        number = np.concatenate([[0], group[group < group[-1]] + 1])
        call = host.call[first][number]
        self._edges.add(
            source, begins[first[number]], gap[number], Part.COMPUTATION, call, before=before[number]
        )  # fmt: skip
        # While a call of another thread blocks the process, the time since that one began counts.
        other = np.setdiff1d(np.arange(count), first)
        offset = host.begin[other] - host.begin[other - 1]
        self._edges.add(begins[other - 1], begins[other], offset, Part.CALL, host.call[other])
        operation = ended[host.call]
        returned, end = times["t_return"][host.call], times["t_end"][host.call]
        inside = host.is_call & (operation >= 0) & (end <= returned)
        inside &= (self._calls["flags"][host.call] & int(Flag.ASYNC)) == 0
        self._edges.add(operation[inside], ends[inside], (returned - end)[inside], Part.CALL, host.call[inside])
        launch = host.is_call & ~inside
        self._edges.add(begins[launch], ends[launch], (host.end - host.begin)[launch], Part.CALL, host.call[launch])
        waits = ~host.is_call
        # The part of a wait after the end of its operation: the observation itself.
        rest = host.end - np.maximum(host.begin, np.where(operation >= 0, self._ended[host.call], host.begin))
        self._edges.add(begins[waits], ends[waits], rest[waits], Part.CALL, host.call[waits])
        waits &= operation >= 0
        self._edges.add(operation[waits], ends[waits], rest[waits], Part.CALL, host.call[waits])

    def _add_step_ends(self, first_event: int) -> Array:
        """Add an event per process and step: its calls have ended. Return them, shape (processes, steps)."""
        steps = self._paths.steps
        events = first_event + np.arange(len(self._hosts) * len(steps)).reshape(len(self._hosts), len(steps))
        none = np.zeros(1, np.int64)
        for row, host in enumerate(self._hosts):
            if len(host.begin):
                _, group = host.groups(self._paths.ends[row, 0])
                number = np.searchsorted(steps, host.step)  # waits for calls before the first: 0
                last = np.full(len(steps), -1)
                np.maximum.at(last, number, group)
                at = np.flatnonzero(group == last[number])  # earlier groups have ended before
                # A wait that took no time may be recorded after the last call that blocked the process.
                early = np.minimum(0, self._paths.ends[row, 1:][number[at]] - host.end[at])
                self._edges.add(
                    self._first[row] + 2 * at + 1, events[row, number[at]], early, Part.ORDER, host.call[at]
                )  # fmt: skip
            chain = np.concatenate([[row], events[row, :-1]])
            self._edges.add(chain, events[row], 0, Part.ORDER, np.repeat(none, len(steps)))
        return events

    # ---- operations --------------------------------------------------------------------------------------------------

    def _operations(self) -> tuple[Array, Array, Array]:
        """Add the events of operations. Return the event of each call's end, and these events' recorded times, starts.

        Returns:
            Event at which the operation of each call ended, -1: not known, shape (calls,); recorded time of each event
            of an operation, NaN: none, shape (events,); its earliest time, -inf: none.
        """
        calls, times = self._calls, self._times
        arrival, end = times["arrival"], self._ended
        used = np.zeros(len(calls), bool)
        for host in self._hosts:
            used[host.call] = True
        known = used & (calls["end"] > 0) & (end > 0)
        replayed = np.flatnonzero(known & (self._begun >= 0))
        earlier = np.flatnonzero(known & (self._begun < 0))  # it began before the first step
        nodes = np.concatenate([replayed, earlier])
        ended = np.full(len(calls), -1, np.int64)
        ended[nodes] = self._events + np.arange(len(nodes))
        recorded, starts = [end[nodes].astype(float)], [np.full(len(replayed), -np.inf), end[earlier].astype(float)]
        released = arrival[replayed].astype(float)
        waited_for, next_event = [], self._events + len(nodes)
        for sources, targets in self._dependencies(replayed):
            instance, arrived, first = self._arrivals(sources, next_event)
            event = np.full(len(calls.channel), -1, np.int64)
            event[instance] = next_event + np.arange(len(instance))
            moment = np.full(len(calls.channel), -np.inf)
            moment[instance] = arrived
            own = calls["instance"][replayed[targets]]
            holds = (event[own] >= 0) & (self._several_hosts | (moment[own] <= end[replayed[targets]]))
            targets, own = targets[holds], own[holds]
            released[targets] = np.maximum(released[targets], moment[own])
            waited_for.append((event[own], targets))
            recorded.append(np.full(len(instance), np.nan))
            starts.append(first)
            next_event += len(instance)
        self._estimate_late_ends(replayed, released)
        recorded[0] = end[nodes].astype(float)
        previous, queued = self._queue(replayed)
        released[queued] = np.maximum(released[queued], end[previous])
        transfer = end[replayed] - released
        begun = self._begun[replayed]
        late = (arrival - times["t_begin"])[replayed]
        self._edges.add(begun, ended[replayed], transfer + late, Part.TRANSFER, replayed)
        for event_of_target, targets in waited_for:
            call = replayed[targets]
            self._edges.add(event_of_target, ended[call], transfer[targets], Part.TRANSFER, call, waits=True)
        call = replayed[queued]
        self._edges.add(ended[previous], ended[call], transfer[queued], Part.TRANSFER, call)
        return ended, np.concatenate(recorded), np.concatenate(starts)

    @property
    def _several_hosts(self) -> bool:
        """Whether recorded arrivals may be later than the ends that depend on them, by errors of clocks."""
        return len(self._paths.blocked.call_times.clocks.hosts) > 1

    def _dependencies(self, replayed: Array) -> Sequence[tuple[Array, Array]]:
        """Return sources, as calls, and targets, as positions in `replayed`, of calls and of sends that wait."""
        calls, call_times = self._calls, self._paths.blocked.call_times
        depends, known = calls["depends"], call_times.known[replayed]
        is_source, is_target = (depends & (SOURCE | UNCERTAIN)) > 0, (depends & (TARGET | UNCERTAIN)) > 0
        matched, received = calls["instance"] >= 0, np.flatnonzero(receives(calls))
        waiting = known & self._wait_for_receives(sends(calls) & call_times.known, received)[replayed]
        return (
            (np.flatnonzero(matched & is_source), np.flatnonzero(known & is_target[replayed])),
            (received, np.flatnonzero(waiting)),
        )

    def _wait_for_receives(self, is_send: Array, received: Array) -> Array:
        """Return which sends wait for their receives, bool, shape (calls,), given whether each call is one.

        A library buffers small messages: those of at most the size of one that ended before its receive had begun. If
        the receive began first, or meanwhile, the log of this send alone does not show whether it would have waited.
        """
        calls, payload = self._calls, self._calls["payload"]
        arrival = np.full(len(calls.channel), np.iinfo(np.int64).max)
        arrival[calls["instance"][received]] = self._times["arrival"][received]
        at = np.flatnonzero(is_send)
        buffered = at[self._times["t_end"][at] < arrival[calls["instance"][at]]]
        return np.asarray(is_send & (payload > payload[buffered].max(initial=-1)))

    def _arrivals(self, sources: Array, first_event: int) -> tuple[Array, Array, Array]:
        """Add an event for each instance of `sources`: the last of them arrives.

        Returns:
            The instances; when the last source arrived; that of sources that are not in the graph, -inf: none.
        """
        calls, times = self._calls, self._times
        instance, number = np.unique(calls["instance"][sources], return_inverse=True)
        arrived, start = np.full((2, len(instance)), -np.inf)
        np.maximum.at(arrived, number, times["arrival"][sources].astype(float))
        inside = self._begun[sources] >= 0
        np.maximum.at(start, number[~inside], times["arrival"][sources[~inside]].astype(float))
        late = (times["arrival"] - times["t_begin"])[sources]
        call = sources[inside]
        self._edges.add(self._begun[call], first_event + number[inside], late[inside], Part.ORDER, call)
        return instance, arrived, start

    def _estimate_late_ends(self, replayed: Array, released: Array) -> None:
        """Estimate the ends of background operations that a wait or a poll found ended.

        They take what the others with the same operation, payload and number of ranks do: the median of those whose end
        was seen when it occurred; if there are none, the shortest time until a wait found one ended.

        Args:
            replayed: Calls.
            released: When each of them was released, ns.
        """
        calls, times = self._calls, self._times
        waited = np.maximum(times["t_wait"], times["t_return"])[replayed]
        blocked = np.where(calls["clock"][replayed] == int(Clock.WAIT), self._ended[replayed] - waited, 0)
        late = np.isin(calls["clock"][replayed], (int(Clock.WAIT), int(Clock.TEST))) & (blocked <= _AT_ONCE_NS)
        late &= (calls["flags"][replayed] & int(Flag.ASYNC)) > 0
        if not late.any():
            return
        sizes = calls.per_call(calls.expected)
        transfer = self._ended[replayed] - released
        _, kinds = group_rows([calls["op"][replayed], calls["payload"][replayed], sizes[replayed]])
        for kind in np.unique(kinds[late]).tolist():
            own = kinds == kind
            seen = transfer[own & ~late]
            typical = np.median(seen) if len(seen) else transfer[own].min()
            at = np.flatnonzero(own & late)
            self._ended[replayed[at]] = released[at] + np.minimum(transfer[at], max(0, typical))

    def _queue(self, replayed: Array) -> tuple[Array, Array]:
        """Return calls, and the positions in `replayed` of the operations of their group that run after them."""
        calls, end = self._calls, self._ended
        instance = calls["instance"][replayed]
        at = np.flatnonzero(instance >= 0)
        channel = calls.channel[instance[at]]
        collective = np.array([item.source < 0 for item in calls.channels], bool)[channel]
        at, channel = at[collective], channel[collective]
        process, begun = calls["process"][replayed[at]], self._times["t_begin"][replayed[at]]
        order = np.lexsort((begun, channel, process))
        at, channel, process = at[order], channel[order], process[order]
        same = (channel[1:] == channel[:-1]) & (process[1:] == process[:-1])
        first, second = replayed[at[:-1]][same], at[1:][same]
        is_async = ((calls["flags"][replayed[second]] & int(Flag.ASYNC)) > 0) & (end[first] <= end[replayed[second]])
        return first[is_async], second[is_async]
