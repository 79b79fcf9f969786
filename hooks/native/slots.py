"""The slots of a ring that C++ records into. Python's own hooks may take some, too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commtrace.progress import progress
from commtrace.recording.ring import DROPPED_AT, RECORDS_AT, Ring
from commtrace.recording.session import session
from commtrace.recording.slots import SlotNumbers, Slots
from commtrace.schema import RECORD, Records, State


class _Free:
    """The free slots, with the methods of a deque that the Python recorder uses."""

    def __init__(self, recording: Any) -> None:
        self.popleft = recording.take
        self.append = recording.give
        self._recording = recording

    def extend(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.append(slot)

    def clear(self) -> None:
        self._recording.forked()

    def __len__(self) -> int:
        return int(self._recording.free)


class NativeSlots(Slots):
    """The slots of one ring, and the C++ recording that fills it."""

    recorder = "native"

    def __init__(self, ring: Ring, library: Any, *, sites: bool, device_times: bool) -> None:
        super().__init__(ring)
        self.recording = library.open(
            ring.buffer, DROPPED_AT, RECORDS_AT, ring.capacity, sites, device_times, progress.cells
        )
        self.free: Any = _Free(self.recording)

    def wait(self, seconds: float) -> None:
        """By the drain thread: until somebody wakes it, or for so long, without the GIL."""
        self.recording.wait(seconds)

    def wake(self) -> None:
        """There is something to do for the drain thread."""
        self.recording.wake()

    def drop(self, calls: int) -> None:
        """There was no place for these calls."""
        if not self.recording.drop(calls):  # closed: nobody else counts any more
            super().drop(calls)

    def finished(self) -> SlotNumbers:
        """As of the portable recorder; C++ gives up on its own calls, and Python on its own here."""
        slots: SlotNumbers = self.recording.finished()
        with self.lock:
            self._detach(slots[self._state[slots] == State.RETURNED])
        return slots

    def records(self, slots: SlotNumbers) -> Records:
        """Copies of these slots' records, made without the GIL."""
        copies: Records = self.recording.records(slots).view(RECORD)
        return copies

    def seize(self) -> tuple[SlotNumbers, int]:
        """As of the portable recorder."""
        # Tracing may be on again already, where the store kept this thread from closing the log in time.
        slots, unwritten = self.recording.close(session.settings is None)
        with self.lock:
            self._detach(slots)
        self._seized = len(slots)
        return slots, unwritten

    def release(self, slots: SlotNumbers) -> None:
        """These records are on disk."""
        self.recording.release(slots)
        if self._seized >= 0:
            self._seized -= len(slots)

    def close(self) -> None:
        """Release the native recording, when the log is complete."""
        self.recording.let_go()
