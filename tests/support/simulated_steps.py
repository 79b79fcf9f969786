"""Logs of simulated training steps with a known schedule: computation, collectives, and messages along a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from factory import ALL_REDUCE, RECV, SEND, WORLD, LogFactory, Records, record

from commtrace.schema import Clock, Flag, Phase

MS = 1_000_000
TRANSFER = MS // 2

Delay = Callable[[int, int, Phase], int]
"""Additional computation in ns: (rank, step, phase)."""


def none(rank: int, step: int, phase: Phase) -> int:
    return 0


@dataclass
class Simulation:
    """Ranks that compute and communicate, each with its own time."""

    ranks: int
    seed: int = 0
    delay: Delay = none
    step: int = -1
    now: list[int] = field(init=False)
    rows: list[list[Records]] = field(init=False)
    collectives: int = 0
    messages: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now, self.rows = [1_000] * self.ranks, [[] for _ in range(self.ranks)]
        self._random = np.random.default_rng(self.seed)

    def compute(self, rank: int, ns: int, phase: Phase) -> None:
        """Let a rank compute for `ns`, up to 2 % longer, plus its delay."""
        self.now[rank] += round(ns * (1 + 0.02 * self._random.random())) + self.delay(rank, self.step, phase)

    def all_reduce(self, phase: Phase, *, asynchronous: bool = False) -> None:
        """Add an all_reduce of all ranks. If it is asynchronous, a callback observes its end, and no rank waits."""
        last = max(self.now)
        for rank in range(self.ranks):
            begin, end = self.now[rank], last + TRANSFER + rank
            returned = begin + 1_000 if asynchronous else end
            clock = Clock.FUTURE if asynchronous else Clock.RETURN
            flags = Flag.ASYNC if asynchronous else 0
            times = {"t_begin": begin, "t_return": returned, "t_wait": 0, "t_end": end}
            self._add(rank, phase, kind=ALL_REDUCE, seq=self.collectives, clock=clock, flags=flags, **times)
            self.now[rank] = returned
            if asynchronous:
                self.pending[rank] = max(self.pending.get(rank, 0), end)
        self.collectives += 1

    def wait(self) -> None:
        """Let every rank wait for its asynchronous operations, without recording it."""
        self.now = [max(now, self.pending.get(rank, 0)) for rank, now in enumerate(self.now)]

    pending: dict[int, int] = field(default_factory=dict)

    def message(self, source: int, destination: int, phase: Phase) -> None:
        """Add a message whose send returns at once."""
        number = self.messages[source, destination] = self.messages.get((source, destination), -1) + 1
        sent, posted = self.now[source], self.now[destination]
        end = max(sent, posted) + TRANSFER
        for rank, kind, peer, begin, returned in (
            (source, SEND, destination, sent, sent + 1_000),
            (destination, RECV, source, posted, end),
        ):
            times = {"t_begin": begin, "t_return": returned, "t_wait": 0, "t_end": returned}
            self._add(rank, phase, kind=kind, peer=peer, tag=0, seq=number, clock=Clock.RETURN, **times)
            self.now[rank] = returned

    def _add(self, rank: int, phase: Phase, **fields: int) -> None:
        self.rows[rank].append(record(step=self.step, phase=phase, **fields))

    def write(self, folder: Path) -> None:
        log = LogFactory(folder)
        for rank, rows in enumerate(self.rows):
            process = log.process(rank, pid=100 + rank, world_size=self.ranks, boot_id="a")
            process.known({WORLD: list(range(self.ranks))}, {WORLD: "data"}).write(rows).end()


def data_parallel(simulation: Simulation, steps: int) -> Simulation:
    """Simulate DDP: two asynchronous all_reduces of gradients, waited for in C++ at the end of backward."""
    for simulation.step in range(steps):
        for part in range(2):
            for rank in range(simulation.ranks):
                if part == 0:
                    simulation.compute(rank, 10 * MS, Phase.FORWARD)
                simulation.compute(rank, 10 * MS, Phase.BACKWARD if part else Phase.OTHER)
            simulation.all_reduce(Phase.BACKWARD, asynchronous=True)
        simulation.wait()
        for rank in range(simulation.ranks):
            simulation.compute(rank, 2 * MS, Phase.OPTIMIZER)
        simulation.all_reduce(Phase.OPTIMIZER)
    return simulation


def sharded(simulation: Simulation, steps: int) -> Simulation:
    """Simulate steps like ZeRO-3's, with blocking collectives within forward and backward."""
    for simulation.step in range(steps):
        for phase in (Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            simulation.all_reduce(phase)
            for rank in range(simulation.ranks):
                simulation.compute(rank, 8 * MS, phase)
            simulation.all_reduce(phase)
    return simulation


def evaluated(simulation: Simulation, steps: int, every: int = 3) -> Simulation:
    """Simulate sharded steps, with an evaluation after each `every`-th."""
    for simulation.step in range(steps):
        phases = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
        for phase in phases + [Phase.EVALUATION] * (simulation.step % every == 0):
            simulation.all_reduce(phase)
            for rank in range(simulation.ranks):
                simulation.compute(rank, 8 * MS, phase)
            simulation.all_reduce(phase)
    return simulation


def pipeline(simulation: Simulation, steps: int, micro_batches: int = 3) -> Simulation:
    """Simulate a pipeline: all forward passes, then all backward passes, then an all_reduce."""
    last = simulation.ranks - 1
    for simulation.step in range(steps):
        for _ in range(micro_batches):
            for rank in range(simulation.ranks):
                simulation.compute(rank, 5 * MS, Phase.FORWARD)
                if rank < last:
                    simulation.message(rank, rank + 1, Phase.FORWARD)
        for _ in range(micro_batches):
            for rank in reversed(range(simulation.ranks)):
                simulation.compute(rank, 8 * MS, Phase.BACKWARD)
                if rank:
                    simulation.message(rank, rank - 1, Phase.BACKWARD)
        simulation.all_reduce(Phase.OPTIMIZER)
    return simulation


PROGRAMS = {"data parallel": data_parallel, "sharded": sharded, "pipeline": pipeline}
