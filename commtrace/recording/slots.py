"""Which slots of a ring are free, which hold a call whose end may still be seen, and which may be written to the log.

The thread that makes a call takes a slot, the drain thread gives it back; neither waits for the other, except in the
moment between seeing an end and giving up on it.
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
    """A call that returned and whose end may still be seen; `slot` is -1 once its record has left the ring."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Slots:
    """The slots of one ring."""

    recorder = "python"
    """Who takes slots, as the log names it."""

    def __init__(self, ring: Ring) -> None:
        self.capacity = ring.capacity
        self.free = deque(range(ring.capacity))
        self.pending: list[PendingCall | None] = [None] * ring.capacity
        self.lock = threading.RLock()
        """Between seeing an end and giving up on it. Reentrant for signal handlers."""
        self._ring = ring
        self._records = ring.records
        self._state: Any = ring.records["state"]
        self._seized = -1
        # Held while nobody wakes the drain thread. Not an Event: an exception that a signal handler raises within `set`
        # would leave the lock in it held for ever.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    @property
    def taken(self) -> int:
        """Slots in use."""
        return self.capacity - len(self.free) if self._seized < 0 else self._seized

    @property
    def dropped(self) -> int:
        """Calls that found no place."""
        return self._ring.dropped

    def drop(self, calls: int) -> None:
        """There was no place for these calls."""
        with self.lock:
            self._ring.count_dropped(self._ring.dropped + calls)

    def wait(self, seconds: float) -> None:
        """By the drain thread: until somebody wakes it, or for so long."""
        self._asleep.acquire(timeout=seconds)

    def wake(self) -> None:
        """There is something to do for the drain thread."""
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def finished(self) -> SlotNumbers:
        """Slots whose records nobody will add to, with those of the oldest returned calls where places run short."""
        slots = np.flatnonzero(self._state >= State.COMPLETE)
        if len(self.free) + len(slots) >= self.capacity // 4:
            return slots
        return np.concatenate([slots, self._give_up(max(1, self.capacity // 4))])

    def _give_up(self, count: int) -> SlotNumbers:
        """The oldest calls that returned and were never seen to end: the ring needs their places.

        Their records are written as they are, "returned"; an end that comes later finds no record and is forgotten.
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
        """All records, for the last time: no slot is given out from here on, no end is noted.

        Also how many slots were taken by calls that had not begun to write: their records do not count any more.
        """
        taken = self.capacity
        while self.free:
            try:
                self.free.popleft()
                taken -= 1
            except IndexError:  # a call took it
                break
        with self.lock:
            slots = np.flatnonzero(self._state >= State.BEGUN)
            self._detach(slots)
        self._seized = len(slots)
        return slots, taken - len(slots)

    def records(self, slots: SlotNumbers) -> Records:
        """Copies of these slots' records."""
        return self._records[slots]

    def release(self, slots: SlotNumbers) -> None:
        """These records are on disk."""
        self._state[slots] = State.FREE  # first: who gets the slot finds it free
        if self._seized < 0:
            self.free.extend(slots.tolist())
        else:
            self._seized -= len(slots)

    def let_go(self) -> None:
        """The log is complete."""

    def forked(self) -> None:
        """In a child: nothing here is its own, and the lock may be held by a thread that it does not have."""
        self.free.clear()
        self.lock = threading.RLock()
