"""The thread that empties the ring: finished records to the log, every 100 ms and at the end.

It alone touches the store, so that no call of the program ever waits for it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from commtrace import identity
from commtrace.settings import Settings

from .log_writer import LogWriter, warn
from .recovery import recover_records
from .slots import NO_SLOTS, SlotNumbers, Slots

if TYPE_CHECKING:
    from .recorder import Recorder

FIRST_STATS_SECONDS: Final = 10.0
COST_SECONDS: Final = 2.0
"""Between two summaries of the cost samples: sorting them is most of what a turn would take."""

# Signals that a thread gets for what it did itself.
_OWN_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT}


class Drain:
    """Moves one recorder's records and tables to its log."""

    def __init__(
        self,
        recorder: Recorder,
        slots: Slots,
        writer: LogWriter,
        settings: Settings,
        calibrate: Callable[[], int] | None,
    ) -> None:
        self._recorder, self._slots, self._writer, self._settings = recorder, slots, writer, settings
        self._calibrate = calibrate
        self._crossing_ns = 0
        self._written = 0
        self._cpu_ns = 0
        self._costs: dict[str, int] = {}
        self._costs_at = 0.0
        self._counted: object = None
        self._stats_every = FIRST_STATS_SECONDS
        self._stats_at = time.monotonic() + FIRST_STATS_SECONDS
        self._reason = ""  # why the log ends, once it does
        self._count()
        self._thread = threading.Thread(target=self._run, name="commtrace-drain", daemon=True)
        self._thread.start()

    def close(self, reason: str) -> None:
        """End the log. Waits `exit_seconds` at most."""
        self._reason = reason
        self._slots.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._settings.exit_seconds)
            if self._thread.is_alive():
                warn(f"the log could not be finished within {self._settings.exit_seconds:g} s; {self._where()}")

    def stats(self) -> dict[str, Any]:
        """The counters of docs/reference/log-format.md, as of now."""
        recorder, writer = self._recorder, self._writer
        if self._reason or time.monotonic() >= self._costs_at:
            self._costs_at = time.monotonic() + COST_SECONDS
            self._costs = self._summary()
        return {
            "mono_ns": time.monotonic_ns(),
            "calls": self._written + self._slots.taken + self._slots.dropped,
            "dropped": self._slots.dropped,
            "removed": writer.removed,
            "lost": writer.lost,
            "hook_errors": recorder.hook_errors,
            "first_error": recorder.first_error,
            "write_errors": writer.errors,
            "last_write_error": writer.last_error,
            **self._costs,
            "drain_cpu_ns": self._cpu_ns,
            "untimed": recorder.untimed,
            "device_clock_ns": recorder.device_clock_ns,
        }

    def _summary(self) -> dict[str, int]:
        # The crossing from C++ into the hook cannot be seen from within it. (sorted, as numpy's percentile takes 60 ms
        # of a core when it is called for the first time.)
        costs = sorted(cost + self._crossing_ns for cost in list(self._recorder.cost_samples))
        return {
            "cost_samples": len(costs),
            "cost_ns": sum(costs),
            "cost_p99_ns": costs[len(costs) * 99 // 100] if costs else 0,
        }

    def _run(self) -> None:
        # A signal of the process must never be this thread's, where nobody waits for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS)
        self._guarded(self._measure_crossing)
        while not self._reason:
            self._slots.wait(self._settings.drain_ms / 1000)
            if not self._reason:
                self._guarded(self._turn)
        self._let_go()
        self._guarded(self._finish)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self._recorder.fault()

    def _measure_crossing(self) -> None:
        if self._calibrate is not None:
            self._crossing_ns = self._calibrate()

    def _let_go(self) -> None:
        for callback in self._recorder.each_drain:
            self._guarded(callback)

    def _turn(self) -> None:
        self._let_go()
        slots = self._slots.finished() if self._writer.ready else NO_SLOTS
        if len(slots) or self._writer.unwritten(self._recorder.tables.lines):
            self._move(slots)
        self._cpu_ns = time.thread_time_ns()
        self._count()

    def _move(self, slots: SlotNumbers) -> None:
        written = slots[: self._writer.write(self._recorder.tables.lines, self._slots.records(slots))]
        self._written += len(written)
        self._slots.release(written)

    def _count(self) -> None:
        due = time.monotonic() >= self._stats_at
        counted = self._written, self._slots.taken, self._slots.dropped, self._recorder.hook_errors
        if counted == self._counted and not due:
            return
        self._counted = counted
        stats = self.stats()
        self._recorder.ring.count(stats)
        if due:
            # Ever more rarely: a log of weeks holds two dozen of these lines.
            self._stats_every *= 2
            self._stats_at = time.monotonic() + self._stats_every
            self._tell(stats)

    def _tell(self, stats: dict[str, Any]) -> None:
        self._recorder.tables.add("stats", **stats)
        self._recorder.tables.add("clock", **identity.clock_readings())

    def _finish(self) -> None:
        recorder, writer = self._recorder, self._writer
        slots, unwritten = self._slots.seize()
        if unwritten:
            self._slots.drop(unwritten)
        writer.retry()
        self._move(slots)  # even where there are none: what has disappeared must be known before it is counted
        self._cpu_ns = time.thread_time_ns()
        stats = self.stats()
        recorder.ring.count(stats)
        self._tell(stats)
        recorder.tables.add("end", reason=self._reason, **identity.clock_readings())
        writer.finish(recorder.tables.lines)
        left = self._slots.taken
        if left or writer.unwritten(recorder.tables.lines):
            warn(f"{left} calls could not be written: {writer.last_error}; {self._where()}")
        else:
            recorder.ring.remove()
            self._slots.close()
            recover_records(writer.folder.parent, shm=self._settings.shm)  # what a killed process of this run has left

    def _where(self) -> str:
        path = self._recorder.ring.path
        return "they are lost" if path is None else f"they stay in {path} until `commtrace recover` moves them"
