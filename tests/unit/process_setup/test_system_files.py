"""`system_files`: what the kernel says of threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import processes
import pytest

from commtrace.process_setup.system_files import read_stat, waits_for_storage


def thread_in(wait: Callable[[], object]) -> str:
    """Return the folder of a thread that waits in a function."""
    thread = threading.Thread(target=wait)
    thread.start()
    folder = f"/proc/self/task/{thread.native_id}"
    processes.wait_for(lambda: (stat := read_stat(folder)) is not None and stat.state == "S")
    return folder


def test_a_thread_that_waits_for_a_file() -> None:
    read, write = os.pipe()
    folder = thread_in(lambda: os.read(read, 1))
    if not os.access(f"{folder}/wchan", os.R_OK) or open(f"{folder}/wchan").read() in ("", "0"):
        os.write(write, b"x")
        pytest.skip("the kernel does not tell where a thread waits")
    assert waits_for_storage(folder)
    os.write(write, b"x")


def test_a_thread_that_waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    folder = thread_in(lock.acquire)
    assert not waits_for_storage(folder)
    lock.release()


def test_a_thread_that_runs_or_has_ended() -> None:
    assert not waits_for_storage(f"/proc/self/task/{threading.get_native_id()}")
    assert not waits_for_storage("/proc/self/task/0")
