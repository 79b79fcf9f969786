"""A training that pauses, and goes on: healthy.py KIND SEED. Pauses are longer than a call may last before it is stuck.

"evaluation": rank 0 computes alone, while the others wait; "all evaluate": all compute; "checkpoint": rank 0 writes and
syncs a file, while the others wait; "compilation": rank 0 compiles a module, likewise; "first step": a slow first step
in Python; "garbage": collections of many objects; "uneven": ranks compute for different times in each step; "steps":
steps alone, also while the test suspends the job.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time

import torch
import torch.distributed as dist

KIND, SEED = sys.argv[1], int(sys.argv[2])
PAUSE_SECONDS = 7.0
dist.init_process_group("gloo")
rank = dist.get_rank()
choose = random.Random(SEED)  # the same on all ranks
own = random.Random(SEED * 1000 + rank)
tensor = torch.ones(1024)


def compute(seconds: float) -> None:
    """Compute in Python or in torch."""
    matrix, end = torch.ones(100, 100), time.monotonic() + seconds
    in_torch = choose.random() < 0.5
    while time.monotonic() < end:
        if in_torch:
            torch.mm(matrix, matrix)


def save(seconds: float) -> None:
    """Write and sync a file again and again."""
    end, state = time.monotonic() + seconds, {"weights": torch.ones(1 << 18)}
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.seek(0)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


def compile_module() -> None:
    """Compile a module that is in no cache: processes of their own do most of it."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64))
        torch.compile(module)(torch.ones(8, 64)).sum().backward()


def pause() -> None:
    """Do what the kind names."""
    match KIND:
        case "evaluation" if rank == 0:
            compute(PAUSE_SECONDS)
        case "all evaluate":
            compute(PAUSE_SECONDS)
        case "checkpoint" if rank == 0:
            save(PAUSE_SECONDS)
        case "compilation" if rank == 0:
            compile_module()
        case "garbage":
            kept: list[list[list[int]]] = [[[]] for _ in range(2_000_000)]
            gc.collect()
            del kept


def train(steps: int) -> None:
    """Make steps of two collectives."""
    for _ in range(steps):
        time.sleep(own.uniform(0, 2 if KIND == "uneven" else 0.03))
        dist.all_reduce(tensor)
        dist.barrier()


if KIND == "first step":
    compute(PAUSE_SECONDS)
train(5 if KIND == "uneven" else 40)
for _ in range(choose.randint(1, 2)):
    pause()
    dist.barrier()
    train(2 if KIND == "uneven" else 20)
if KIND == "steps":
    train(100)
dist.destroy_process_group()
