"""Counters of a recorder: faults of the hooks, and what recording costs the program's threads.

Hooks count in any thread; the drain thread writes the sums to the log.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Iterable
from typing import Final

from .interrupts import reraise_if_from_signal_handler

COST_SAMPLES: Final = 1024


def is_sampled(slot: int) -> bool:
    """Return whether the cost of the call in a slot is measured: one of sixteen, at a varying position.

    At a fixed one, it would always be the same call in a program whose steps make a multiple of 16 calls. C++ recorders
    have the same rule (`in_sample` in hooks/native/slots.h).
    """
    position = (slot >> 4) * 0x9E3779B1 >> 28
    return (position ^ slot) & 15 == 0


class Counters:
    """The counters of one recorder.

    Attributes:
        hook_errors: Number of exceptions in hooks.
        unrecorded: Number of calls without a record because of them.
        first_error: Traceback of the first one.
        untimed: Number of device calls without times.
        device_clock_ns: Error of the device's times on the host's clock.
    """

    def __init__(self) -> None:
        self.hook_errors = self.unrecorded = 0
        self.first_error = ""
        self.untimed = self.device_clock_ns = 0
        self._cost_samples: deque[int] = deque(maxlen=COST_SAMPLES)
        self._steady_samples: deque[int] = deque(maxlen=COST_SAMPLES)
        self._first_calls = self._first_ns = 0
        self._lock = threading.RLock()  # reentrant, for signal handlers

    def count_fault(self, unrecorded: int = 0) -> None:
        """Count the exception that is being handled as a hook error; keep the first one for the report.

        Call this in the `except` of a hook. An exception from a signal handler of the program is raised again.

        Args:
            unrecorded: Number of calls that the program makes without a record because of the exception.
        """
        reraise_if_from_signal_handler()
        with self._lock:
            self.hook_errors += 1
            self.unrecorded += unrecorded
            first = self.hook_errors == 1
        if first:
            try:
                self.first_error = traceback.format_exc(limit=-4)[-2000:]
            except Exception as error:  # the program's exception fails to format itself
                self.first_error = type(error).__name__

    def note_cost(self, ns: int, *, sampled: bool, first: bool) -> None:
        """Count the cost of recording one call.

        Args:
            ns: Time of the program's thread in the hook.
            sampled: Whether the call is in the sample that represents all calls.
            first: Whether the call looked something up for the first time (`TableLines.lookups`).
        """
        if sampled:
            self._cost_samples.append(ns)
            if not first:
                self._steady_samples.append(ns)
        if first:
            with self._lock:
                self._first_calls += 1
                self._first_ns += ns

    def add(
        self, errors: int, unrecorded: int, first_error: str, costs: Iterable[int], steady: Iterable[int],
        first_calls: int, first_ns: int,
    ) -> None:  # fmt: skip
        """Add what another recorder has counted since the last time. Only the drain thread calls this."""
        with self._lock:
            self.hook_errors += errors
            self.unrecorded += unrecorded
            self.first_error = self.first_error or first_error
            self._first_calls += first_calls
            self._first_ns += first_ns
        self._cost_samples.extend(costs)
        self._steady_samples.extend(steady)

    def cost_sums(self, crossing_ns: int) -> dict[str, int]:
        """Return the columns of the table `stats` on the cost of recording.

        Args:
            crossing_ns: Time of a call from C++ into the hook, which the hook cannot measure.
        """
        # Use `sorted`: the first call of numpy's percentile takes 60 ms of CPU time.
        costs = sorted(cost + crossing_ns for cost in list(self._cost_samples))
        steady = list(self._steady_samples)
        return {
            "cost_samples": len(costs),
            "cost_ns": sum(costs),
            "cost_p99_ns": costs[len(costs) * 99 // 100] if costs else 0,
            "first_calls": self._first_calls,
            "first_ns": self._first_ns + self._first_calls * crossing_ns,
            "steady_samples": len(steady),
            "steady_ns": sum(steady) + len(steady) * crossing_ns,
        }

    def forked(self) -> None:
        """Give a forked child a lock that no thread of the parent holds."""
        self._lock = threading.RLock()
