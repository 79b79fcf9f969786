"""Two bounds of a simulated step, as events that wait for each other (`event_graph`).

Each rank computes as long as its floating-point operations before a call take, then makes the call. An operation begins
when all that it depends on have begun, and takes what a network predicts. Messages that a rank sends and receives
without computation between them begin together. The two graphs differ in what a rank waits for:

    nothing hidden   each operation, from its call to its end. A send waits for its receive (if ranks would then wait in
                     a circle, none does)
    most hidden      each operation that cannot overlap by `overlap_rules`: activations, what a stage of a pipeline
                     receives, whatever else the program calls synchronously. Not sends, and neither gradients,
                     parameters gathered for a pass, nor other asynchronous operations, not of pipelines: those run in
                     the background, those of one group one after the other

A real step is between the two as far as the times of operations and of computation hold: a library that overlaps what
computation needs next (tensor parallelism by parts), or operations of several steps, is faster than the second.

The step is repeated `COPIES` times; its duration is the time from the end of the first to the end of the last one by
the number of steps between: what comes after the last call of a rank counts in the step after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.analyses.across_ranks.call_times import receives, sends
from commtrace.analyses.across_ranks.dependencies import SOURCE, TARGET, UNCERTAIN
from commtrace.analyses.grouping import Array
from commtrace.errors import LogError
from commtrace.schema import Flag

from .event_graph import CircularEventsError, EventGraph
from .overlap_rules import OverlapRules
from .recorded_graph import Part
from .simulated_step import SimulatedStep

COPIES: Final = 3


@dataclass(frozen=True, eq=False)
class LayoutGraph:
    """One bound of a step.

    Attributes:
        graph: The events.
        part: What delays each edge (`Part`), shape (edges,).
        call: The call whose computation or transfer that is; -1: none.
        ends: The event that ends each copy of the step on each process, shape (processes, COPIES).
    """

    graph: EventGraph
    part: Array
    call: Array
    ends: Array

    def delays(self, computation_ns: Array, transfer_ns: Array) -> Array:
        """Return the delay of each edge, ns, shape (..., edges), from those of calls, shapes (calls,), (..., calls)."""
        call = np.maximum(self.call, 0)
        of_transfers = np.where(self.part == Part.TRANSFER, transfer_ns[..., call], 0.0)
        return np.where(self.part == Part.COMPUTATION, computation_ns[call], of_transfers)

    def begin_ns(self, times: Array) -> Array:
        """Return when the first copy ended on the last rank, shape (...), given the times, shape (..., events)."""
        return np.asarray(times[..., self.ends[:, 0]].max(axis=-1))

    def step_ns(self, times: Array) -> Array:
        """Return the duration of a step, ns, shape (...)."""
        return np.asarray((times[..., self.ends[:, -1]].max(axis=-1) - self.begin_ns(times)) / (COPIES - 1))


def bounds(step: SimulatedStep) -> tuple[LayoutGraph, LayoutGraph]:
    """Return the graphs in which most and in which nothing is hidden.

    Raises:
        LogError: Ranks wait for each other in a circle, even if sends do not wait.
    """
    try:
        try:
            nothing_hidden = _checked(_GraphBuilder(step, hides=False, sends_wait=True).build())
        except CircularEventsError:
            nothing_hidden = _checked(_GraphBuilder(step, hides=False, sends_wait=False).build())
        return _checked(_GraphBuilder(step, hides=True, sends_wait=False).build()), nothing_hidden
    except CircularEventsError as error:
        raise LogError(
            f"{step.run.log.path}: its ranks wait for each other in a circle; it does not show when they wait for "
            f"messages that they receive in the background: {error}"
        ) from None


def _checked(graph: LayoutGraph) -> LayoutGraph:
    """Return the graph. Raises CircularEventsError."""
    graph.graph.times(np.zeros(len(graph.call)))
    return graph


class _GraphBuilder:
    def __init__(self, step: SimulatedStep, *, hides: bool, sends_wait: bool) -> None:
        calls = step.calls
        self._step, self._calls, self._hides = step, calls, hides
        self._rows: list[tuple[int, int, int, int]] = []
        """Edges: source, target, part, and the call whose computation or transfer the delay is."""
        self._events, self._arrivals = 0, dict[tuple[int, int], int]()
        is_async = (calls["flags"] & int(Flag.ASYNC)) > 0
        self._receives = receives(calls)
        self._buffered = sends(calls) & (is_async | (not sends_wait))
        matched = calls["instance"] >= 0
        waits = (calls["depends"] & (TARGET | UNCERTAIN)) > 0
        # Without hiding, a rank also waits for those that an algorithm may let it leave behind.
        self._waits = matched & (waits if hides else np.ones(len(calls), bool))
        self._arrives = matched & (((calls["depends"] & (SOURCE | UNCERTAIN)) > 0) | (not hides))
        self._rules = rules = OverlapRules.of(calls)
        # What a stage receives, it computes with, however it waits for it.
        others = is_async & ~calls.has_label("role", "pipeline")
        self._is_background = hides & matched & (rules.is_parameters | rules.is_gradient | others)
        self._channel = np.where(matched, calls.channel[np.maximum(calls["instance"], 0)], -1)

    def build(self) -> LayoutGraph:
        processes = np.unique(self._calls["process"]).tolist()
        ends = np.array([[*self._rank(process)] for process in processes])
        rows = np.array(self._rows, np.int64)
        start = np.full(self._events, -np.inf)
        start[np.setdiff1d(np.arange(self._events), rows[:, 1])] = 0.0
        return LayoutGraph(EventGraph(start, rows[:, 0], rows[:, 1]), rows[:, 2], rows[:, 3], ends)

    def _event(self) -> int:
        self._events += 1
        return self._events - 1

    def _edge(self, source: int, target: int, part: Part = Part.ORDER, call: int = -1) -> None:
        self._rows.append((source, target, int(part), call))

    def _arrival(self, copy: int, call: int) -> int:
        """Return the event that all on whom the operation of a call depends have begun it."""
        key = copy, int(self._calls["instance"][call])
        if key not in self._arrivals:
            self._arrivals[key] = self._event()
        return self._arrivals[key]

    def _blocks(self, process: int) -> Iterator[list[int]]:
        """Yield the calls of a process that begin together."""
        block: list[int] = []
        for call in self._calls.of_process(process).tolist():
            joins = block and self._step.is_message[call] and self._step.is_message[block[-1]]
            if block and not (joins and not self._step.flops[call]):
                yield block
                block = []
            block.append(call)
        yield block

    def _rank(self, process: int) -> Iterator[int]:
        """Add the events of a process. Yield the end of each copy of the step."""
        blocks = [*self._blocks(process)]
        first = np.array([block[0] for block in blocks])
        spans = self._rules.spans(first, np.zeros(len(first), np.int64), self._calls["phase"][first])
        order = spans.order if self._hides else np.arange(len(blocks))
        position = self._event()
        last_of_channel: dict[int, int] = {}
        for copy in range(COPIES):
            before, begun = [position], list[int]()
            for block in blocks:
                begun.append(self._event())
                self._edge(before[-1], begun[-1], Part.COMPUTATION, block[0])
                before.append(self._event())
                self._edge(begun[-1], before[-1])
            position = self._event()
            self._edge(before[-1], position)
            begun.append(position)  # END_OF_STEP
            for at in order.tolist():
                for call in blocks[at]:
                    is_early = self._hides and self._rules.is_parameters[call]
                    released = before[spans.begin[at]] if is_early else begun[at]
                    end = self._operation(copy, call, released, last_of_channel)
                    if self._is_background[call]:
                        self._edge(end, begun[spans.until[at]])
                    elif not (self._hides and self._buffered[call]):
                        self._edge(end, before[at + 1])
            yield position

    def _operation(self, copy: int, call: int, released: int, last_of_channel: dict[int, int]) -> int:
        """Add the operation of a call. Return the event of its end on the rank."""
        end = self._event()
        if self._channel[call] < 0:
            self._edge(released, end)
            return end
        if self._buffered[call]:
            self._edge(released, self._arrival(copy, call))
            self._edge(released, end, Part.TRANSFER, call)
            return end
        if self._arrives[call]:
            self._edge(released, self._arrival(copy, call))
        if self._waits[call]:
            self._edge(self._arrival(copy, call), end, Part.TRANSFER, call)
        # What was sent before has arrived when its receive begins.
        is_late_receive = self._hides and self._receives[call]
        self._edge(released, end, *((Part.ORDER,) if is_late_receive else (Part.TRANSFER, call)))
        channel = int(self._channel[call])
        if self._hides and channel in last_of_channel:
            self._edge(last_of_channel[channel], end, Part.TRANSFER, call)
        last_of_channel[channel] = end
        return end
