"""Logs of simulated ranks on simulated hosts, with a known schedule and known clocks.

Ranks compute and communicate in one common order; a call waits for the ranks that its operation depends on. Each host's
clock has an offset and a drift, and may be stepped. `Schedule` contains the calls in true time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from factory import LogFactory, Records, record

from commtrace.schema import Clock, Flag, State

ALL_TO_ALL = ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
OPERATIONS = (*ALL_TO_ALL, "broadcast", "scatter", "reduce", "gather", "message")
KINDS = {name: 100 + number for number, name in enumerate((*OPERATIONS[:-1], "send", "recv"))}
FIRST_GROUP = 10

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostClock:
    """A clock that reads t + offset + drift * t, plus the ns of each past step in `steps`, (true time, ns).

    Its rate grows by the fractions of past `rates`, (true time, fraction).
    """

    offset: int
    drift: float
    steps: Sequence[tuple[int, int]] = ()
    rates: Sequence[tuple[int, float]] = ()

    def read(self, times: Times) -> Times:
        """Return its readings at true times."""
        jumps = sum((np.where(times >= at, by, 0) for at, by in self.steps), np.zeros(len(times), np.int64))
        slewed = sum((np.maximum(times - at, 0) * rate for at, rate in self.rates), self.drift * times)
        shown: Times = times + self.offset + np.round(slewed).astype(np.int64) + jumps
        return shown


@dataclass
class Schedule:
    """A program of ranks, and when its calls began and ended in true time.

    Attributes:
        clocks: Clock of each host.
        host_of: Host of each rank.
        groups: Ranks of each group.
        calls: (rank, operation, group, peer, seq, tag, begin, end, clock that observed the end, time at which the last
            rank that it waits for began) of each call.
        ahead: Nanoseconds by which a rank's clock is ahead of its host's.
    """

    clocks: Sequence[HostClock]
    host_of: Sequence[int]
    groups: Sequence[Sequence[int]]
    calls: list[tuple[int, str, int, int, int, int, int, int, Clock, int]] = field(default_factory=list)
    ahead: dict[int, int] = field(default_factory=dict)

    def write(self, folder: Path, **process: object) -> None:
        """Write the log."""
        log = LogFactory(folder)
        ranks = len(self.host_of)
        for rank, host in enumerate(self.host_of):
            rows: list[Records] = []
            own = [call for call in self.calls if call[0] == rank]
            read = self.clocks[host].read
            ahead = self.ahead.get(rank, 0)
            begins, ends = (read(np.array([call[at] for call in own], np.int64)) + ahead for at in (6, 7))
            for number, (_, op, group, peer, seq, tag, _, _, clock, _) in enumerate(own):
                begin, end = int(begins[number]), int(ends[number])
                known = clock != Clock.NONE
                rows.append(
                    record(
                        kind=KINDS[op], group=FIRST_GROUP + group, peer=peer, seq=seq, tag=tag, t_begin=begin,
                        t_return=begin + 1 if clock != Clock.RETURN else end, t_wait=0, t_end=end if known else 0,
                        clock=int(clock), state=int(State.COMPLETE if known else State.UNOBSERVABLE),
                        flags=0 if clock == Clock.RETURN else int(Flag.ASYNC), payload=0 if op == "barrier" else 4096,
                        local=64 if op in ("all_gather", "reduce_scatter", "gather", "scatter") else 0,
                    )
                )  # fmt: skip
            writer = log.process(rank, pid=100 + rank, host=f"node{host:02d}", boot_id=f"b{host}", world_size=ranks)
            for op, kind in KINDS.items():
                writer.add("kinds", id=kind, op=op, variant=op, api="torch", dtype="float32", reduce_op=None)
            for number, members in enumerate(self.groups):
                writer.add("groups", id=FIRST_GROUP + number, ranks=[*members], name=f"g{number}", desc="", index=0)
            writer.known().write(rows).end()


def random_schedule(
    random: np.random.Generator, *, hosts: int, ranks: int, operations: int, stepped: bool = False, gap_ns: int = 10**7
) -> Schedule:
    """Return a random program; ranks are grouped in neighbouring pairs and at random, and all are in one group.

    Args:
        random: Source of randomness.
        hosts: Number of hosts.
        ranks: Number of ranks, at least `hosts`.
        operations: Number of collectives and messages.
        stepped: Whether a clock is stepped forward in the middle; none ever runs backwards.
        gap_ns: Mean time for which a rank computes between its calls.
    """
    host_of = [rank * hosts // ranks for rank in range(ranks)]
    clocks = [
        HostClock(int(random.integers(5 * 10**9, 10**10)), float(random.uniform(-1e-3, 1e-3))) for _ in range(hosts)
    ]
    groups: list[Sequence[int]] = [range(ranks)]
    if ranks > 2:
        groups += [sorted({rank, (rank + 1) % ranks}) for rank in range(0, ranks, 2)]
        groups += [sorted(random.choice(ranks, random.integers(2, ranks), replace=False).tolist()) for _ in range(3)]
    schedule = Schedule(clocks, host_of, groups)
    now = np.full(ranks, 10**9, np.int64)
    used: dict[tuple[int, ...], int] = {}
    fastest = int(random.integers(10_000, 100_000))
    for _ in range(operations):
        group = int(random.integers(len(groups)))
        members = np.array(groups[group])
        op = str(random.choice(OPERATIONS))
        now[members] += random.exponential(gap_ns, len(members)).astype(np.int64)
        tag, peers = -1, np.full(len(members), -1)
        if op == "message":
            members = random.choice(members, 2, replace=False)
            tag, peers = int(random.integers(3)), members[::-1]
            ops, sources, targets = ["send", "recv"], np.array([True, False]), np.array([False, True])
        else:
            ops = [op] * len(members)
            root = members == random.choice(members)
            sources = targets = np.ones(len(members), bool)
            if op not in ALL_TO_ALL:
                peers = np.full(len(members), int(members[root][0]))
                sources, targets = (root, ~root) if op in ("broadcast", "scatter") else (~root, root)
        channel = (group, *(members.tolist() if op == "message" else ()), tag)
        seq = used[channel] = used.get(channel, -1) + 1
        begin = now[members].copy()
        last = int(begin[sources].max())
        transfer = fastest + random.exponential(fastest, len(members)).astype(np.int64)
        done = np.where(targets, np.maximum(begin, last), begin) + transfer
        for rank, name, peer, start, end in zip(members, ops, peers, begin, done, strict=True):
            clock = Clock(int(random.choice([1, 1, 1, 2, 3, 5, 0])))
            late = int(random.exponential(gap_ns)) if clock in (Clock.WAIT, Clock.TEST) else 0
            values = (int(rank), name, group, int(peer), seq, tag, int(start), int(end) + late, clock, last)
            schedule.calls.append(values)
            now[rank] = end + late
    if stepped:
        host, length = int(random.integers(hosts)), int(now.max()) - 10**9
        step = 10**9 + int(length * random.uniform(0.3, 0.7)), int(random.integers(10**8, 10**9))
        clocks[host] = replace(clocks[host], steps=[step])
    return schedule
