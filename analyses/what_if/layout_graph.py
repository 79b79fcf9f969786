"""Two bounds of a simulated step, as events that wait for each other (`event_graph`).

Each rank computes as long as its floating-point operations before a call take, then makes the call. An operation begins
when all that it depends on have begun, and takes what a network predicts. Messages that a rank sends and receives
without computation between them begin together. The two graphs differ in what a rank waits for:

    nothing hidden   each operation, from its call to its end. A send waits for its receive (if ranks would then wait in
                     a circle, none does)
    most hidden      each operation whose result the next computation uses: activations, what a stage of a pipeline
                     receives, whatever else the program calls synchronously. Not sends, and not
                     gradients: the rank waits for them before its first call after backward, or at the end of the step
                     parameters gathered for a pass: they may begin with the pass (prefetched without limit); the rank
                     waits for them before its first call after the pass
                     other asynchronous operations, not of pipelines: until the pass ends, messages also until the next
                     message
                     Those of one group run one after the other.

A real step is between the two as far as the times of operations and of computation hold: a library that overlaps what
computation needs next (tensor parallelism by parts), or operations of several steps, is faster than the second.

The step is repeated `COPIES` times; its duration is the time from the end of the first to the end of the last one by
the number of steps between: what comes after the last call of a rank counts in the step after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.across_ranks.call_times import receives, sends
from commtrace.analyses.across_ranks.dependencies import SOURCE, TARGET, UNCERTAIN
from commtrace.analyses.grouping import Array
from commtrace.schema import Flag, Phase, Purpose

from .event_graph import CircularEventsError, EventGraph
from .recorded_graph import Part
from .simulated_step import SimulatedStep

COPIES: Final = 3

_PARAMETERS: Final = (
    Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD, Purpose.PARAMETERS_RECOMPUTATION, Purpose.PARAMETERS_STAGE,
)  # fmt: skip
_PASSES: Final = (int(Phase.FORWARD), int(Phase.BACKWARD))


class _Background(NamedTuple):
    """An operation that the rank does not wait for yet: its end, and until when."""

    event: int
    phase: int
    is_gradient: bool
    is_message: bool

    def is_due(self, phase: int, is_message: bool) -> bool:
        """Return whether the rank waits for it before a call."""
        if self.is_gradient:
            return phase not in _PASSES
        return phase != self.phase or (self.is_message and is_message)


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
        """Return the delay of each edge, ns, shape (edges,), from those of the calls, shape (calls,)."""
        call = np.maximum(self.call, 0)
        of_transfers = np.where(self.part == Part.TRANSFER, transfer_ns[call], 0.0)
        return np.where(self.part == Part.COMPUTATION, computation_ns[call], of_transfers)

    def begin_ns(self, times: Array) -> float:
        """Return when the first copy ended on the last rank, given the times of the events."""
        return float(times[self.ends[:, 0]].max())

    def step_ns(self, times: Array) -> float:
        """Return the duration of a step, ns."""
        return (float(times[self.ends[:, -1]].max()) - self.begin_ns(times)) / (COPIES - 1)


def bounds(step: SimulatedStep) -> tuple[LayoutGraph, LayoutGraph]:
    """Return the graphs in which most and in which nothing is hidden.

    Raises:
        CircularEventsError: Ranks wait for each other in a circle, even if sends do not wait.
    """
    try:
        nothing_hidden = _checked(_GraphBuilder(step, hides=False, sends_wait=True).build())
    except CircularEventsError:
        nothing_hidden = _checked(_GraphBuilder(step, hides=False, sends_wait=False).build())
    return _checked(_GraphBuilder(step, hides=True, sends_wait=False).build()), nothing_hidden


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
        self._is_parameters = calls.has_label("purpose", *(purpose.value for purpose in _PARAMETERS))
        self._is_gradient = calls.has_label("purpose", Purpose.GRADIENTS.value)
        # What a stage receives, it computes with, however it waits for it.
        others = is_async & ~calls.has_label("role", "pipeline")
        self._is_background = hides & matched & (self._is_parameters | self._is_gradient | others)
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
        phases, blocks = self._calls["phase"], [*self._blocks(process)]
        position = self._event()
        last_of_channel: dict[int, int] = {}
        for copy in range(COPIES):
            background: list[_Background] = []
            phase, pass_begin = -1, position
            for block in blocks:
                first, is_message = block[0], bool(self._step.is_message[block[0]])
                begun, after = self._event(), self._event()
                if phases[first] != phase:
                    phase, pass_begin = int(phases[first]), position
                due = [own for own in background if own.is_due(phase, is_message)]
                background = [own for own in background if own not in due]
                self._edge(position, begun, Part.COMPUTATION, first)
                for own in due:
                    self._edge(own.event, begun)
                self._edge(begun, after)
                for call in block:
                    released = pass_begin if self._hides and self._is_parameters[call] else begun
                    end = self._operation(copy, call, released, last_of_channel)
                    if self._is_background[call]:
                        gradient = bool(self._is_gradient[call])
                        background.append(_Background(end, phase, gradient, is_message))
                    elif not (self._hides and self._buffered[call]):
                        self._edge(end, after)
                position = after
            end_of_step = self._event()
            self._edge(position, end_of_step)
            for own in background:
                self._edge(own.event, end_of_step)
            position = end_of_step
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
        if self._is_background[call] and channel in last_of_channel:
            self._edge(last_of_channel[channel], end, Part.TRANSFER, call)
        last_of_channel[channel] = end
        return end
