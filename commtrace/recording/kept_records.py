"""Kept records: the last calls of a process, whatever their step, for what a hung or killed job was doing.

Where the log does not get all records, the ring holds the last ones besides (`Ring.keep`). They become a file of their
own, `rank00003-4711-kept.npy`, which repeats records that the log has: only the examination of stuck calls reads it.
`rank00003-4711-kept-1.npy` is written while the process runs, when its calls hang, or when somebody asks for it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from commtrace.schema import Records, State
from commtrace.settings import Settings

from .ring import Ring
from .segment_writer import write_segment

if TYPE_CHECKING:
    from .log_writer import LogWriter

ASK_FILE: Final = "keep"
"""File in the log directory. When it is made, or touched, every process writes what it has kept."""
LOOK_SECONDS: Final = 1.0
HANG_SECONDS: Final = 60.0
"""Time without the end of any call, while one is in flight, after which a process writes what it has kept."""
MAX_DUMPS: Final = 4
"""Files of a process; the next one replaces the oldest."""
KEPT_AT_EXIT: Final = 1024
"""Records that are kept of a process that ended in order: ranks may still wait for it."""


def in_flight(records: Records) -> npt.NDArray[np.bool_]:
    """Return whether the end of each call was not yet observed, bool, shape (n,)."""
    return np.asarray(records["state"] < State.COMPLETE)


def records_of_a_hang(kept: Records) -> Records:
    """Return what to write of the records kept when the process ends: all if a call failed or was in flight."""
    in_order = np.isin(kept["state"], (State.COMPLETE, State.UNOBSERVABLE)).all()
    return kept[-KEPT_AT_EXIT:] if in_order else kept


def write_kept(folder: Path, stem: str, kept: Records, number: int = 0) -> None:
    """Write the records kept by a process, over those that were written before with this number. Raises OSError."""
    if not len(kept):
        return
    path = folder / (f"{stem}-kept-{number}.npy" if number else f"{stem}-kept.npy")
    path.with_name(path.name + ".open").unlink(missing_ok=True)  # of a failed attempt
    write_segment(path, kept)


class KeptDumps:
    """The dumps of one process. Only the drain thread uses it."""

    def __init__(self, settings: Settings, ring: Ring, writer: LogWriter) -> None:
        self._ask_file = Path(settings.directory) / ASK_FILE
        self._ring, self._writer = ring, writer
        self._look_at = 0.0
        self._asked_ns = self._modified_ns()
        self._count, self._changed_at = -1, 0.0
        self._has_dumped = False
        self._dumps = 0

    def turn(self) -> None:
        """Write a dump if there is a reason for one, which is looked for once a second."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        if self._ring.kept_count != self._count:
            self._count, self._changed_at, self._has_dumped = self._ring.kept_count, now, False
        taken = self._ring.records[self._ring.records["state"] != State.FREE]
        hangs = len(taken) > 0 and now - self._changed_at >= HANG_SECONDS and not self._has_dumped
        asked_ns = self._modified_ns()
        if hangs or asked_ns > self._asked_ns:
            self._has_dumped |= hangs
            self._asked_ns = asked_ns
            number = self._dumps % MAX_DUMPS + 1
            self._dumps += self._writer.dump(np.concatenate([self._ring.kept(), taken]), number)

    def _modified_ns(self) -> int:
        with suppress(OSError):
            return os.stat(self._ask_file).st_mtime_ns
        return 0
