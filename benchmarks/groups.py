"""Process groups for benchmarks, each in its own processes, and blocks of calls that their ranks measure together."""

from __future__ import annotations

import ctypes
import datetime
import os
import socket
import statistics
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
from measuring import PROCESSOR, Round, Row, compared, in_turn
from results import show
from sides import Switch, bare
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = {"fake": 1, "gloo": 2, "nccl": 1}
TIMEOUT = datetime.timedelta(seconds=120)


def run(program: Callable[[Any], list[Row]], options: Any, *, backend: str, bound: bool = True) -> list[Row]:
    """Run a program on each rank and return rank 0's rows. "fake" is one process in a world of eight; it sends nothing.

    "nccl" is one process on the first GPU.

    bound: Whether each rank has its own core, as launchers bind ranks, which removes most of the noise of a small
    machine. In a program that computes nothing, gloo's threads then block each other on that core for milliseconds.
    """
    processes: Any = torch.multiprocessing
    queue = processes.get_context("spawn").SimpleQueue()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler would log each start and stop
    processes.spawn(_rank, (free_port(), backend, bound, program, options, queue), RANKS[backend])
    rows: list[Row] = queue.get()
    return rows


def free_port() -> int:
    """Return a TCP port of this host that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def sleepless() -> Iterator[None]:
    """Let idle cores poll instead of sleep, because the wake-up time of a virtual core is long and varies.

    This uses the kernel's PM QoS, which needs root; without it, cores sleep.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            request = stack.enter_context(open("/dev/cpu_dma_latency", "wb", buffering=0))
            request.write((0).to_bytes(4, "little"))  # maximum wake-up latency in us, while the file is open
        yield


def _rank(
    rank: int, port: int, backend: str, bound: bool, program: Callable[[Any], list[Row]], options: Any, queue: Any
) -> None:
    warnings.filterwarnings("ignore")  # torch would warn again, in timed code, whenever filters change
    torch.set_num_threads(1)
    keep_memory()
    if backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    else:
        if backend == "nccl":
            torch.cuda.set_device(0)
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
    os._exit(0)  # gloo's threads may still run, and would abort a process that exits normally


def keep_memory() -> None:
    """Make malloc keep freed memory, also large blocks, as the allocators of trainings do.

    Otherwise malloc returns the top of the heap to the kernel whenever enough of it is free, and touches it again
    later. How much that is depends on the position of the last small object: any allocation between two steps, even of
    a list, makes the next step of 90 ms 3 % slower or faster (1,800 page faults, as counted by getrusage).
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # of mallopt(3)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        for parameter, value in ((mmap_threshold, 32 << 20), (trim_threshold, 1 << 30), (top_pad, 1 << 20)):
            if not libc.mallopt(parameter, value):
                raise RuntimeError(f"mallopt({parameter}, {value}) was refused")


class Block(NamedTuple):
    """Mean time of a call in a block of calls."""

    wall: float
    """Seconds of the slowest rank."""
    processor: float
    """CPU seconds of all threads of all ranks, which do not grow when other programs use the cores."""


class Amount(NamedTuple):
    """How much to measure."""

    times: int
    """Calls per block."""
    pairs: int
    settle: float
    """Seconds from switching on to the block: a drain thread measures first, and creates its files after 0.1 s."""
    warm: int = 1
    """Calls before that, because the first calls with a tool may touch new memory."""


def block(
    switch: Switch, call: Callable[[], object], amount: Amount, before: Callable[[], object] | None = None
) -> Block:
    """Measure a block, without switching on and off and without the first calls.

    With `before`, that is called before each call and not timed, and the time is the median of the calls.
    """
    with switch():
        for _ in range(amount.warm):
            call()
        time.sleep(amount.settle)
        call()
        dist.barrier()
        synchronize()
        times = [timed(before, call) for _ in range(amount.times)] if before is not None else []
        processor, wall = time.process_time(), time.perf_counter()
        for _ in range(0 if times else amount.times):
            call()
        synchronize()
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
    wall = statistics.median(times) if times else wall / amount.times
    return Block(over_ranks(wall, dist.ReduceOp.MAX), over_ranks(processor / amount.times, dist.ReduceOp.SUM))


def timed(before: Callable[[], object], call: Callable[[], object]) -> float:
    """Return the seconds of a call that follows something else."""
    before()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def synchronize() -> None:
    """Wait until the GPU has done what was submitted, if the program uses one."""
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def over_ranks(value: float, reduce_op: Any) -> float:
    """Return a value reduced over all ranks."""
    reduced = torch.tensor([value], dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(reduced, reduce_op)
    return reduced.item()


@dataclass(frozen=True)
class Comparison:
    """A call, bare and with something switched on."""

    case: str
    name: str
    switch: Switch
    call: Callable[[], object]
    call_with: Callable[[], object] | None = None
    """Called in place of `call` on the other side."""
    base: Switch = bare
    """What is switched on for the bare side."""
    before: Callable[[], object] | None = None
    """What runs before each call and is not timed."""

    def rounds(self, amount: Amount) -> list[tuple[Block, Block, Block]]:
        """Return the blocks of each round: bare, bare again, switched on."""
        return in_turn(
            lambda: block(self.base, self.call, amount, self.before),
            lambda: block(self.switch, self.call_with or self.call, amount, self.before),
            amount.pairs,
        )

    def microseconds(self, amount: Amount) -> Row:
        """Return the time of a call."""
        wall = [Round(*(measured.wall * 1e6 for measured in blocks)) for blocks in self.rounds(amount)]
        return shown(compared(self.case, self.name, "us", wall))

    def milliseconds(self, amount: Amount) -> list[Row]:
        """Return the wall time and the CPU time of a step."""
        rounds = self.rounds(amount)
        wall = [Round(*(measured.wall * 1e3 for measured in blocks)) for blocks in rounds]
        processor = [Round(*(measured.processor * 1e3 for measured in blocks)) for blocks in rounds]
        return [
            shown(compared(self.case, self.name, "ms", wall)),
            shown(compared(f"{self.case}{PROCESSOR}", self.name, "ms", processor)),
        ]


def shown(row: Row) -> Row:
    """Print a row on rank 0, and return it."""
    if dist.get_rank() == 0:
        show(row)
    return row
