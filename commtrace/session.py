"""Tracing of this process as a whole: off, on, or on and recording.

It is on from start-up, and records from the first communication call on: a process that never communicates (a launcher,
a DataLoader's worker) leaves no trace. Hooks look at `session.recorder` on each call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from commtrace.settings import Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from commtrace.identity import Member
    from commtrace.recorder import Recorder


class Session:
    """At most one recorder, made when it is first needed."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.recorder: Recorder | None = None
        self._lock = threading.Lock()

    def begin(
        self, member: Callable[[], Member], *, blind_spots: Sequence[str], calibrate: Callable[[], int] | None = None
    ) -> Recorder | None:
        """The first call of this process: begin to record. None where tracing is off or cannot work (said once)."""
        if self.settings is None:
            return None
        from commtrace.log_writer import say

        with self._lock:
            if self.recorder is None and self.settings is not None:
                try:
                    from commtrace.recorder import Recorder

                    self.recorder = Recorder(
                        self.settings, member(), blind_spots=list(blind_spots), calibrate=calibrate
                    )
                except Exception as error:
                    self.settings = None
                    say(f"cannot record: {type(error).__name__}: {error}. The program goes on untraced.")
        return self.recorder

    def end(self, reason: str) -> None:
        """Close the log and switch off."""
        recorder, self.recorder, self.settings = self.recorder, None, None
        if recorder is not None and recorder.pid == os.getpid():
            recorder.close(reason)

    def forked(self) -> None:
        """In a forked child: the ring is the parent's. If the child communicates itself, it gets its own."""
        self.recorder = None
        self._lock = threading.Lock()


session = Session()
