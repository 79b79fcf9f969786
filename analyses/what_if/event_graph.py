"""Events that wait for each other: when each one occurs, for one or many sets of delays.

An event occurs when all that it waits for have occurred, each a delay ago (a max-plus linear system; Baccelli et al.
1992, Synchronization and Linearity, chapter 2). The events are sorted once into levels, in which none waits for
another; many sets of delays are then computed at once, level by level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from commtrace.analyses.grouping import Array
from commtrace.errors import CommtraceError


class CircularEventsError(CommtraceError):
    """Events wait for each other in a circle."""


@dataclass(frozen=True, eq=False)
class EventGraph:
    """A graph of events.

    Attributes:
        start: When each event without edges to it occurs, and the earliest time of every other one, ns, float64, shape
            (events,); -inf: none.
        source: The event that each edge comes from, shape (edges,).
        target: The event that waits for it.
    """

    start: Array
    source: Array
    target: Array

    @cached_property
    def levels(self) -> Array:
        """Level of each event: 0 if it waits for none, else one above the highest that it waits for.

        Raises:
            CircularEventsError: Events wait for each other in a circle.
        """
        events = len(self.start)
        missing = np.bincount(self.target, minlength=events)
        order = np.argsort(self.source, kind="stable")
        first = np.searchsorted(self.source[order], np.arange(events + 1)).tolist()
        targets, waits_for = self.target[order].tolist(), missing.tolist()
        level = [0] * events
        ready = np.flatnonzero(missing == 0).tolist()
        for event in ready:  # grows
            above = level[event] + 1
            for target in targets[first[event] : first[event + 1]]:
                level[target] = max(level[target], above)
                waits_for[target] -= 1
                if not waits_for[target]:
                    ready.append(target)
        if len(ready) < events:
            raise CircularEventsError(f"{events - len(ready)} of {events} events wait for each other in a circle")
        return np.array(level, np.int64)

    @cached_property
    def _steps(self) -> list[tuple[Array, Array, Array]]:
        """For each level from 1: its events, the edges to them in the order of the events, where each begins there."""
        level_of_edge = self.levels[self.target]
        order = np.lexsort((self.target, level_of_edge))
        bounds = np.searchsorted(level_of_edge[order], np.arange(1, level_of_edge.max(initial=0) + 2))
        steps = []
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            edges = order[low:high]
            targets = self.target[edges]
            begin = np.flatnonzero(np.concatenate([[True], targets[1:] != targets[:-1]]))
            steps.append((targets[begin], edges, begin))
        return steps

    def times(self, delays: Array) -> Array:
        """Return when each event occurs, ns, float64.

        Args:
            delays: Delay of each edge, ns, shape (..., edges); -inf: the edge does not exist.

        Returns:
            Times of shape (..., events).

        Raises:
            CircularEventsError: Events wait for each other in a circle.
        """
        # Events first: the rows of a level are then contiguous.
        rows = delays.reshape(math.prod(delays.shape[:-1]), len(self.source)).T
        times = np.repeat(self.start[:, None], rows.shape[1], axis=1)
        for events, edges, begin in self._steps:
            latest = np.maximum.reduceat(times[self.source[edges]] + rows[edges], begin, axis=0)
            times[events] = np.maximum(times[events], latest)
        return times.T.reshape(*delays.shape[:-1], len(self.start))

    def path(self, delays: Array, times: Array, event: int) -> Iterator[int]:
        """Yield the edges of the longest path to an event, from its end to its begin.

        Args:
            delays: Delay of each edge, shape (edges,).
            times: The times for these delays, shape (events,).
            event: The event.
        """
        first, edges = self._edges_to
        while first[event] < first[event + 1]:
            candidates = edges[first[event] : first[event + 1]]
            arrived = times[self.source[candidates]] + delays[candidates]
            edge = int(candidates[arrived.argmax()])
            if not arrived.max() >= self.start[event]:
                return
            yield edge
            event = int(self.source[edge])

    @cached_property
    def _edges_to(self) -> tuple[Array, Array]:
        edges = np.argsort(self.target, kind="stable")
        return np.searchsorted(self.target[edges], np.arange(len(self.start) + 1)), edges
