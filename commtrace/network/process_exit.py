"""Clean process exit: no thread of the process group may be running when Python exits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from commtrace.process_setup.system_files import read_stat


def wait_for_threads(timeout_s: float = 5.0) -> None:
    """Wait until every other thread of this process sleeps, at most `timeout_s` seconds.

    A collective is complete for its caller before gloo's thread releases the tensors, which requires the GIL.
    Python before 3.14 ends a thread that requests the GIL during shutdown, and the C++ runtime then aborts the process
    ("terminate called without an active exception"): SIGABRT after a successful run, in about one of twenty on a busy
    machine. Destroying the process group does not help: its threads outlive it while DDP or DeepSpeed refers to it.
    """
    end, quiet_checks = time.monotonic() + timeout_s, 0
    # Two checks: the GIL is released between them, so a thread that waited for it has run.
    while quiet_checks < 2 and time.monotonic() < end:
        time.sleep(0.01)
        any_running = any(map(_is_running, Path("/proc/self/task").glob("*")))  # False without /proc
        quiet_checks = 0 if any_running else quiet_checks + 1


def _is_running(task: Path) -> bool:
    """Return whether a thread other than this one is running or runnable (state R)."""
    stat = read_stat(task)  # None: the thread has ended
    return stat is not None and stat.state == "R" and task.name != str(threading.get_native_id())
