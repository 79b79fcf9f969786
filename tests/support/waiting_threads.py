"""Threads of the test's process that wait."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import processes
import pytest

from commtrace.process_setup.system_files import read_stat


@contextlib.contextmanager
def waiting(wait: Callable[[], object], end: Callable[[], object]) -> Iterator[int]:
    """Yield the kernel's id of a thread that waits in a function, until another ends the wait."""
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        folder = f"/proc/self/task/{thread.native_id}"
        processes.wait_for(lambda: (stat := read_stat(folder)) is not None and stat.state == "S")
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        end()
        thread.join()


@contextlib.contextmanager
def waiting_for_a_file() -> Iterator[int]:
    """Yield the kernel's id of a thread that waits for a file. Skip the test if the kernel does not tell where."""
    read, write = os.pipe()
    with waiting(lambda: os.read(read, 1), lambda: os.write(write, b"x")) as thread:
        if Path(f"/proc/self/task/{thread}/wchan").read_text() in ("", "0"):
            pytest.skip("the kernel does not tell where a thread waits")
        yield thread
    os.close(read)
    os.close(write)
