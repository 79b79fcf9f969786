"""Some training steps, then a call that does not end: stuck.py KIND. Rank 1 behaves differently."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

KIND = sys.argv[1]
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
given, taken = np.ones(1024), np.zeros(1024)
long: Any = np.ones(4 << 20)
first, second = WORLD.Dup(), WORLD.Dup()
if KIND == "order":
    first.Set_name("first")
    second.Set_name("second")
pair = WORLD.Split(RANK > 1)


def stop() -> None:
    time.sleep(600)


def waits() -> None:
    """Make the call of the other ranks; the diagnosis must name its line."""
    match KIND:
        case "absent" | "killed" | "left" | "operation" | "size":
            WORLD.Allreduce(given, taken)
        case "root":
            WORLD.Bcast(long, 0)
        case "swapped":
            WORLD.Barrier()
        case "order" | "unnamed":
            first.Barrier()
        case "subgroup" if RANK == 0:
            pair.Allreduce(given, taken)
        case "receive" | "tag" if RANK == 0:
            WORLD.Recv(taken, 1, tag=5)
        case "receive of any tag" if RANK == 0:
            WORLD.recv(source=1)
        case "send" if RANK == 0:
            WORLD.Send(long, 1)
        case "cycle":
            WORLD.Recv(taken, (RANK - 1) % SIZE, tag=3)


def differs() -> None:
    """Make the call of rank 1, or none."""
    match KIND:
        case "killed":
            time.sleep(0.3)  # the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)
        case "left":
            sys.exit()
        case "operation":
            WORLD.Barrier()
        case "size":
            WORLD.Allreduce(np.ones(8), np.zeros(8))
        case "root":
            WORLD.Bcast(long, 1)
        case "swapped":
            WORLD.Allreduce(given, taken)
        case "order" | "unnamed":
            second.Barrier()
        case "tag":
            WORLD.Send(given, 0, tag=7)
        case "cycle":
            waits()


def train() -> None:
    """Train in steps of uneven length."""
    while True:
        time.sleep(random.uniform(0, 0.03))
        WORLD.Allreduce(given, taken)
        pair.Barrier()


for _ in range(5):
    time.sleep(0.01)
    WORLD.Allreduce(given, taken)
    pair.Barrier()
if KIND == "train":
    train()
elif KIND != "well":
    differs() if RANK == 1 else waits()
    stop()
