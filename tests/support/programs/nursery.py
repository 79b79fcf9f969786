"""Imports torch and the modules in its arguments once, then forks the ranks of programs on request.

An order is a line of JSON, and so is the answer.

A rank is a process like any other: its program runs as `__main__`, and it ends like any Python process. It has its own
recorder, because a process records from its first communication call on, which comes after the fork.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from typing import Any

import torch.distributed  # noqa: F401

from commtrace import settings
from commtrace.network.process_exit import wait_for_threads
from commtrace.recording.session import session

STACKS = signal.SIGXCPU
"""Makes a rank print the stacks of its threads, also while none of them can run Python."""


def fork_ranks(order: dict[str, Any]) -> list[int] | None:
    """Fork the ranks and return their pids; return None in each of them."""
    pids: list[int] = []
    for rank in range(order["ranks"]):
        pid = os.fork()
        if pid == 0:
            become_rank(order, rank)
            return None
        pids.append(pid)
    return pids


def become_rank(order: dict[str, Any], rank: int) -> None:
    """Set up what is specific to a rank: environment, output, settings of the tracer."""
    # Traced or not, torch may abort a process that ends while a thread of gloo still releases tensors.
    atexit.register(wait_for_threads)
    os.dup2(os.open(os.path.join(order["output"], f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(STACKS)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["ranks"]}
    world.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=order["port"])
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ.update(order["settings"])
    session.settings = settings.for_directory(order["directory"], os.environ) if order["directory"] else None
    sys.argv = [order["program"], *order["arguments"]]


def wait(pids: list[int], limit: float) -> list[int | None]:
    """Return the statuses of these ranks. One that does not end in time prints its stacks, is killed, and has None."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + limit
    while len(statuses) < len(pids) and time.monotonic() < deadline:
        for pid in set(pids) - set(statuses):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    late = set(pids) - set(statuses)
    for pid in late:
        os.kill(pid, STACKS)
    if late:
        time.sleep(0.5)  # until they have printed them
    for pid in late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [statuses.get(pid) for pid in pids]


def serve() -> bool:
    """Serve orders. Return False when there are no more, or True in a rank."""
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        answer = wait(order["wait"], order["limit"]) if "wait" in order else fork_ranks(order)
        if answer is None:
            return True
        print(json.dumps(answer), flush=True)
    return False


for module in sys.argv[1:]:
    importlib.import_module(module)
# Freeze the objects that exist now: garbage collection in a rank, as at the end of each training, then skips them, and
# does not copy the memory that the rank shares with this process.
gc.collect()
gc.freeze()

if serve():
    runpy.run_path(sys.argv[0], run_name="__main__")
