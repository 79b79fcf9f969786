"""A reading of a run that is followed, in a thread of its own: storage that does not answer must not stop a command."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from commtrace.analyses.live.followed_run import FollowedRun, LiveRun

SLOW_SECONDS: Final = 30.0
"""Time after which a reading is said to take long."""


class LogReading:
    """A reading that has begun."""

    def __init__(self, followed: FollowedRun) -> None:
        self._followed, self._began = followed, time.monotonic()
        self._done = threading.Event()
        self._live: LiveRun | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._read, name="commtrace-reading", daemon=True).start()

    def _read(self) -> None:
        try:
            self._live = self._followed.read()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def is_done(self, seconds: float = 0.0) -> bool:
        """Return whether it has ended, after at most some seconds."""
        return self._done.wait(seconds)

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
        if self._error is not None:
            raise self._error
        assert self._live is not None
        return self._live
