"""Slots of a ring: free, taken by a call whose end may still be seen, or ready to be written to the log.

The thread that makes a call takes a slot, and the drain thread frees it. Neither waits for the other, except while one
of them notes the end of a call and the other gives up on it.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.schema import Records, State

from .ring import Ring

SlotNumbers = npt.NDArray[np.integer[Any]]
NO_SLOTS: Final[SlotNumbers] = np.zeros(0, np.intp)


class PendingCall:
    """A call that returned and whose end may still be seen; `slot` becomes -1 when its record leaves the ring."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Slots:
    """The slots of one ring."""

    recorder = "python"
    """Name of the recorder in the log."""

    def __init__(self, ring: Ring) -> None:
        self.capacity = ring.capacity
        self.free = deque(range(ring.capacity))
        self.pending: list[PendingCall | None] = [None] * ring.capacity
        self.lock = threading.RLock()
        """Held while the end of a call is noted or given up. Reentrant, for signal handlers."""
        self._ring = ring
        self._records = ring.records
        self._state: Any = ring.records["state"]
        self._seized = -1
        # Held while the drain thread sleeps. Not an Event: an exception that a signal handler raises within `set` would
        # leave the event's own lock held for ever.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        return self.capacity - len(self.free) if self._seized < 0 else self._seized

    @property
    def dropped(self) -> int:
        """Number of calls that found no free slot."""
        return self._ring.dropped

    def drop(self, calls: int) -> None:
        """Count calls that found no free slot."""
        with self.lock:
            self._ring.count_dropped(self._ring.dropped + calls)

    def wait(self, seconds: float) -> None:
        """Block the drain thread until `wake` is called or the time is over."""
        self._asleep.acquire(timeout=seconds)

    def wake(self) -> None:
        """Wake the drain thread."""
        with suppress(RuntimeError):  # it is awake already
            self._asleep.release()

    def finished(self) -> SlotNumbers:
        """Return slots with final records. If free slots run short, give up the ends of the oldest returned calls."""
        slots = np.flatnonzero(self._state >= State.COMPLETE)
        if len(self.free) + len(slots) >= self.capacity // 4:
            return slots
        return np.concatenate([slots, self._give_up(max(1, self.capacity // 4))])

    def _give_up(self, count: int) -> SlotNumbers:
        """Give up on the ends of the oldest calls that returned, and return their slots.

        Their records are written with the state RETURNED; an end that comes later is ignored.
        """
        with self.lock:
            waiting = np.flatnonzero(self._state == State.RETURNED)
            oldest = waiting[np.argsort(self._records["t_begin"][waiting], kind="stable")[:count]]
            self._detach(oldest)
        return oldest

    def _detach(self, slots: SlotNumbers) -> None:
        for slot in slots.tolist():
            call, self.pending[slot] = self.pending[slot], None
            if call is not None:
                call.slot = -1

    def seize(self) -> tuple[SlotNumbers, int]:
        """Stop recording: take every slot, so that no call gets one and no end is noted any more.

        Returns:
            Slots with records, and the number of slots whose calls had not written a record yet and are lost.
        """
        taken = self.capacity
        while self.free:
            try:
                self.free.popleft()
                taken -= 1
            except IndexError:  # a call took the last one
                break
        with self.lock:
            slots = np.flatnonzero(self._state >= State.BEGUN)
            self._detach(slots)
        self._seized = len(slots)
        return slots, taken - len(slots)

    def records(self, slots: SlotNumbers) -> Records:
        """Return a copy of the records in slots."""
        return self._records[slots]

    def release(self, slots: SlotNumbers) -> None:
        """Free slots whose records are on disk."""
        self._state[slots] = State.FREE  # first, so that a call that takes the slot finds it free
        if self._seized < 0:
            self.free.extend(slots.tolist())
        else:
            self._seized -= len(slots)

    def close(self) -> None:
        """Release what else the slots hold, when the log is complete."""

    def forked(self) -> None:
        """Detach a forked child: it gets no slots, and a lock that no thread of the parent holds."""
        self.free.clear()
        self.lock = threading.RLock()
