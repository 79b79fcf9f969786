"""many_events.py KIND NUMBER: repeats something very often, and prints how much memory it takes.

One process, on a process group that sends no bytes. Prints a line of JSON after each hundredth of the work:

    {"made": 500000, "calls": 500000, "resident_kib": 412304, "seconds": 2.31}
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import commtrace
from commtrace.recording.session import session

dist: Any = torch.distributed  # its stubs are incomplete

PARTS: Final = 100
PAGE_KIB: Final = os.sysconf("SC_PAGE_SIZE") // 1024
ONE: Final = torch.ones(1)


def calls(number: int) -> int:
    """Make calls as fast as Python can: the loop is in C, and no Work is kept."""
    all_reduce = dist.group.WORLD.allreduce
    deque(map(all_reduce, itertools.repeat(ONE, number)), maxlen=0)
    return number


def groups(number: int) -> int:
    """Create groups, use each once, and destroy it."""
    for _ in range(number):
        group = dist.new_group([0, 1], backend="fake")
        dist.all_reduce(ONE, group=group)
        dist.destroy_process_group(group)
    return number


def threads(number: int) -> int:
    """Start threads that make one call each."""
    for _ in range(number):
        thread = threading.Thread(target=dist.all_reduce, args=(ONE,))
        thread.start()
        thread.join()
    return number


def restarts(number: int) -> int:
    """Stop and restart recording in the same directory, with a call each time."""
    settings = session.settings
    for _ in range(number):
        if settings is not None:
            commtrace.stop()
            commtrace.start(settings.directory)
        dist.all_reduce(ONE)
    return number


def codes(number: int) -> int:
    """Create functions at run time, and call each once, so that each call has its own code object."""
    for _ in range(number):
        scope = {"dist": dist, "ONE": ONE}
        exec("def made():\n    dist.all_reduce(ONE)", scope)
        scope["made"]()
    return number


KINDS: Final[dict[str, Callable[[int], int]]] = {
    function.__name__: function for function in (calls, groups, threads, restarts, codes)
}


def resident_kib() -> int:
    """Return the memory of this process in KiB, without shared files in memory (the ring)."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE_KIB


def main() -> None:
    kind, number = KINDS[sys.argv[1]], int(sys.argv[2])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    begun, made, communicated = time.monotonic(), 0, 0
    for part in range(1, PARTS + 1):
        communicated += kind(number * part // PARTS - made)
        made = number * part // PARTS
        seconds = round(time.monotonic() - begun, 3)
        line = {"made": made, "calls": communicated, "resident_kib": resident_kib(), "seconds": seconds}
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


main()
