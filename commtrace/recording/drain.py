"""Drain thread: moves finished records from the ring to the log, at most every 500 ms, and at the end.

Only this thread writes to the log directory, so that no call of the program ever waits for it. It takes a turn every
500 ms. Moving records takes most of the time of a turn, nearly as much for a few as for hundreds, on a processor that
the program may need: while calls go on and the ring is nearly empty, it is therefore done in one turn of four.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from commtrace import identity
from commtrace.errors import warn
from commtrace.process_setup.setup_reader import SetupReader
from commtrace.rank_ranges import rank_ranges, select_steps
from commtrace.settings import Settings

from .counters import Counters
from .kept_records import KeptDumps, in_flight, select_at_exit
from .log_writer import LogWriter
from .recovery import recover_records
from .slots import NO_SLOTS, SlotNumbers, Slots
from .stacks import StackSampler
from .summary_writer import SummaryWriter
from .table_lines import TableLines

FIRST_STATS_SECONDS: Final = 10.0
COST_SECONDS: Final = 2.0
"""Interval between summaries of the cost samples: sorting them takes most of the time of a turn."""
FIRST_SETUP_SECONDS: Final = 1.0
TURNS_TO_MOVE: Final = 4
"""Turns until records are moved in any case."""
LATE_SECONDS: Final = 2.0
"""Time by which a turn is late if the process was stopped, another thread kept the interpreter's lock, or the turn
before it waited for storage."""

# Signals that a thread gets for its own faults.
_OWN_FAULTS: Final = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT}


class Drain:
    """Drain thread of one recorder."""

    def __init__(
        self,
        slots: Slots,
        tables: TableLines,
        counters: Counters,
        writer: LogWriter,
        settings: Settings,
        rank: int,
        calibrate: Callable[[], int] | None,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            slots: The slots whose records it writes.
            tables: The table rows that it writes.
            counters: What the hooks counted.
            writer: The log.
            settings: How to record.
            rank: Rank of the process.
            calibrate: Returns the time in ns that a call takes before and after the hook can read a clock.
            before_end: Called before the last rows are written.
        """
        self._before_end = before_end
        self._slots, self._ring, self._tables, self._counters = slots, slots.ring, tables, counters
        self._writer, self._settings = writer, settings
        self.callbacks: list[Callable[[], None]] = []
        """Functions to call at each turn, for hooks that have something to release."""
        self._calibrate = calibrate or (lambda: 0)
        self._selection = rank_ranges(settings.steps)
        self._is_kept = np.zeros(self._slots.capacity, bool)
        self._summary = SummaryWriter(settings, rank, self._ring, writer) if settings.mode == "summary" else None
        self._dumps = KeptDumps(settings, self._ring, writer.dump) if settings.kept_records else None
        self._stacks = StackSampler(settings, slots, tables)
        self._crossing_ns = self._written = self._not_selected = self._cpu_ns = 0
        self._costs: dict[str, int] = {}
        self._costs_at = 0.0
        self._counted: object = None
        self._stats_every = FIRST_STATS_SECONDS
        self._stats_at = time.monotonic() + FIRST_STATS_SECONDS
        # A dry run shows a job on other machines than the one that it runs on.
        self._setup = None if settings.simulated else SetupReader()
        self._setup_every = FIRST_SETUP_SECONDS
        self._setup_at = 0.0
        self._begun = self._turns = 0  # calls at the last turn, and turns since records were moved
        self._is_late = False  # whether this turn is
        self._reason = ""  # why the log ended; empty before
        self.finished_tables: Path | None = None
        """The file of the table lines, once all of them are in it."""
        self._count()
        self._thread = threading.Thread(target=self._run, name="commtrace-drain", daemon=True)
        self._thread.start()

    def close(self, reason: str) -> None:
        """End the log. Waits at most `exit_seconds`."""
        self._reason = reason
        self._slots.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._settings.exit_seconds)
            if self._thread.is_alive():
                seconds = self._settings.exit_seconds
                warn(f"the log could not be finished within {seconds:g} s; {self._describe_unwritten()}")

    def stats(self) -> dict[str, Any]:
        """Return the current counters, as docs/reference/log-format.md describes them."""
        ring, counters, writer = self._ring, self._counters, self._writer
        if self._reason or time.monotonic() >= self._costs_at:
            self._costs_at = time.monotonic() + COST_SECONDS
            self._costs = counters.cost_sums(self._crossing_ns)
        return {
            "mono_ns": time.monotonic_ns(),
            "calls": sum((self._moved, self._slots.taken, ring.dropped, counters.unrecorded)),
            "dropped": ring.dropped,
            "removed": writer.removed,
            "lost": writer.lost,
            "unrecorded": counters.unrecorded,
            "not_selected": self._not_selected,
            "summarized": self._summary.calls if self._summary else 0,
            "hook_errors": counters.hook_errors,
            "first_error": counters.first_error,
            "write_errors": writer.errors,
            "last_write_error": writer.last_error,
            **self._costs,
            "drain_cpu_ns": self._cpu_ns,
            "untimed": counters.untimed,
            "device_clock_ns": counters.device_clock_ns,
        }

    @property
    def _moved(self) -> int:
        return self._written + self._not_selected + (self._summary.calls if self._summary else 0)

    def _run(self) -> None:
        # Leave signals of the process to the program's threads.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_FAULTS)
        self._guarded(self._measure_crossing)
        self._guarded(self._read_setup)
        pause = self._settings.drain_ms / 1000
        last = time.monotonic()
        while not self._reason:
            self._slots.wait(pause)
            # From turn to turn: a process that is stopped during one is late with the next.
            now = time.monotonic()
            self._is_late, last = now - last >= pause + LATE_SECONDS, now
            if not self._reason:
                self._ring.turn(is_late=self._is_late)
                self._guarded(self._turn)
        self._run_callbacks()
        self._guarded(self._before_end)
        self._guarded(self._finish)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self._counters.count_fault()

    def _measure_crossing(self) -> None:
        self._crossing_ns = self._calibrate()

    def _read_setup(self) -> None:
        # Twice as long each time: libraries are loaded in the first seconds, if not in the first call.
        self._setup_at = time.monotonic() + self._setup_every
        self._setup_every *= 2
        row = self._setup.changed_row(is_last=bool(self._reason)) if self._setup else None
        if row is not None:
            self._tables.add("setup", **row)

    def _run_callbacks(self) -> None:
        for callback in self.callbacks:
            self._guarded(callback)

    def _turn(self) -> None:
        self._run_callbacks()
        if time.monotonic() >= self._setup_at:
            self._read_setup()
        calls = self._moved + self._slots.taken + self._ring.dropped
        if self._is_due(calls):
            self._move_finished()
        is_stalled = self._stacks.turn(calls, is_late=self._is_late)
        if self._dumps:
            self._dumps.turn(is_stalled=is_stalled)

    def _is_due(self, calls: int) -> bool:
        """Return whether this turn moves records.

        Args:
            calls: Number of calls begun so far.
        """
        self._turns += 1
        is_quiet, self._begun = calls == self._begun, calls
        return (
            is_quiet
            or self._turns >= TURNS_TO_MOVE
            or self._slots.taken >= self._slots.capacity // 8
            or self._settings.kept_records > 0
            or self._writer.unwritten(self._tables.lines) > 0
        )

    def _move_finished(self) -> None:
        """Move the records that are final, and write the counters to the ring."""
        self._turns = 0
        # Records that are not written to disk leave the ring even while writing fails.
        may_move = self._writer.ready or self._settings.kept_records
        slots = self._slots.finished() if may_move else NO_SLOTS
        if len(slots) or self._writer.unwritten(self._tables.lines):
            self._move(slots)
        if self._summary:
            self._summary.turn()
        self._cpu_ns = time.thread_time_ns()
        self._count()

    def _move(self, slots: SlotNumbers, *, is_last: bool = False) -> None:
        """Write the records in slots, and free those that are on disk, in a summary, or not selected.

        With `is_last`, records of calls in flight are written in any case.
        """
        records = self._slots.records(slots)
        if self._settings.kept_records:
            order = np.argsort(records["t_begin"], kind="stable")
            slots, records = slots[order], records[order]
            self._ring.keep(records[~self._is_kept[slots]])
            finished = ~(is_last & in_flight(records))
            left_out = finished & ~select_steps(records["step"], self._selection)
            self._not_selected += int(left_out.sum())
            if self._summary:
                self._summary.add(records[finished & ~left_out])
                left_out = finished
            self._slots.release(slots[left_out])
            slots, records = slots[~left_out], records[~left_out]
        written = slots[: self._writer.write(self._tables.lines, records)]
        self._is_kept[slots] = True  # those that could not be written will be taken again
        self._is_kept[written] = False
        self._written += len(written)
        self._slots.release(written)

    def _count(self) -> None:
        due = time.monotonic() >= self._stats_at
        counted = self._moved, self._slots.taken, self._ring.dropped, self._counters.hook_errors
        if counted == self._counted and not due:
            return
        self._counted = counted
        stats = self.stats()
        self._ring.count(stats)
        if due:
            # Twice as long each time: a log of several weeks has two dozen of these lines.
            self._stats_every *= 2
            self._stats_at = time.monotonic() + self._stats_every
            self._add_stats(stats)

    def _add_stats(self, stats: dict[str, Any]) -> None:
        self._tables.add("stats", **stats)
        self._tables.add("clock", **identity.clock_readings())

    def _finish(self) -> None:
        ring, tables, writer = self._ring, self._tables, self._writer
        self._guarded(self._read_setup)
        slots, unwritten = self._slots.seize()
        if unwritten:
            self._slots.drop(unwritten)
        writer.retry()
        # Even without slots, to detect removed files before records are counted.
        self._move(slots, is_last=True)
        is_summary_written = self._summary.finish() if self._summary else True
        self._cpu_ns = time.thread_time_ns()
        stats = self.stats()
        ring.count(stats)
        self._add_stats(stats)
        tables.add("end", reason=self._reason, **identity.clock_readings())
        writer.finish(tables.lines, select_at_exit(ring.kept()))
        unwritten = self._slots.taken
        if unwritten or not is_summary_written or writer.unwritten(tables.lines):
            warn(f"{unwritten} calls could not be written: {writer.last_error}; {self._describe_unwritten()}")
        else:
            self.finished_tables = writer.tables_path
            ring.remove()
            self._slots.close()
            recover_records(writer.directory.parent, shm=self._settings.shm)  # of killed processes of this run

    def _describe_unwritten(self) -> str:
        path = self._ring.path
        place = "are lost" if path is None else f"stay in {path} until `commtrace recover` moves them"
        return f"unwritten records {place}"
