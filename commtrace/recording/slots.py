"""Slots of a ring: free, taken by a call whose end may still be observed, or ready to be written to the log.

The thread that makes a call takes a slot, and the drain thread frees it. Neither waits for the other, except while one
of them records the end of a call and the other gives it up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.schema import Records, State

from .ring import Ring

SlotNumbers = npt.NDArray[np.integer[Any]]
TICK_SECONDS: Final = 0.1
"""Interval at which a process shows that it is alive."""
NO_SLOTS: Final[SlotNumbers] = np.zeros(0, np.intp)
_INITIAL_SLOTS: Final = 4096
"""Number of slots that are free at first."""
# Plain numbers: numpy would convert the states of all slots to the integers of an enumeration.
_BEGUN, _RETURNED, _COMPLETE = (int(state) for state in (State.BEGUN, State.RETURNED, State.COMPLETE))


class PendingCall:
    """A returned call whose end may still be observed. `slot` becomes -1 when the end is recorded or given up."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Slots:
    """The slots of one ring."""

    recorder = "python"
    """Name of the recorder in the log."""

    def __init__(self, ring: Ring) -> None:
        self.capacity = ring.capacity
        self.used = min(_INITIAL_SLOTS, ring.capacity)
        """Only slots below this number were ever free: the drain thread need not check the others."""
        self.free = deque(range(self.used))
        self.pending: list[PendingCall | None] = [None] * ring.capacity
        self.lock = threading.RLock()
        """Held while the end of a call is recorded or given up. Reentrant, for signal handlers."""
        self.ring = ring
        self._records = ring.records
        self._state: Any = ring.records["state"]
        self._seized = -1
        # Held while the drain thread sleeps. Not an Event: an exception that a signal handler raises within `set` would
        # leave the event's own lock held forever.
        self._asleep = threading.Lock()
        self._asleep.acquire()

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        return self.used - len(self.free) if self._seized < 0 else self._seized

    @property
    def is_half_taken(self) -> bool:
        """Whether more than half of the ring is in use, so that the drain thread should not sleep on."""
        return self.taken > self.capacity // 2

    def grow(self) -> int:
        """Return a slot when none is free, and free more of the ring.

        Raises:
            IndexError: All of the ring is taken, or recording has stopped.
        """
        with self.lock:
            with suppress(IndexError):  # another thread was first
                return self.free.popleft()
            if self._seized >= 0 or self.used == self.capacity:
                raise IndexError("the ring is full")
            slot, self.used = self.used, min(2 * self.used, self.capacity)
            self.free.extend(range(slot + 1, self.used))
        self.wake()
        return slot

    def drop(self, calls: int) -> None:
        """Count calls that found no free slot."""
        with self.lock:
            self.ring.dropped += calls

    def wait(self, seconds: float) -> None:
        """Block the drain thread until `wake` is called or `seconds` have passed; the ring shows that it is alive."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._asleep.acquire(timeout=min(left, TICK_SECONDS)):
            self.ring.alive()

    def wake(self) -> None:
        """Wake the drain thread."""
        with suppress(RuntimeError):  # it is already awake
            self._asleep.release()

    def finished(self) -> SlotNumbers:
        """Return the slots with final records.

        If free slots run short, the ends of the oldest returned calls are given up: their records are written with the
        state RETURNED, and an end that comes later is ignored.
        """
        states, quarter = self._state[: self.used], self.capacity // 4
        slots = np.flatnonzero(states >= _COMPLETE)
        if self.capacity - self.taken + len(slots) >= quarter:
            return slots
        with self.lock:
            waiting = np.flatnonzero(states == _RETURNED)
            oldest = waiting[np.argsort(self._records["t_begin"][waiting], kind="stable")[: max(1, quarter)]]
            self.detach(oldest.tolist())
        return np.concatenate([slots, oldest])

    def detach(self, slots: Iterable[int]) -> None:
        """Give up the ends of the calls in slots. The caller holds the lock."""
        for slot in slots:
            call, self.pending[slot] = self.pending[slot], None
            if call is not None:
                call.slot = -1

    def seize(self) -> tuple[SlotNumbers, int]:
        """Stop recording: take every slot, so that no call gets one and no end is recorded any more.

        Returns:
            Slots with records, and the number of slots whose calls had not written a record yet and are lost.
        """
        with self.lock:
            self._seized = 0  # nothing is freed from here on
            taken = self.used
            with suppress(IndexError):
                while True:
                    self.free.popleft()
                    taken -= 1
            slots = np.flatnonzero(self._state >= _BEGUN)
            self.detach(slots.tolist())
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
        """Release other resources of the slots when the log is complete."""

    def forked(self) -> None:
        """Detach a forked child: it gets no slots, and a lock that no thread of the parent holds."""
        self.free.clear()
        self.used = self.capacity
        self.lock = threading.RLock()
