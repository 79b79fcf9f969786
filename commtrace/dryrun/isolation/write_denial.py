"""Denial of all changes to files, by Landlock: for every process that the program starts, in any language."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .system_calls import landlock, landlock_version

ALWAYS_WRITABLE: Final = ("/dev", "/proc")
"""Directories that hold no files of the user: devices, shared memory, processes."""

_WRITE_FILE: Final = 1 << 1
_DIRECTORY: Final = sum(1 << bit for bit in (4, 5, 6, 7, 8, 9, 10, 11, 12))  # remove and make entries, by kind
_REFER: Final = 1 << 13  # link and rename to another directory
_TRUNCATE: Final = 1 << 14
_SINCE_VERSION: Final = {2: _REFER, 3: _TRUNCATE}


def deny_writes(writable: Iterable[str]) -> None:
    """Deny this process, and those that it starts, to change files outside some directories. Raises OSError."""
    version = landlock_version()
    access = _WRITE_FILE | _DIRECTORY
    access |= sum(right for since, right in _SINCE_VERSION.items() if version >= since)
    landlock(access, dict.fromkeys((*ALWAYS_WRITABLE, *writable), access))
