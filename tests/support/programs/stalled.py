"""Some calls, then a rank that makes no further one: stalled.py KIND [RANK [LIBRARY [FILE]]].

With the kind "all", every rank stalls. With two kinds, as "sleep,lock", ranks 0 and 1 are a group, of which rank 1
stalls by the first, and ranks 2 and 3 are one, of which rank 3 stalls by the second, a second later.

LIBRARY is "torch" (by default) or "mpi", which loads torch only for a kind that needs it. FILE is what the kind
"storage" writes to.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

KINDS, RANK, LIBRARY, FILE = (*sys.argv[1:], *("lock", "1", "torch", os.devnull)[len(sys.argv) - 1 :])


class Slow:
    """A data set that never delivers."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


def set_up() -> tuple[int, Callable[[], object]]:
    """Return the rank, and a function that sums over all ranks, or over those of the rank's group if there are two."""
    in_pairs = "," in KINDS
    if LIBRARY == "mpi":
        import numpy as np
        from mpi4py import MPI

        given, taken = np.ones(1024), np.zeros(1024)
        world = MPI.COMM_WORLD
        communicator = world.Split(world.Get_rank() // 2) if in_pairs else world
        return world.Get_rank(), lambda: communicator.Allreduce(given, taken)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1024)
    groups = (
        [dist.new_group([0, 1]), dist.new_group([2, 3])] if in_pairs else [dist.group.WORLD] * dist.get_world_size()
    )
    return dist.get_rank(), lambda: dist.all_reduce(tensor, group=groups[dist.get_rank() // 2])


def stall(kind: str) -> None:
    """Stall in a way that the kind names. The test finds each line by its comment."""
    match kind:
        case "sleep" | "all":
            time.sleep(600)  # here: sleep, all
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # here: lock
        case "queue":
            queue.Queue[int]().get()  # here: queue
        case "crashed":
            threading.Thread(target=lambda: [][0]).start()
            queue.Queue[int]().get()  # here: crashed
        case "thread":
            thread = threading.Thread(target=time.sleep, args=(600,))
            thread.start()
            thread.join()  # here: thread
        case "loader":
            from torch.utils.data import DataLoader

            data: DataLoader[int] = DataLoader(Slow(), num_workers=1)  # type: ignore[arg-type]
            for _ in data:  # here: loader
                pass
        case "pipe":
            os.read(os.pipe()[0], 1)  # here: pipe
        case "storage":
            os.write(os.open(FILE, os.O_WRONLY), b"x")  # here: storage
        case "process":
            subprocess.run(["sleep", "600"], check=True)  # here: process
        case "compute":
            count = 0
            while True:  # here: compute
                count += 1  # here: compute
        case "native":
            hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)  # here: native
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "locked":
            ctypes.PyDLL(None).sleep(600)  # unlike CDLL, keeps the interpreter's lock
        case "locked loop":
            sum(itertools.repeat(1))


own_rank, all_reduce = set_up()
for _ in range(5):
    time.sleep(0.01)
    all_reduce()
first, *second = KINDS.split(",")
if own_rank == int(RANK) or KINDS == "all":
    stall(first)
elif second and own_rank == 3:
    time.sleep(1)
    stall(*second)
all_reduce()
