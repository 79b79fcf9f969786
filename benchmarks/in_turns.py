"""python in_turns.py SOCKET PROGRAM [ARGUMENT ...]: one rank of a training that runs when it is told to.

PROGRAM: a size and a scheme, such as "ordinary FSDP2", or a file in Python. After each step of its first optimizer in
torch, a program looks whether its turn is over, and then writes to the socket, as JSON, the seconds of the turn and its
processor seconds, and waits for the number of steps of the next one; 0 ends it. Ranks are started as torchrun does.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

import groups
import torch
import torch.distributed
import training_steps
from torch.optim.optimizer import register_optimizer_step_post_hook

import commtrace

SIZES: Final = {
    "small": training_steps.TINY,
    "ordinary": training_steps.Size(layers=6, width=256, tokens=64, samples=8),
}

dist: Any = torch.distributed  # its stubs are incomplete


def main() -> None:
    """Train in turns until told to end."""
    descriptor, program, *_ = sys.argv[1:]
    torch.set_num_threads(1)
    groups.keep_memory()
    take_turns(int(descriptor))
    size, _, scheme = program.partition(" ")
    if size in SIZES:
        train(SIZES[size], scheme)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
    raise RuntimeError(f"{program} has ended before its turns; let it train longer")


def train(size: training_steps.Size, scheme: str) -> None:
    """Train until the process ends."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    step = training_steps.SCHEMES[scheme](size)
    while True:
        step()


def take_turns(descriptor: int) -> None:
    """Let the steps of the program's first optimizer wait for their turns."""
    file: Any = socket.socket(fileno=descriptor).makefile("rw")
    first: list[object] = []
    left, began = 1, times()

    def wait_for_turn(optimizer: object, *_: object) -> None:
        nonlocal left, began
        first[:] = first or [optimizer]
        left -= optimizer is first[0]
        if left > 0 or optimizer is not first[0]:
            return
        file.write(f"{json.dumps([end - begin for begin, end in zip(began, times(), strict=True)])}\n")
        file.flush()
        left = int(file.readline() or 0)
        if left == 0:
            commtrace.stop()
            os._exit(0)  # gloo's threads may still run
        began = times()

    register_optimizer_step_post_hook(wait_for_turn)


def times() -> tuple[float, float]:
    """Return the time and the processor time of all threads, s."""
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
