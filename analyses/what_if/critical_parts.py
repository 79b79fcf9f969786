"""What the critical path of a step consists of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from commtrace.analyses.grouping import Array

from .event_graph import EventGraph

_MAX_PARTS: Final = 2
_MIN_PART: Final = 0.02


def critical_parts(
    graph: EventGraph, delays: Array, times: Array, last: int, begin_ns: float
) -> Iterator[tuple[int, float]]:
    """Yield the edges of the longest path to an event since a time, from its end, and the ns of each since then.

    Args:
        graph: The events.
        delays: Delay of each edge, ns, shape (edges,).
        times: The times for these delays, shape (events,).
        last: The event.
        begin_ns: The time.
    """
    moment = times[last]
    for edge in graph.path(delays, times, last):
        earlier = times[graph.source[edge]]
        ns = moment - max(earlier, begin_ns)
        if ns <= 0 and earlier <= begin_ns:
            return
        yield edge, max(0.0, float(ns))
        moment = min(moment, earlier)


def largest_parts(sums: Mapping[str, float], total: float) -> str:
    """Return the largest parts of a duration, such as "computation 83%, all_gather 10%"; "" is no name of a part."""
    parts = sorted(((ns, name) for name, ns in sums.items() if name), key=lambda part: -part[0])[:_MAX_PARTS]
    return ", ".join(f"{name} {ns / total:.0%}" for ns, name in parts if total > 0 and ns / total >= _MIN_PART)
