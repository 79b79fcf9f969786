"""Kept records: the last calls of a process, whatever their step, to show what a hung or killed job was doing.

If the log does not get all records, the ring also holds the last ones (`Ring.keep`). They are written to a separate
file, `rank00003-4711-kept.npy`, which repeats records of the log, so only the analysis of stuck calls reads it.
`rank00003-4711-kept-1.npy` is written while the process runs, when its calls hang or on request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.schema import Records, State
from commtrace.settings import Settings

from .ring import Ring
from .segment_writer import write_segment

REQUEST_FILE: Final = "keep"
"""File in the log directory. When it is created or touched, every process writes its kept records."""
CHECK_SECONDS: Final = 1.0
MAX_DUMPS: Final = 4
"""Maximum number of these files per process; the next one replaces the oldest."""
KEPT_AT_EXIT: Final = 1024
"""Number of records to write when a process ends normally: other ranks may still wait for it."""


def in_flight(records: Records) -> npt.NDArray[np.bool_]:
    """Return for each call whether its end was not yet observed, bool, shape (n,)."""
    return np.asarray(records["state"] < State.COMPLETE)


def select_at_exit(kept: Records) -> Records:
    """Return the kept records to write when the process ends: all of them if a call failed or was in flight."""
    ended_normally = np.isin(kept["state"], (State.COMPLETE, State.UNOBSERVABLE)).all()
    return kept[-KEPT_AT_EXIT:] if ended_normally else kept


def write_kept(directory: Path, stem: str, kept: Records, number: int = 0) -> None:
    """Write the kept records of a process, replacing the file of this number. Raises OSError."""
    if not len(kept):
        return
    path = directory / (f"{stem}-kept-{number}.npy" if number else f"{stem}-kept.npy")
    path.with_name(path.name + ".open").unlink(missing_ok=True)  # left by a failed attempt
    write_segment(path, kept)


class KeptDumps:
    """The dumps of one process's kept records. Only the drain thread uses this."""

    def __init__(self, settings: Settings, ring: Ring, write: Callable[[Records, int], bool]) -> None:
        """Create no file yet; `write` writes the dump of a number, and returns whether it succeeded."""
        self._request_file = Path(settings.directory) / REQUEST_FILE
        self._ring, self._write = ring, write
        self._check_at = 0.0
        self._requested_ns = self._modified_ns()
        self._dumps = 0

    def turn(self, *, is_stalled: bool) -> None:
        """Write a dump if the process has made no progress, or one was requested, which is checked once a second.

        Args:
            is_stalled: Whether the stacks of the process were written in this turn: see `recording.stacks`.
        """
        is_requested = self._is_requested()
        if is_stalled or is_requested:
            taken = self._ring.records[self._ring.records["state"] != State.FREE]
            if is_requested or len(taken):
                self._dumps += self._write(np.concatenate([self._ring.kept(), taken]), self._dumps % MAX_DUMPS + 1)

    def _is_requested(self) -> bool:
        now, before = time.monotonic(), self._requested_ns
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._requested_ns = max(before, self._modified_ns())
        return self._requested_ns > before

    def _modified_ns(self) -> int:
        with suppress(OSError):
            return os.stat(self._request_file).st_mtime_ns
        return 0
