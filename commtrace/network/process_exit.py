"""A clean end: nothing of the process group may still be at work when Python goes away."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


def wait_for_threads(limit_s: float = 5.0) -> None:
    """Wait until every other thread of this process sleeps, ``limit_s`` seconds at most.

    A collective is complete for its caller before gloo's thread has let go of the tensors, and for that it takes the
    interpreter's lock. A thread that asks for the lock when the interpreter has begun to shut down is ended by Python
    (before 3.14), which C++ answers with "terminate called without an active exception": the process dies of SIGABRT
    after a good training, about once in twenty runs on a busy machine. Destroying the process group does not help:
    its threads outlive it when anything in DDP or DeepSpeed still refers to it.
    """
    end = time.monotonic() + limit_s
    quiet = 0
    # Twice, because between two looks the lock is free: whoever waited for it has had it.
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.01)
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    if not _TASKS.is_dir():
        return False  # not Linux: the two sleeps have to do
    own = threading.get_native_id()
    return any(_state(int(task)) == "R" for task in os.listdir(_TASKS) if int(task) != own)


def _state(task: int) -> str:
    """The scheduler's letter for a thread: R runs or wants to, S sleeps."""
    try:
        stat = (_TASKS / str(task) / "stat").read_text()
    except OSError:
        return ""  # ended meanwhile
    return stat.rpartition(")")[2].split()[0]
