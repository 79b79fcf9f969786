"""Random programs whose schedule is known: what each rank does, and a simulator that runs them and writes their log.

The simulator is another program than the replay: each rank executes its instructions until it must wait for others,
again and again, until all have ended. Changed times give the truth that a replay of the log must predict.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from factory import ALL_REDUCE, BARRIER, RECV, SEND, LogFactory, Records, record

from commtrace.schema import Clock, Flag, Phase, Purpose

US: Final = 1_000
BROADCAST: Final = 7
GRADIENTS_SITE: Final = 9
PARAMETERS_SITE: Final = 8
PURPOSES: Final = {GRADIENTS_SITE: Purpose.GRADIENTS, PARAMETERS_SITE: Purpose.PARAMETERS_FORWARD}
KIND_ROWS: Final = ({"id": BROADCAST, "op": "broadcast", "variant": "broadcast_", "api": "torch", "dtype": "float32"},)
BACKWARD, OPTIMIZER = Phase.BACKWARD, Phase.OPTIMIZER


@dataclass
class Operation:
    """An operation: its kind, ranks (of a message: source, destination), root, and time to transfer on each rank."""

    kind: int
    ranks: tuple[int, ...]
    root: int
    transfer: dict[int, int]
    seq: int
    is_async: bool
    is_buffered: bool = False
    """Whether a send ends before its receive arrives."""
    payload: int = 1 << 20
    site: int = 2
    """Row of the sites table; one of PURPOSES: a call with that purpose."""


class Instruction(NamedTuple):
    """What a rank does: compute for some ns, call an operation, or wait for one."""

    what: str
    ns: int = 0
    operation: int = -1
    phase: Phase = BACKWARD
    step: int = 0


@dataclass
class Program:
    """The instructions of each rank, and the operations."""

    ranks: int
    operations: list[Operation] = field(default_factory=list)
    instructions: list[list[Instruction]] = field(default_factory=list)


@dataclass
class Ran:
    """One execution: when each call began, returned and ended, and when each rank waited for it, by (rank, number)."""

    begun: dict[tuple[int, int], int]
    returned: dict[tuple[int, int], int]
    ended: dict[tuple[int, int], int]
    waited: dict[tuple[int, int], int]
    step_ends: dict[tuple[int, int], int]

    def step_ns(self, ranks: int, steps: range) -> list[int]:
        """Return the duration of each step of the job."""
        ends = {step: max(self.step_ends[rank, step] for rank in range(ranks)) for step in (steps[0] - 1, *steps)}
        return [ends[step] - ends[step - 1] for step in steps]


LAUNCH: Final = 3 * US


Scale = Callable[[int], int]
"""Returns a changed time in ns."""


def unchanged(ns: int) -> int:
    """Return the time."""
    return ns


def run(program: Program, compute: Scale = unchanged, transfer: Scale = unchanged) -> Ran:
    """Execute a program with other times of computation and transfer."""
    time, at = [1_000_000] * program.ranks, [0] * program.ranks
    ran = Ran({}, {}, {}, {}, {})
    queued: dict[int, list[int]] = defaultdict(list)  # background operations of all ranks, by rank
    while any(at[rank] < len(program.instructions[rank]) for rank in range(program.ranks)):
        progress = False
        for rank in range(program.ranks):
            while at[rank] < len(program.instructions[rank]):
                instruction = program.instructions[rank][at[rank]]
                key = rank, instruction.operation
                if instruction.what == "compute":
                    time[rank] += compute(instruction.ns)
                elif instruction.what == "call":
                    if key not in ran.begun:
                        ran.begun[key] = time[rank]
                        progress = True
                        if len(program.operations[instruction.operation].ranks) > 2:
                            queued[rank].append(instruction.operation)
                    if program.operations[instruction.operation].is_async:
                        time[rank] += LAUNCH
                        ran.returned[key] = time[rank]
                    else:
                        if (end := _end(program, ran, queued, *key, transfer)) is None:
                            break
                        time[rank] = ran.returned[key] = end
                elif instruction.what == "wait":
                    if (end := _end(program, ran, queued, *key, transfer)) is None:
                        break
                    ran.waited[key] = time[rank]
                    time[rank] = max(time[rank], end)
                if instruction.what != "compute":
                    ran.step_ends[rank, instruction.step] = time[rank]
                at[rank] += 1
                progress = True
        assert progress, "the program hangs"
    return ran


def _end(
    program: Program, ran: Ran, queued: dict[int, list[int]], rank: int, number: int, transfer: Scale
) -> int | None:
    """Return when an operation ends on a rank, None if that is not yet known."""
    if (rank, number) in ran.ended:
        return ran.ended[rank, number]
    operation = program.operations[number]
    if operation.kind in (ALL_REDUCE, BARRIER):
        sources = operation.ranks
    elif operation.kind == BROADCAST:
        sources = (operation.root,)
    elif operation.is_buffered and rank == operation.ranks[0]:
        sources = (rank,)
    else:
        sources = operation.ranks
    if any((source, number) not in ran.begun for source in sources):
        return None
    released = max(ran.begun[rank, number], *(ran.begun[source, number] for source in sources))
    before = queued[rank][: queued[rank].index(number)] if number in queued[rank] else []
    if operation.is_async and before:  # operations of a group run one after the other
        if (end := _end(program, ran, queued, rank, before[-1], transfer)) is None:
            return None
        released = max(released, end)
    ran.ended[rank, number] = released + transfer(operation.transfer[rank])
    return ran.ended[rank, number]


def random_program(chance: random.Random, ranks: int, steps: int) -> Program:
    """Return a program of 3 or more ranks: calls and background operations of all ranks, messages between two."""
    program = Program(ranks, [], [[] for _ in range(ranks)])
    everyone = tuple(range(ranks))
    messages: dict[tuple[int, int], int] = defaultdict(int)
    collectives = 0

    def operation(kind: int, members: tuple[int, ...], seq: int, *, is_async: bool) -> int:
        times = {rank: chance.randint(5, 400) * US for rank in members}
        buffered = kind == SEND and chance.random() < 0.5
        root = chance.choice(members)
        program.operations.append(Operation(kind, members, root, times, seq, is_async, buffered))
        return len(program.operations) - 1

    for step in range(steps):
        for phase in (BACKWARD, OPTIMIZER):
            pending = []
            for _ in range(chance.randint(1, 4)):
                for rank in everyone:
                    if chance.random() < 0.9:
                        own = chance.randint(1, 1000) * US
                        program.instructions[rank].append(Instruction("compute", own, -1, phase, step))
                if chance.random() < 0.3:
                    source, destination = chance.sample(everyone, 2)
                    number = operation(SEND, (source, destination), messages[source, destination], is_async=False)
                    messages[source, destination] += 1
                    members: tuple[int, ...] = (source, destination)
                else:
                    is_async = chance.random() < 0.5
                    kind = chance.choice([ALL_REDUCE, ALL_REDUCE, BROADCAST])
                    number = operation(kind, everyone, collectives, is_async=is_async)
                    collectives += 1
                    members = everyone
                    if is_async:
                        pending.append(number)
                for rank in members:
                    program.instructions[rank].append(Instruction("call", 0, number, phase, step))
            for number in pending:
                for rank in everyone:
                    if chance.random() < 0.5:
                        own = chance.randint(1, 300) * US
                        program.instructions[rank].append(Instruction("compute", own, -1, phase, step))
                    program.instructions[rank].append(Instruction("wait", 0, number, phase, step))
        closing = operation(BARRIER, everyone, collectives, is_async=False)
        collectives += 1
        for rank in everyone:
            program.instructions[rank].append(Instruction("call", 0, closing, OPTIMIZER, step))
    return program


def write(program: Program, ran: Ran, folder: Path, clock: Clock = Clock.FUTURE) -> None:
    """Write the log of an execution; `clock` observes the ends of background operations."""
    log = LogFactory(folder)
    everyone = [*range(program.ranks)]
    for rank in everyone:
        files = log.process(rank, pid=4711 + rank, world_size=program.ranks)
        files.known({1: everyone}, {1: "data"})
        for row in KIND_ROWS:
            files.add("kinds", **row)
        for site, purpose in PURPOSES.items():
            files.add(
                "sites", id=site, file="train.py", line=1, function="main", purpose={"name": purpose.value}
            )  # fmt: skip
        rows = [
            _record(program, ran, rank, instruction, clock)
            for instruction in program.instructions[rank]
            if instruction.what == "call"
        ]
        files.write(rows).end()


def _record(program: Program, ran: Ran, rank: int, instruction: Instruction, observer: Clock) -> Records:
    operation, key = program.operations[instruction.operation], (rank, instruction.operation)
    kind, peer = operation.kind, operation.root if operation.kind == BROADCAST else -1
    if kind == SEND:
        source, destination = operation.ranks
        kind, peer = (SEND, destination) if rank == source else (RECV, source)
    payload = 0 if kind == BARRIER else 64 if operation.is_buffered else operation.payload
    clock = observer if operation.is_async else Clock.RETURN
    times = {"t_begin": ran.begun[key], "t_return": ran.returned[key], "t_end": ran.ended[key]}
    if clock == Clock.WAIT:
        times["t_end"] = max(times["t_end"], ran.waited[key])
    return record(
        kind=kind, seq=operation.seq, peer=peer, payload=payload, site=operation.site,
        t_wait=ran.waited[key] if operation.is_async else 0, clock=clock,
        flags=int(Flag.ASYNC) if operation.is_async else 0, phase=instruction.phase, step=instruction.step, **times,
    )  # fmt: skip


def shows_buffered(program: Program, ran: Ran, since: int) -> bool:
    """Return whether an execution shows after a moment that sends are buffered, or has no such sends."""
    buffered = [(number, *own.ranks) for number, own in enumerate(program.operations) if own.is_buffered]
    later = [send for send in buffered if ran.begun[send[1], send[0]] >= since]
    return not buffered or any(ran.ended[source, number] < ran.begun[to, number] for number, source, to in later)
