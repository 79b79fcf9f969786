"""Process groups to measure in, each in processes of its own, and blocks that their ranks measure together."""

from __future__ import annotations

import ctypes
import datetime
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from measuring import Round, Row, compared, in_turn
from results import show
from sides import Switch, bare
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = {"fake": 1, "gloo": 2}
PROCESSOR = ", CPU time"
TIMEOUT = datetime.timedelta(seconds=120)


def run(program: Callable[[Any], list[Row]], options: Any, *, backend: str, bound: bool = True) -> list[Row]:
    """What rank 0 returns of a program. "fake" is one process that sends nothing to seven others that are not there.

    bound: each rank has a core of its own, as launchers bind ranks: most of the noise of a small machine is gone. Where
    nothing is computed, gloo's threads hold each other up on that core, for milliseconds.
    """
    processes: Any = torch.multiprocessing
    queue = processes.get_context("spawn").SimpleQueue()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler tells of each of its beginnings and ends
    processes.spawn(_rank, (free_port(), backend, bound, program, options, queue), RANKS[backend])
    rows: list[Row] = queue.get()
    return rows


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def sleepless() -> Iterator[None]:
    """Idle cores poll and do not sleep (PM QoS of the kernel, root's): a virtual core takes long to wake up, now more,
    now less. Where that cannot be asked for, they sleep.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            request = stack.enter_context(open("/dev/cpu_dma_latency", "wb", buffering=0))
            request.write((0).to_bytes(4, "little"))  # microseconds until a core runs; as long as it is open
        yield


def _rank(
    rank: int, port: int, backend: str, bound: bool, program: Callable[[Any], list[Row]], options: Any, queue: Any
) -> None:
    warnings.filterwarnings("ignore")  # of torch, in the middle of what is timed, each time that filters have changed
    torch.set_num_threads(1)
    keep_memory()
    if backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    else:
        if bound:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=RANKS[backend], timeout=TIMEOUT)
    rows = program(options)
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still be there, and abort a process that ends in the usual way


def keep_memory() -> None:
    """Have malloc keep what is freed, and for large blocks, too, as the allocators of trainings do.

    Otherwise it gives the top of the heap back whenever enough of it is free, and touches it anew: how much that is
    depends on where the last small object happens to lie, so that whatever allocates between two steps, were it a
    list, makes the next step of 90 ms 3 % slower or faster (1,800 page faults, seen by getrusage).
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of mallopt(3)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        for parameter, value in ((mmap_threshold, 32 << 20), (trim_threshold, 1 << 30), (top_pad, 1 << 20)):
            if not libc.mallopt(parameter, value):
                raise RuntimeError(f"mallopt({parameter}, {value}) was refused")


class Block(NamedTuple):
    """What one call took in a block of calls."""

    wall: float
    """Seconds, of the slowest rank."""
    processor: float
    """Seconds of CPU time, of all threads of all ranks: it does not grow when other programs take the cores."""


class Amount(NamedTuple):
    """How much to measure."""

    times: int
    """Calls of one block."""
    pairs: int
    settle: float
    """Seconds from switching on to the block: a recording's thread measures first, and after 0.1 s begins its files."""
    warm: int = 1
    """Calls before that: what is switched on may touch memory for the first time there."""


def block(switch: Switch, call: Callable[[], object], amount: Amount) -> Block:
    """Measure a block. Switching on and off, and the first calls, are not in it."""
    with switch():
        for _ in range(amount.warm):
            call()
        time.sleep(amount.settle)
        call()
        dist.barrier()
        processor, wall = time.process_time(), time.perf_counter()
        for _ in range(amount.times):
            call()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Block(
        over_ranks(wall / amount.times, dist.ReduceOp.MAX), over_ranks(processor / amount.times, dist.ReduceOp.SUM)
    )


def over_ranks(value: float, reduce_op: Any) -> float:
    """Of every rank's value."""
    mine = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(mine, reduce_op)
    return mine.item()


@dataclass(frozen=True)
class Comparison:
    """One call, bare and with something switched on."""

    case: str
    name: str
    switch: Switch
    call: Callable[[], object]
    call_with: Callable[[], object] | None = None
    """Called instead where it is switched on."""
    base: Switch = bare
    """What is on at the bare side."""

    def rounds(self, amount: Amount) -> list[tuple[Block, Block, Block]]:
        """Bare, bare again, switched on."""
        return in_turn(
            lambda: block(self.base, self.call, amount),
            lambda: block(self.switch, self.call_with or self.call, amount),
            amount.pairs,
        )

    def microseconds(self, amount: Amount) -> Row:
        """What a call takes."""
        rounds = self.rounds(amount)
        return shown(compared(self.case, self.name, "us", [Round(*(one.wall * 1e6 for one in r)) for r in rounds]))

    def milliseconds(self, amount: Amount) -> list[Row]:
        """What a step takes, and what of the processors."""
        rounds = self.rounds(amount)
        wall = [Round(*(one.wall * 1e3 for one in r)) for r in rounds]
        processor = [Round(*(one.processor * 1e3 for one in r)) for r in rounds]
        return [
            shown(compared(self.case, self.name, "ms", wall)),
            shown(compared(f"{self.case}{PROCESSOR}", self.name, "ms", processor)),
        ]


def shown(row: Row) -> Row:
    """A row that rank 0 has printed."""
    if dist.get_rank() == 0:
        show(row)
    return row
