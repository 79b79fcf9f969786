"""How latency and bandwidth change with the ranks and hosts of a group.

A collective takes a number of steps, one after the other, each of which waits for a message. Small messages see the
steps; of large ones, all links are busy all the time, and the busiest decides.

| algorithm | steps | source |
| --- | --- | --- |
| ring all_reduce | 2(n-1) | Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; NCCL, src/graph/tuning.cc |
| ring all_gather, reduce_scatter | n-1 | the same |
| chain broadcast, reduce (in chunks) | n-1 | NCCL, src/graph/tuning.cc |
| tree all_reduce: up and down | 2 log2(n) | Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521 |
| recursive doubling or halving; binomial tree; dissemination (barrier) | log2(n) | the same |
| all_to_all, gather, scatter: to or from each | n-1 messages | the same |
| send | 1 | |

Logarithms are rounded up. Over hosts, a ring crosses from one to the next h times of n, and a tree climbs within
hosts and then between them (NCCL's tuning.cc: `nInterSteps`, and `log2i(nNodes)` for trees).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .operations import POINT_TO_POINT

RING, TREE = "ring", "tree"
ALGORITHMS: Final = (RING, TREE)

_THERE_AND_BACK: Final = ("all_reduce", "barrier")
_LINEAR: Final = ("all_to_all", "gather", "scatter")


def steps(op: str, ranks: int, algorithm: str) -> int:
    """Messages one after the other, of an operation among two ranks or more."""
    if op in POINT_TO_POINT:
        return 1
    once = _log2(ranks) if algorithm == TREE and op not in _LINEAR else ranks - 1
    return 2 * once if op == "all_reduce" or (op == "barrier" and algorithm == RING) else once


def _log2(number: int) -> int:
    return (number - 1).bit_length()


@dataclass(frozen=True)
class Level:
    """A step between two ranks, and what a rank can send and receive at the same time."""

    latency_us: float
    bandwidth_gb_per_s: float

    def transfer_us(self, payload: float) -> float:
        """The bandwidth part."""
        return payload / self.bandwidth_gb_per_s / 1e3


@dataclass(frozen=True)
class Cost:
    """Microseconds."""

    latency_us: float
    bandwidth_us: float

    @property
    def total_us(self) -> float:
        """Both."""
        return self.latency_us + self.bandwidth_us


def cost(op: str, payload: int, ranks: int, hosts: int, intra: Level, inter: Level) -> Cost:
    """Of the fastest algorithm above, in an ideal network of two levels, of `ranks` spread evenly over `hosts`.

    `inter` is what a rank has of its host's network. Ranks of one host share theirs in a ring, of which only one rank
    at a time sends to the next host: as libraries do, there are then as many rings as ranks.
    """
    return min(_costs(op, payload, ranks, hosts, intra, inter), key=lambda one: one.total_us)


def _costs(op: str, payload: int, ranks: int, hosts: int, intra: Level, inter: Level) -> Iterator[Cost]:
    here = -(-ranks // hosts)
    far = inter if hosts > 1 else intra
    if op in POINT_TO_POINT:
        yield Cost(far.latency_us, far.transfer_us(payload))
        return
    if op in _LINEAR:  # all messages leave at once, each by its own link
        near_part, far_part = payload * (here - 1) / ranks, payload * (ranks - here) / ranks
        yield Cost(far.latency_us, max(intra.transfer_us(near_part), inter.transfer_us(far_part)))
        return
    ring = Level(
        0.0, min(intra.bandwidth_gb_per_s, here * inter.bandwidth_gb_per_s) if hosts > 1 else intra.bandwidth_gb_per_s
    )
    around = (ranks - hosts) * intra.latency_us + (hosts - 1) * inter.latency_us
    up = (here - 1) * intra.latency_us + _log2(hosts) * inter.latency_us
    if op in _THERE_AND_BACK:
        yield Cost(2 * around, ring.transfer_us(2 * payload * (ranks - 1) / ranks))
        yield Cost(2 * up, ring.transfer_us(2 * payload))
    elif op in ("all_gather", "reduce_scatter"):
        yield Cost(around, ring.transfer_us(payload * (ranks - 1) / ranks))
    else:
        yield Cost(around, ring.transfer_us(payload))
        climb, cross = _log2(here), _log2(hosts)
        yield Cost(
            climb * intra.latency_us + cross * inter.latency_us,
            climb * intra.transfer_us(payload) + cross * inter.transfer_us(payload),
        )
