"""Latency and bandwidth of collective algorithms as functions of the ranks and hosts of a group.

A collective consists of consecutive steps, and each step waits for a message. The steps determine the time of small
messages. Large messages keep all links busy, and the busiest link determines the time.

| algorithm | steps | source |
| --- | --- | --- |
| ring all_reduce | 2(n-1) | Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002; NCCL, src/graph/tuning.cc |
| ring all_gather, reduce_scatter | n-1 | the same |
| chain broadcast, reduce (in chunks) | n-1 | NCCL, src/graph/tuning.cc |
| tree all_reduce: up and down | 2 log2(n) | Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521 |
| recursive doubling or halving; binomial tree; dissemination (barrier) | log2(n) | the same |
| all_to_all, gather, scatter: to or from each | n-1 messages | the same |
| send | 1 | |

Logarithms are rounded up. Across h hosts, h of the n hops of a ring are between hosts, and a tree runs within
hosts and then between them (NCCL's tuning.cc: `nInterSteps`, and `log2i(nNodes)` for trees).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from commtrace.operations import OPERATIONS, Schedule

from .bench_operations import BARRIER, POINT_TO_POINT

RING, TREE = "ring", "tree"
ALGORITHMS: Final = (RING, TREE)
CARRIED_OUT_AS: Final = {("gloo", "reduce_scatter"): "all_reduce"}
"""Operations of backends that are another one with the same payload. gloo's bytes of both are equal, as the interface's
counters of `/proc/net/dev` show (torch 2.13, 2 and 4 ranks)."""
IF_ONE_IS_LATE: Final = {("gloo", "all_gather", 2): 1.5}
"""Backend, operation and ranks -> factor of the time of the bytes if a rank calls it later than the others, as ranks
that compute do. gloo sends a block in two halves, each when its receiver has said that it is ready. Two ranks have one
connection, in which the late one says so behind each half of its own block: the other's begins when half of a block has
passed (gloo/allgather.cc). Measured: 1.4 (torch 2.13, 1 and 4 MiB, 0.3 ms late), and 1 with four ranks."""


def steps(op: str, ranks: int, algorithm: str) -> int:
    """Return the number of consecutive messages of an operation among two or more ranks."""
    if op in POINT_TO_POINT:
        return 1
    schedule = OPERATIONS[op].schedule
    one_phase = _log2(ranks) if algorithm == TREE and schedule is not Schedule.DIRECT else ranks - 1
    # Dissemination needs no second phase for a barrier.
    return 2 * one_phase if schedule is Schedule.TWO_PHASES and (op, algorithm) != (BARRIER, TREE) else one_phase


def _log2(number: int) -> int:
    return (number - 1).bit_length()


@dataclass(frozen=True)
class Level:
    """Links within or between hosts: latency of a message, and bandwidth of a rank in each direction."""

    latency_us: float
    bandwidth_gb_per_s: float

    def transfer_us(self, payload: float) -> float:
        """Return the transfer time in microseconds, without latency."""
        return payload / self.bandwidth_gb_per_s / 1e3


@dataclass(frozen=True)
class Cost:
    """Microseconds of a call: its latency, and the transfer of its bytes."""

    latency_us: float
    bandwidth_us: float

    @property
    def total_us(self) -> float:
        """Sum of latency and transfer."""
        return self.latency_us + self.bandwidth_us


def cost(op: str, payload: int, ranks: int, hosts: int, intra: Level, inter: Level) -> Cost:
    """Return the cost of the fastest algorithm in an ideal network.

    In a ring across hosts, only one rank of each host sends to the next host. As libraries do, it has a ring for each
    rank of a host, and together they use the bandwidth of all these ranks.

    Args:
        op: One of `BENCH_OPERATIONS`.
        payload: Bytes.
        ranks: Number of ranks, spread evenly over the hosts.
        hosts: Number of hosts.
        intra: Links within a host.
        inter: Links between hosts: the share of one rank in its host's network.
    """
    return min(_costs(op, payload, ranks, hosts, intra, inter), key=lambda cost: cost.total_us)


def _costs(op: str, payload: int, ranks: int, hosts: int, intra: Level, inter: Level) -> Iterator[Cost]:
    ranks_per_host = -(-ranks // hosts)
    far = inter if hosts > 1 else intra
    if op in POINT_TO_POINT:
        yield Cost(far.latency_us, far.transfer_us(payload))
        return
    schedule = OPERATIONS[op].schedule
    if schedule is Schedule.DIRECT:  # all messages are sent at once, each on its own link
        intra_bytes, inter_bytes = payload * (ranks_per_host - 1) / ranks, payload * (ranks - ranks_per_host) / ranks
        yield Cost(far.latency_us, max(intra.transfer_us(intra_bytes), inter.transfer_us(inter_bytes)))
        return
    rings_gb_per_s = ranks_per_host * inter.bandwidth_gb_per_s if hosts > 1 else intra.bandwidth_gb_per_s
    ring = Level(0.0, min(intra.bandwidth_gb_per_s, rings_gb_per_s))
    ring_latency_us = (ranks - hosts) * intra.latency_us + (hosts - 1) * inter.latency_us
    tree_latency_us = (ranks_per_host - 1) * intra.latency_us + _log2(hosts) * inter.latency_us
    if schedule is Schedule.TWO_PHASES:
        yield Cost(2 * ring_latency_us, ring.transfer_us(2 * payload * (ranks - 1) / ranks))
        yield Cost(2 * tree_latency_us, ring.transfer_us(2 * payload))
    elif schedule is Schedule.ONE_PHASE:
        yield Cost(ring_latency_us, ring.transfer_us(payload * (ranks - 1) / ranks))
    else:
        yield Cost(ring_latency_us, ring.transfer_us(payload))
        hops = ((_log2(ranks_per_host), intra), (_log2(hosts), inter))
        latency_us = sum(steps * level.latency_us for steps, level in hops)
        yield Cost(latency_us, sum(steps * level.transfer_us(payload) for steps, level in hops))
