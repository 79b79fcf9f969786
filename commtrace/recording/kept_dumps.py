"""Dumps of kept records while a process runs: when its calls hang, and when somebody asks for the last seconds."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.schema import State
from commtrace.settings import Settings

from .log_writer import LogWriter
from .ring import Ring

ASK_FILE: Final = "keep"
"""File in the log directory. When it is made, or touched, every process writes what it has kept."""
LOOK_SECONDS: Final = 1.0
HANG_SECONDS: Final = 60.0
"""Time without the end of any call, while one is in flight, after which a process writes what it has kept."""
MAX_DUMPS: Final = 4
"""Files of a process; the next one replaces the oldest."""


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
