"""python in_turns.py SOCKET PIECES PROGRAM [ARGUMENT ...]: one rank of a training that runs when it is told to.

PROGRAM: a size and a scheme, such as "ordinary FSDP2", or a file in Python. After each step of its first optimizer in
torch, a program looks whether its turn is over, and then writes to the socket, as JSON, what the turn took (`Times`),
and waits for the next turn: the number of steps, whether they are recorded, and whether functions of commtrace are
looked for in their pieces. No steps end it, and it writes the pieces of the steps of all turns (`operators`) to the
file PIECES. Ranks are started as torchrun does.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import groups
import operators
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
    descriptor, pieces, program, *_ = sys.argv[1:]
    torch.set_num_threads(1)
    groups.keep_memory()
    register_optimizer_step_post_hook(Turns(int(descriptor), Path(pieces)).step_ended)
    size, _, scheme = program.partition(" ")
    if size in SIZES:
        train(SIZES[size], scheme)
    sys.argv = sys.argv[3:]
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

    def __init__(self, descriptor: int, pieces: Path) -> None:
        self._steps, self._pieces = operators.Steps(), pieces
        self._file: Any = socket.socket(fileno=descriptor).makefile("rw")
        self._recording = switching.Recording()
        self._first: object = None
        self._is_timed, self._left, self._began = True, 1, Times.now()
        self._steps.turn_begins()

    def step_ended(self, optimizer: object, *_: object) -> None:
        """Count a step. If it is the last one of its turn, tell the times, and wait for the next turn."""
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        if self._is_timed:
            self._steps.step_ended()
            self._left -= 1
            if self._left:
                return
            took = [end - begin for begin, end in zip(self._began, Times.now(), strict=True)]
            self._file.write(f"{json.dumps(took)}\n")
            self._file.flush()
            self._wait()
        else:
            self._is_timed = True
            self._steps.turn_begins()
        self._began = Times.now()

    def _wait(self) -> None:
        """Wait for the next turn, and switch the recorder. The step after that is not timed."""
        line = self._file.readline()
        self._left, recorded, looks = json.loads(line) if line else (0, True, False)
        if self._left == 0:
            commtrace.stop()
            self._steps.write(self._pieces)
            os._exit(0)  # gloo's threads may still run
        self._recording.switch(on=recorded)
        self._steps.look_away()
        if looks:
            self._steps.look(one.replacement for one in switching.replacements())
        self._is_timed = False


class Times(NamedTuple):
    """Clocks and counters of a rank, or what a turn of it took, s."""

    wall: float
    processor: float
    """Of all threads."""

    @classmethod
    def now(cls) -> Times:
        """Return the present values."""
        return cls(time.perf_counter(), time.process_time())


if __name__ == "__main__":
    main()
