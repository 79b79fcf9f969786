"""A reading of a run that is followed, in a thread of its own: storage that does not answer must not stop a command."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

SLOW_SECONDS: Final = 30.0
"""Time after which a reading is said to take long."""


class LogReading:
    """A reading that has begun."""

    def __init__(self, followed: FollowedRun) -> None:
        self._followed, self._began = followed, time.monotonic()
        self._live: Future[LiveRun] = Future()
        # Not of a pool: those are awaited at exit.
        threading.Thread(target=self._read, name="commtrace-reading", daemon=True).start()

    def _read(self) -> None:
        try:
            self._live.set_result(self._followed.read())
        except BaseException as error:
            self._live.set_exception(error)

    def is_done(self, seconds: float = 0.0) -> bool:
        """Return whether it has ended, after at most some seconds."""
        return bool(wait([self._live], seconds).done)

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._began

    @property
    def slowness(self) -> str:
        """Why it may take long, in words."""
        return f"the log has not been read for {self.seconds:.0f} s: it is large, or its storage does not answer"

    def result(self) -> LiveRun:
        """Return the state of the run, or raise what the reading has raised. It must have ended."""
        return self._live.result(0)
