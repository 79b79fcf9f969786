"""A clean end of a process: no thread of the process group may be running when Python exits."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")


def wait_for_threads(timeout_s: float = 5.0) -> None:
    """Wait until every other thread of this process sleeps, at most `timeout_s` seconds.

    A collective is complete for its caller before gloo's thread releases the tensors, for which it needs the GIL.
    Python before 3.14 ends a thread that requests the GIL during shutdown, and the C++ runtime then aborts the process
    ("terminate called without an active exception"): SIGABRT after a good training, about once in twenty runs on a busy
    machine. Destroying the process group does not help: its threads outlive it while DDP or DeepSpeed refers to it.
    """
    end = time.monotonic() + timeout_s
    quiet = 0
    # Twice: between two checks the GIL is free, so that a thread that waited for it has had it.
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.01)
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    if not _TASKS.is_dir():
        return False  # not Linux: the two sleeps must suffice
    own = threading.get_native_id()
    return any(_state(int(task)) == "R" for task in os.listdir(_TASKS) if int(task) != own)


def _state(task: int) -> str:
    """Return the scheduler's state of a thread: R is running or runnable, S is sleeping."""
    try:
        stat = (_TASKS / str(task) / "stat").read_text()
    except OSError:
        return ""  # it has ended
    return stat.rpartition(")")[2].split()[0]
