"""Slots of a ring that C++ and Python hooks record into."""

from __future__ import annotations

from typing import Any

from commtrace.current_step import progress
from commtrace.recording.ring import ALIVE_AT, DROPPED_AT, RECORDS_AT, Ring
from commtrace.recording.session import session
from commtrace.recording.slots import SlotNumbers, Slots
from commtrace.schema import RECORD, Records, State


class NativeSlots(Slots):
    """The slots of one ring, and the C++ recording that fills it."""

    recorder = "native"

    def __init__(self, ring: Ring, library: Any, *, sites: bool, device_times: bool) -> None:
        super().__init__(ring)
        self.recording = library.open(
            ring.buffer, ALIVE_AT, DROPPED_AT, RECORDS_AT, ring.capacity, sites, device_times, progress.cells
        )
        self.free: Any = self.recording.free
        self.used = ring.capacity  # C++ tracks which were used

    def wait(self, seconds: float) -> None:
        """Block the drain thread, without the GIL; see `Slots.wait`."""
        self.recording.wait(seconds)

    def wake(self) -> None:
        """Wake the drain thread."""
        self.recording.wake()

    def drop(self, calls: int) -> None:
        """Count calls that found no free slot."""
        if not self.recording.drop(calls):  # closed: C++ no longer counts
            super().drop(calls)

    def finished(self) -> SlotNumbers:
        """Return slots with final records. Detach the calls of Python hooks whose ends C++ gave up."""
        slots: SlotNumbers = self.recording.finished()
        with self.lock:
            self.detach(slots[self._state[slots] == State.RETURNED].tolist())
        return slots

    def records(self, slots: SlotNumbers) -> Records:
        """Return a copy of the records in slots, made without the GIL."""
        copies: Records = self.recording.records(slots).view(RECORD)
        return copies

    def seize(self) -> tuple[SlotNumbers, int]:
        """Stop recording; see `Slots.seize`."""
        # Tracing may be on again already, if this thread could not close the log in time.
        slots, unwritten = self.recording.close(session.settings is None)
        with self.lock:
            self.detach(slots.tolist())
        self._seized = len(slots)
        return slots, unwritten

    def release(self, slots: SlotNumbers) -> None:
        """Free slots whose records are on disk."""
        self.recording.release(slots)
        if self._seized >= 0:
            self._seized -= len(slots)

    def close(self) -> None:
        """Release the native recording when the log is complete."""
        self.recording.recycle()
