"""Tracing state of this process: off, on, or on and recording.

Tracing is on from start-up and records from the first communication call on: a process that never communicates (a
launcher, a DataLoader worker) writes no log. Hooks read `session.recorder` on each call.
"""

from __future__ import annotations

import os
import sys
import threading

from commtrace.rank_ranges import is_selected

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from commtrace.identity import RankIdentity
    from commtrace.settings import Settings

    from .recorder import Recorder
    from .ring import Ring
    from .slots import Slots


class Session:
    """Settings and recorder of this process. The recorder is made when first needed."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.recorder: Recorder | None = None
        self.end_listeners: list[Callable[[], None]] = []
        """Functions that are called before the recorder is given up: at its end, and in a forked child."""
        self._lock = threading.RLock()
        self._beginning = False
        self._is_fork = False

    def begin(
        self,
        find_rank: Callable[[], RankIdentity],
        *,
        blind_spots: Sequence[str],
        calibrate: Callable[[], int] | None = None,
        make_slots: Callable[[Ring], Slots] | None = None,
    ) -> Recorder | None:
        """Return the recorder; make it at the first call of this process.

        `find_rank` returns the rank of this process; the other arguments are those of `Recorder`.

        Returns:
            The recorder; None if tracing is off, does not select this rank, or cannot record (printed once).
        """
        if self.settings is None:
            return None
        with self._lock:
            # A signal handler that communicates may get here while the recorder is made. Its call is not traced.
            settings = self.settings
            if self.recorder is None and settings is not None and not self._beginning:
                self._beginning = True
                try:
                    rank_identity = find_rank()
                    if not is_selected(rank_identity.rank, settings.ranks):
                        self.settings = None
                        return None
                    from .recorder import Recorder

                    self.recorder = Recorder(
                        settings, rank_identity, blind_spots=[*blind_spots], calibrate=calibrate,
                        make_slots=make_slots,
                    )  # fmt: skip
                    if self._is_fork:
                        self._end_with_multiprocessing()
                except Exception as error:
                    from commtrace.errors import warn

                    from .interrupts import reraise_if_from_signal_handler

                    reraise_if_from_signal_handler()
                    self.settings = None
                    warn(f"cannot record: {type(error).__name__}: {error}. The program goes on untraced.")
                finally:
                    self._beginning = False
        return self.recorder

    def _end_with_multiprocessing(self) -> None:
        # Processes forked by multiprocessing end with os._exit: its finalizers run, not atexit's. This one runs last.
        util, process = sys.modules.get("multiprocessing.util"), sys.modules.get("multiprocessing.process")
        if util is not None and process is not None and process.parent_process() is not None:
            util.Finalize(None, self.end, args=("exit",), exitpriority=-1000)

    def end(self, reason: str) -> None:
        """Close the log and switch tracing off. `reason`, "exit" or "stop", is written to the log."""
        self._tell_end()
        recorder, self.recorder, self.settings = self.recorder, None, None
        if recorder is not None and recorder.pid == os.getpid():
            if reason == "exit":
                recorder.close_at_exit()
            else:
                recorder.close(reason)

    def forked(self) -> None:
        """Detach a forked child from the parent's ring and log. A child that communicates gets its own."""
        self._tell_end()
        recorder, self.recorder = self.recorder, None
        self._lock = threading.RLock()
        self._beginning = False
        self._is_fork = True
        if recorder is not None:
            from commtrace import identity

            recorder.forked()
            identity.reset_after_fork()

    def _tell_end(self) -> None:
        for listener in self.end_listeners:
            listener()


session = Session()
"""The session of this process."""
