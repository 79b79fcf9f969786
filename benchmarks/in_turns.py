"""python in_turns.py SOCKET PROGRAM [ARGUMENT ...]: one rank of a training that runs when it is told to.

PROGRAM: a size and a scheme, such as "ordinary FSDP2", or a file in Python. After each step of its first optimizer in
torch, a program looks whether its turn is over, and then writes to the socket, as JSON, the seconds of the turn and its
processor seconds, and waits for the next turn: the number of steps, and whether they are recorded. No steps end it.
Ranks are started as torchrun does.
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
import switching
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
    register_optimizer_step_post_hook(Turns(int(descriptor)).step_ended)
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


class Turns:
    """Lets the steps of the program's first optimizer wait for their turns."""

    def __init__(self, descriptor: int) -> None:
        self._file: Any = socket.socket(fileno=descriptor).makefile("rw")
        self._recording = switching.Recording()
        self._first: object = None
        self._is_timed, self._left, self._began = True, 1, times()

    def step_ended(self, optimizer: object, *_: object) -> None:
        """Count a step. If it is the last one of its turn, tell the times, and wait for the next turn."""
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        if self._is_timed:
            self._left -= 1
            if self._left:
                return
            times_of_turn = [end - begin for begin, end in zip(self._began, times(), strict=True)]
            self._file.write(f"{json.dumps(times_of_turn)}\n")
            self._file.flush()
            self._wait()
        else:
            self._is_timed = True
        self._began = times()

    def _wait(self) -> None:
        """Wait for the next turn, and switch the recorder. The step after that is not timed."""
        line = self._file.readline()
        self._left, recorded = json.loads(line) if line else (0, True)
        if self._left == 0:
            commtrace.stop()
            os._exit(0)  # gloo's threads may still run
        self._recording.switch(on=recorded)
        self._is_timed = False


def times() -> tuple[float, float]:
    """Return the time and the processor time of all threads, s."""
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
