"""Changes of the graph of recorded steps: edges that are removed or added, and new events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from commtrace.analyses.grouping import Array

from .event_graph import EventGraph
from .recorded_graph import Part, Replay


class Rewiring:
    """A graph that is being changed: some edges are removed, others change, and events and edges are added.

    Attributes:
        replay: The graph before.
        delays: Delays of its edges, ns, shape (n, edges); these change.
        target: The event that each of its edges goes to, shape (edges,); these change.
        kept: Whether each of its edges remains, bool, shape (edges,).
        events: Number of events, with the new ones.
    """

    def __init__(self, replay: Replay, delays: Array) -> None:
        self.replay, self.delays = replay, delays.copy()
        self.target = replay.graph.target.copy()
        self.kept = np.ones(len(self.target), bool)
        self.events = len(replay.graph.start)
        waits = delays[:, replay.waits]
        self._no_wait = np.isneginf(waits).all(axis=1) & (waits.shape[1] > 0)
        self._source: list[Array] = []
        self._target: list[Array] = []
        self._delays: list[Array] = []
        self._columns: dict[str, list[Array]] = {
            name: [] for name in ("part", "call", "process", "step", "waits", "before", "message")
        }
        self._single: list[tuple[int, int, Part, int, int, int]] = []
        self._single_delays: list[Array] = []
        self._row_of_process = np.zeros(int(replay.paths.calls["process"].max()) + 1, np.int64)
        self._row_of_process[replay.paths.processes] = np.arange(len(replay.paths.processes))
        order = np.argsort(replay.graph.target, kind="stable")
        self._to = order, np.searchsorted(replay.graph.target[order], np.arange(self.events + 1))

    def new_events(self, *shape: int) -> Array:
        """Return the numbers of new events, in an array of this shape."""
        first, self.events = self.events, self.events + int(np.prod(shape))
        return np.arange(first, self.events).reshape(shape)

    def edges_to(self, event: int) -> Array:
        """Return the recorded edges to a recorded event."""
        order, first = self._to
        return order[first[event] : first[event + 1]]

    def add_edge(
        self, source: int, target: int, delay: Array, part: Part, call: int, *, before: int = -1, message: int = -1
    ) -> None:
        """Add one edge with its delays, shape (n,)."""
        self._single.append((source, target, part, call, before, message))
        self._single_delays.append(delay)

    def add(
        self, source: Array, target: Array, delay: Array | float, part: Array | Part, call: Array, *,
        waits: Array | bool = False, before: Array | int = -1, message: Array | int = -1,
    ) -> None:  # fmt: skip
        """Add edges with columns of any one shape; `delay` has one more axis, the rows of delays, as its first one."""
        source, target, call = np.broadcast_arrays(source, target, call)
        n, shape = len(self.delays), source.shape
        calls, steps = self.replay.paths.calls, self.replay.paths.steps
        own: dict[str, Array | int] = {
            "part": part, "call": call, "process": self._row_of_process[calls["process"][call]], "waits": waits,
            "step": np.minimum(np.searchsorted(steps, calls["step"][call]), len(steps) - 1), "before": before,
            "message": message,
        }  # fmt: skip
        self._source.append(source.ravel())
        self._target.append(target.ravel())
        self._delays.append(np.broadcast_to(delay, (n, *shape)).reshape(n, -1))
        for name, values in own.items():
            self._columns[name].append(np.broadcast_to(values, shape).ravel())

    def add_messages(self, launched: Array, transfer: Array, call: Array, payload: Array | int) -> Array:
        """Add messages, which begin when all ranks have launched them. Return the events at which they are over.

        Args:
            launched: Events of their launches, shape (passes, ranks, ...).
            transfer: Their transfers, ns, with one more axis, the rows of delays, as its first one.
            call: The recorded call of each, shape of `launched`.
            payload: Their bytes, to be broadcast to that shape.
        """
        passes, ranks, *more = launched.shape
        arrived = np.repeat(self.new_events(passes, 1, *more), ranks, axis=1)
        over = self.new_events(*launched.shape)
        no_wait = self._no_wait.reshape(-1, *[1] * launched.ndim)
        self.add(launched, arrived, 0, Part.ORDER, call)
        self.add(launched, over, transfer, Part.TRANSFER, call, message=payload)
        awaited = np.where(no_wait, -np.inf, transfer)
        self.add(arrived, over, awaited, Part.TRANSFER, call, waits=True, message=payload)
        return over

    def build(self) -> tuple[Replay, Array]:
        """Return the changed graph, and its delays, shape (n, edges)."""
        if self._single:
            source, target, part, call, before, message = np.array(self._single, np.int64).T
            self.add(source, target, np.stack(self._single_delays, axis=1), part, call, before=before, message=message)
        old, kept = self.replay, self.kept
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(old, name)[kept], *values]).astype(getattr(old, name).dtype)
            for name, values in self._columns.items()
        }
        start = np.concatenate([old.graph.start, np.full(self.events - len(old.graph.start), -np.inf)])
        source = np.concatenate([old.graph.source[kept], *self._source])
        target = np.concatenate([self.target[kept], *self._target])
        delays = np.concatenate([self.delays[:, kept], *self._delays], axis=1)
        recorded = np.full(len(start), np.nan)
        graph = EventGraph(start, source, target)
        return replace(old, graph=graph, delays=delays[0], recorded=recorded, **columns), delays
