"""One-sided operations, which end when their window is synchronized."""

from __future__ import annotations

from commtrace.recording.recorder import PendingCall, Recorder
from commtrace.schema import Clock

from .communicators import MpiGroup


class Windows:
    """Pending operations by window (the number of its group) and target (a global rank)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: dict[int, list[tuple[int, PendingCall]]] = {}

    def add(self, group: MpiGroup, target: int, call: PendingCall | None) -> None:
        """Add an operation on this window."""
        if call is not None:
            self._open.setdefault(group.number, []).append((target, call))

    def synchronized(self, group: MpiGroup, target: int | None, t_wait: int, t_end: int) -> None:
        """Record the end of the operations on this target (None: on all targets)."""
        calls = self._open.get(group.number)
        if not calls:
            return
        self._open[group.number] = [(to, call) for to, call in calls if target is not None and to != target]
        for to, call in calls:
            if target is None or to == target:
                self._recorder.ended(call, t_wait, t_end, Clock.WAIT)

    def forget(self) -> None:
        """Drop all operations when the session has ended."""
        self._open = {}
