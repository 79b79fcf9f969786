"""Some training steps, then a call that does not end: stuck.py KIND [TIMEOUT]. Rank 1 behaves differently."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import commtrace

KIND = sys.argv[1]
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2]) if len(sys.argv) > 2 else 600))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
ODD = RANK == 1
tensor, long = torch.ones(1024), torch.ones(16 << 20)
first, second = dist.new_group(), dist.new_group()
pair = dist.new_group([0, 1])


def stop() -> None:
    time.sleep(600)


def kill() -> None:
    time.sleep(0.3)  # the others wait by then
    os.kill(os.getpid(), signal.SIGKILL)


def waits() -> None:
    """Make the call of the other ranks; the diagnosis must name its line."""
    match KIND:
        case "absent" | "killed" | "left" | "operation" | "size" | "dtype":
            dist.all_reduce(tensor)
        case "root":
            dist.broadcast(tensor, 0)
        case "swapped":
            dist.all_gather([torch.empty(8) for _ in range(SIZE)], torch.ones(8))
        case "order":
            dist.all_reduce(tensor, group=first)
        case "subgroup" if RANK == 0:
            dist.all_reduce(tensor, group=pair)
        case "receive" | "tag" if RANK == 0:
            dist.recv(tensor, 1, tag=5)
        case "send" if RANK == 0:
            dist.send(long, 1)
        case "cycle":
            dist.recv(tensor, (RANK - 1) % SIZE)


def differs() -> None:
    """Make the call of rank 1, or none."""
    match KIND:
        case "absent" | "subgroup" | "receive" | "send":
            stop()
        case "killed":
            kill()
        case "left":
            sys.exit()
        case "operation":
            dist.broadcast(tensor, 1)
        case "size":
            dist.all_reduce(torch.ones(8))
        case "dtype":
            dist.all_reduce(torch.ones(512, dtype=torch.float64))
        case "root":
            dist.broadcast(tensor, 1)
        case "swapped":
            dist.all_reduce(tensor)
        case "order":
            dist.all_reduce(tensor, group=second)
        case "tag":
            dist.send(tensor, 0, tag=7)
        case "cycle":
            waits()


def train() -> None:
    """Train in steps of uneven length."""
    while True:
        time.sleep(random.uniform(0, 0.03))
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=pair)


for _ in range(5):
    if "COMMTRACE_STEPS" in os.environ:
        commtrace.step()
    time.sleep(0.01)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=pair)
if KIND == "train":
    train()
elif KIND != "well":
    differs() if ODD else waits()
    stop()
