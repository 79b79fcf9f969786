"""Some calls, then a rank that makes no further one: stalled.py KIND [RANK]; with "all", every rank stalls."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

KIND, RANK = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
dist.init_process_group("gloo")
tensor = torch.ones(1024)


class Slow(torch.utils.data.Dataset[torch.Tensor]):
    """A data set that never delivers."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(600)
        return tensor


def stall() -> None:
    """Stall in a way that the kind names. The test finds each line by its comment."""
    match KIND:
        case "sleep" | "all":
            time.sleep(600)  # here: sleep, all
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # here: lock
        case "queue":
            queue.Queue[int]().get()  # here: queue
        case "thread":
            thread = threading.Thread(target=time.sleep, args=(600,))
            thread.start()
            thread.join()  # here: thread
        case "loader":
            for _ in DataLoader(Slow(), num_workers=1):  # here: loader
                pass
        case "pipe":
            os.read(os.pipe()[0], 1)  # here: pipe
        case "process":
            subprocess.run(["sleep", "600"], check=True)  # here: process
        case "compute":
            count = 0
            while True:  # here: compute
                count += 1  # here: compute
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "locked":
            ctypes.PyDLL(None).sleep(600)  # unlike CDLL, keeps the interpreter's lock


for _ in range(5):
    time.sleep(0.01)
    dist.all_reduce(tensor)
if dist.get_rank() == RANK or KIND == "all":
    stall()
dist.all_reduce(tensor)
