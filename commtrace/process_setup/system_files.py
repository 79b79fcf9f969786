"""Small files of /proc and /sys, whose content is missing where it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_LARGEST: Final = 1 << 16


class Stat(NamedTuple):
    """What the kernel says of a process or thread: proc_pid_stat(5)."""

    name: str
    state: str
    """Such as "R" (runs), "S" (sleeps), "D" (waits for a device), "T" (is stopped), "Z" (has ended)."""
    parent: int
    cpu_ticks: int
    """Time on a processor, in ticks (`os.sysconf("SC_CLK_TCK")`)."""
    ended_ticks: int
    """Likewise, of its child processes that have ended, and of theirs."""
    start_ticks: int
    """Start, in ticks since boot: distinguishes a process from others that had the same PID."""
    exit_status: int
    """As `os.waitpid` has it; 0 unless the process has ended."""


def read_stat(folder: str | Path) -> Stat | None:
    """Return what the kernel says of a process (/proc/PID) or thread (/proc/PID/task/TID); None if it is not known."""
    head, _, tail = read_text(folder, "stat").rpartition(")")  # a name may contain ")"
    fields = tail.split()
    try:
        user, system, ended_user, ended_system = map(int, fields[11:15])
        return Stat(
            head.partition("(")[2], fields[0], int(fields[1]), user + system, ended_user + ended_system,
            int(fields[19]), int(fields[49]),
        )  # fmt: skip
    except (ValueError, IndexError):
        return None


def waits_for_storage(folder: str | Path) -> bool:
    """Return whether a thread (/proc/PID/task/TID) waits, and for a file rather than for a lock or another thread.

    The kernel tells it by the function in which the thread waits, unless it keeps that secret.
    """
    stat, place = read_stat(folder), read_text(folder, "wchan")
    if stat is None or stat.state not in "SD":
        return False
    return stat.state == "D" or not (place in ("", "0") or "futex" in place)


def read_text(*parts: str | Path) -> str:
    """Return the first 64 KiB of a file without white space at its ends; "" if it cannot be read."""
    try:
        with open(os.path.join(*parts), "rb") as file:
            return file.read(_LARGEST).decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def read_number(*parts: str | Path) -> int | None:
    """Return the decimal number that is all of a file; None if there is none, or if it is below 0."""
    text = read_text(*parts)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def list_folder(*parts: str | Path) -> Iterator[str]:
    """Yield the names in a folder, sorted; none if it cannot be read."""
    try:
        yield from sorted(os.listdir(os.path.join(*parts)))
    except OSError:
        return
