"""What the allocator (glibc's malloc) does with freed memory. For the processes of commands, which are ours."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
"""Parameters of `mallopt`, as in malloc.h."""


def keep_freed_memory() -> None:
    """Let the allocator keep the memory of columns that are freed, for those of the next block.

    Otherwise, the kernel takes it back and clears it again for each block, a tenth of the time of a report.
    """
    # Bytes that may be free at the end of the heap, and of the largest array in it (glibc's maximum).
    _set({_TRIM_THRESHOLD: 1 << 30, _MMAP_THRESHOLD: 32 << 20})


def share_freed_memory() -> None:
    """Let all threads use one heap.

    Otherwise, threads that read a log one after the other each get a heap, and what is free in the others lies idle: up
    to 60 MiB.
    """
    _set({_ARENA_MAX: 1})


def _set(values: Mapping[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in values.items():
            mallopt(parameter, value)
