"""null_works.py BUILD SEED: threads on a backend that returns no Work where NCCL returns none, and that coalesces.

Batches are longer than the ring, so that some of their calls have left it before the batch ends. Prints how many calls
were made. One process; the backend sends nothing.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils.cpp_extension import load

dist: Any = torch.distributed  # its stubs are incomplete

SOURCE: Final = Path(__file__).parents[1] / "hook_programs" / "null_work_backend.cpp"
THREADS: Final = 4
ROUNDS: Final = 60
LONGEST: Final = 100


class Caller:
    """One thread's calls, on a group of its own."""

    def __init__(self, group: Any, seed: str) -> None:
        self.made = 0
        self._group, self._choose = group, random.Random(seed)
        self._kept: list[Any] = []

    def run(self) -> None:
        """Make rounds of calls of a random kind, and wait for, keep or drop the Work of each."""
        for _ in range(ROUNDS):
            work = self._choose.choice(KINDS)(self, self._choose.randrange(1, LONGEST))
            treatment = self._choose.randrange(3)
            if work is not None and treatment == 0:
                work.wait()
            elif treatment == 1:
                self._kept.append(work)
            if self._choose.random() < 0.1:
                self._kept.clear()

    def batch(self, calls: int) -> Any:
        asynchronous = self._choose.random() < 0.7
        with _coalescing_manager(self._group, torch.device("cpu"), async_ops=asynchronous) as manager:
            for _ in range(calls):
                self.made += 1
                dist.broadcast(torch.ones(2), 0, self._group)
        return manager if asynchronous else None

    def messages(self, calls: int) -> Any:
        operations = []
        for _ in range(calls):
            self.made += 2
            operations.append(dist.P2POp(dist.isend, torch.ones(3), 1, self._group))
            operations.append(dist.P2POp(dist.irecv, torch.zeros(3), 1, self._group))
        return dist.batch_isend_irecv(operations)[0]

    def asynchronous(self, calls: int) -> Any:
        self.made += 1
        return dist.all_reduce(torch.ones(calls), group=self._group, async_op=True)

    def synchronous(self, calls: int) -> None:
        for _ in range(calls):
            self.made += 1
            dist.all_reduce(torch.ones(4), group=self._group)


KINDS: Final[tuple[Callable[[Caller, int], Any], ...]] = (
    Caller.batch,
    Caller.messages,
    Caller.asynchronous,
    Caller.synchronous,
)


def main() -> None:
    folder, seed = sys.argv[1:]
    backend: Any = load("null_work_backend", [str(SOURCE)], build_directory=folder, extra_cflags=["-O0"])
    dist.Backend.register_backend("nullwork", lambda store, rank, size, _: backend.create(rank, size), devices=["cpu"])
    dist.init_process_group("nullwork", store=dist.HashStore(), rank=0, world_size=2)
    callers = [Caller(dist.new_group([0, 1]), f"{seed} {thread}") for thread in range(THREADS)]
    threads = [threading.Thread(target=caller.run) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(caller.made for caller in callers), flush=True)
    dist.destroy_process_group()


main()
