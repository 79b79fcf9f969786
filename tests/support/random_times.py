"""Random logs of training steps: every operation, sub-groups, asynchronous calls, missing ranks and skewed clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from factory import LogFactory, record

from commtrace.operations import OPERATIONS
from commtrace.schema import Clock, Flag, Phase, Purpose, State

OPS = [*OPERATIONS]
ROOTED = ("broadcast", "scatter", "reduce", "gather")
MESSAGES = ("send", "recv")
UNTIMED = [op for op in OPS if OPERATIONS[op].wait_state is None]
"""Operations whose waits are not known: one-sided calls, prefix reductions, sendrecv."""
ROLES = ("data", "tensor", "pipeline", "world")
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
GRADIENTS_SITE = 30
US = 1_000


@dataclass
class RandomLog:
    """A random program of ranks on hosts with own clocks.

    Attributes:
        host_of: Host of each rank.
        offset: What each host's clock shows at true time 0, ns.
        groups: Ranks of each group; group 0 has all ranks.
        calls: The records of each rank as dictionaries, with `op` and `group_ranks`; times on its host's clock.
        missing: Ranks that left no log.
    """

    host_of: list[int]
    offset: list[int]
    groups: list[list[int]]
    missing: set[int]
    calls: list[list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.calls = [[] for _ in self.host_of]
        self._now = [10**9 + 10_000 * rank for rank in range(len(self.host_of))]
        self._used: dict[tuple[int, ...], int] = {}
        self._pending: list[list[dict[str, Any]]] = [[] for _ in self.host_of]

    def compute(self, rank: int, ns: int) -> None:
        self._now[rank] += ns

    def number(self, *channel: int) -> int:
        """Return the number of the next operation of a channel."""
        self._used[channel] = self._used.get(channel, -1) + 1
        return self._used[channel]

    def operation(self, op: str, group: int, ranks: list[int], random: np.random.Generator, **fields: int) -> None:
        """Add the calls of one operation: of `ranks`, or of the sender and receiver if `op` is "send"."""
        members = ranks if op != "send" else ranks[:2]
        root = int(random.choice(members))
        tag = int(random.integers(2)) if op in ("send", "sendrecv") else -1
        seq = self.number(group, *(members if op == "send" else ()), tag)
        begins = {rank: self._now[rank] for rank in members}
        transfer = int(random.integers(5 * US, 400 * US))
        buffered = bool(random.random() < 0.5)
        uneven = op == "all_to_all" and random.random() < 0.3
        for place, rank in enumerate(members):
            name, peer = op, root if op in ROOTED else -1
            sources = members
            if op == "send":
                name, peer = MESSAGES[place], members[1 - place]
                sources = members[:1] if place or buffered else members
            elif op in ("broadcast", "scatter"):
                sources = [root]
            elif op in ("reduce", "gather"):
                sources = members if rank == root else [rank]
            elif op in UNTIMED:
                sources, peer = [rank], members[place - 1]
            ready = max(begins[other] for other in {*sources, rank})
            end = ready + transfer + int(random.integers(20 * US))
            self._call(rank, name, random, end, group=group, peer=peer, seq=seq, tag=tag, uneven=uneven, **fields)

    def _call(self, rank: int, op: str, random: np.random.Generator, end: int, *, uneven: bool, **fields: int) -> None:
        begin = self._now[rank]
        kind = random.choice(
            ["return", "wait", "async", "future", "unseen", "failed"], p=[0.4, 0.15, 0.25, 0.1, 0.08, 0.02]
        )
        call: dict[str, Any] = {
            "op": op,
            "payload": 0 if op == "barrier" else 4096,
            "local": 64 * (op != "barrier"),
            "flags": Flag.UNEVEN * uneven,
            **fields,
        }
        returned = end if kind == "return" else begin + int(random.integers(1, 30 * US))
        times = {"t_begin": begin, "t_return": returned, "t_wait": 0, "t_end": end}
        clock, state = Clock.RETURN, State.COMPLETE
        if kind == "wait":
            times["t_wait"], times["t_end"], clock = returned, max(end, returned), Clock.WAIT
        elif kind in ("async", "future"):
            clock = Clock.FUTURE if kind == "future" or random.random() < 0.5 else Clock.WAIT
            call["flags"] |= Flag.ASYNC
            times["t_end"] = max(end, returned)
        elif kind == "unseen":
            times["t_end"], clock, state = 0, Clock.NONE, State.UNOBSERVABLE
        elif kind == "failed":
            state = State.FAILED
        call |= {**times, "clock": int(clock), "state": int(state), "flags": int(call["flags"])}
        self._now[rank] = max(returned, call["t_end"]) if kind in ("return", "wait") else returned
        self.calls[rank].append(call)
        if kind == "async":
            self._pending[rank].append(call)

    def wait(self, rank: int) -> None:
        """Wait for all asynchronous calls of a rank."""
        for call in self._pending[rank]:
            call["t_wait"] = self._now[rank]
            if call["clock"] == Clock.WAIT:
                call["t_end"] = max(call["t_end"], self._now[rank] + 100)
            self._now[rank] = max(self._now[rank], call["t_end"])
        self._pending[rank].clear()

    def write(self, folder: Path) -> None:
        """Write the log, with times on the hosts' clocks."""
        log = LogFactory(folder)
        for rank, host in enumerate(self.host_of):
            for call in self.calls[rank]:
                for name in ("t_begin", "t_return", "t_wait", "t_end"):
                    call[name] += self.offset[host] if call[name] else 0
            if rank in self.missing:
                continue
            process = log.process(rank, pid=100 + rank, host=f"node{host}", boot_id=f"b{host}",
                                  world_size=len(self.host_of), mono_ns=self.offset[host] + 1)  # fmt: skip
            for number, op in enumerate(OPS, 20):
                process.add("kinds", id=number, op=op, variant=op, api="torch", dtype="float32", reduce_op=None)
            groups: dict[int, Sequence[int]] = {10 + number: ranks for number, ranks in enumerate(self.groups)}
            process.known(groups, {number: ROLES[number % len(ROLES)] for number in groups})
            purpose = {"name": Purpose.GRADIENTS.value}
            process.add("sites", id=GRADIENTS_SITE, file="train.py", line=1, function="main", purpose=purpose)
            process.write(
                record(**{name: value for name, value in call.items() if name not in ("op", "group")},
                       kind=20 + OPS.index(call["op"]), group=10 + call["group"])
                for call in self.calls[rank]
            ).end()  # fmt: skip


def random_log(seed: int) -> RandomLog:
    """Return a random log of two to five ranks on one to three hosts."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 6))
    hosts = int(random.choice([1, 1, 2, 3]))
    groups = [
        [*range(ranks)],
        [0],
        *(sorted(random.choice(ranks, random.integers(2, ranks + 1), replace=False).tolist()) for _ in range(3)),
    ]
    offset = [int(random.integers(10**9, 10**10)) for _ in range(hosts)]
    missing = {int(random.integers(ranks))} if random.random() < 0.15 and ranks > 2 else set()
    log = RandomLog([rank * hosts // ranks for rank in range(ranks)], offset, groups, missing)
    for step in range(-1, int(random.integers(1, 7))):
        evaluates = step >= 0 and random.random() < 0.1
        for phase in (*((Phase.EVALUATION,) if evaluates else ()), *PHASES):
            for _ in range(int(random.integers(1, 7))):
                op = str(random.choice([op for op in OPS if op != "recv"]))
                group = int(random.choice([0, 0, 0, 1, 2, 3, 4]))
                if op == "send" and len(groups[group]) < 2:
                    continue
                order = random.permutation(groups[group]).tolist() if op == "send" else groups[group]
                site = GRADIENTS_SITE if random.random() < 0.3 else 1
                log.operation(op, group, order, random, step=step, phase=int(phase), site=site)
                for rank in groups[group]:
                    log.compute(rank, int(random.exponential(300 * US)) * (20 if random.random() < 0.05 else 1))
            for rank in range(ranks):
                if phase == PHASES[-1] or random.random() < 0.5:
                    log.wait(rank)
    return log
