"""Process groups to measure in, each in processes of its own, and blocks that their ranks measure together."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from measuring import Round, Row, compared, in_turn
from results import show
from sides import Switch, bare
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = {"fake": 1, "gloo": 2}
SETTLE_SECONDS = 0.02  # a recording's own thread measures what a call costs when it begins
TIMEOUT = datetime.timedelta(seconds=120)


def run(program: Callable[[Any], list[Row]], options: Any, *, backend: str) -> list[Row]:
    """What rank 0 returns of a program. "fake" is one process that sends nothing to seven others that are not there."""
    queue = processes.get_context("spawn").SimpleQueue()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch.profiler tells of each of its beginnings and ends
    processes.spawn(_rank, (free_port(), backend, program, options, queue), RANKS[backend])
    rows: list[Row] = queue.get()
    return rows


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, port: int, backend: str, program: Callable[[Any], list[Row]], options: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    if backend == "fake":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    else:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=RANKS[backend], timeout=TIMEOUT)
    rows = program(options)
    if rank == 0:
        queue.put(rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still be there, and abort a process that ends in the usual way


def block(switch: Switch, call: Callable[[], object], times: int) -> float:
    """Seconds of one call, of the slowest rank. Switching on and off, and the first two calls, are not in it."""
    with switch():
        call()
        time.sleep(SETTLE_SECONDS)
        call()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        seconds = (time.perf_counter() - begin) / times
    return slowest(seconds)


def slowest(seconds: float) -> float:
    """Of all ranks."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


def compare(
    case: str, name: str, switch: Switch, call: Callable[[], object], *, times: int, pairs: int, unit: str
) -> tuple[Row, list[Round]]:
    """The row of a side, printed as soon as it is known, and the rounds behind it. The unit is "us" or "ms"."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    rounds = in_turn(
        lambda: block(bare, call, times) * scale,
        lambda: block(switch, call, times) * scale,
        pairs,
    )
    row = compared(case, name, unit, rounds)
    if dist.get_rank() == 0:
        show(row)
    return row, rounds
