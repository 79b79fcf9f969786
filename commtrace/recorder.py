"""The portable recorder: what hooks call, on the way of every communication call.

It writes a record when a call begins, adds to it when the call returns and when its end is seen, and leaves the rest to
a thread that empties the ring. Nothing here raises into the program, takes a lock that another thread holds for long, or
touches the store.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any, Final

import numpy as np

from commtrace import identity, ring
from commtrace.log_writer import LogWriter, say
from commtrace.schema import FORMAT, RECORD, RECORD_STRUCT, VERSION, Clock, State
from commtrace.settings import Settings
from commtrace.tables import Tables

now: Final = time.monotonic_ns

_pack: Final = Struct(RECORD_STRUCT).pack_into
_pack_time: Final = Struct("<q").pack_into
_SIZE: Final = RECORD.itemsize
_T_RETURN, _T_WAIT, _T_END, _CLOCK, _STATE = (
    RECORD.fields[f][1] for f in ("t_return", "t_wait", "t_end", "clock", "state")
)  # type: ignore[index]
_BEGUN, _RETURNED, _COMPLETE, _UNOBSERVABLE, _FAILED = (int(s) for s in list(State)[1:])

COST_SAMPLES: Final = 4096
FIRST_STATS_SECONDS: Final = 10.0


class Call:
    """A call that returned and whose end may still be seen; `slot` is -1 once its record has left the ring."""

    __slots__ = ("slot",)

    def __init__(self, slot: int) -> None:
        self.slot = slot


class Recorder:
    """One process's recording, from its first communication call on."""

    def __init__(
        self,
        settings: Settings,
        member: identity.Member,
        *,
        blind_spots: list[str],
        calibrate: Callable[[], int] | None = None,
    ) -> None:
        """`calibrate` measures, in ns, what a call costs before and after the hook can look at a clock."""
        self.pid = os.getpid()
        run, host = identity.agree_on_run(member), identity.host()
        stem = f"rank{member.rank:05d}-{self.pid}"
        folder = Path(settings.directory) / run / host
        self.member = member
        self.sites = settings.sites
        self.ring = ring.make(settings.ring_records, settings.shm, f"{os.getuid()}-{self.pid}-{os.urandom(4).hex()}")
        self.ring.describe({"directory": settings.directory, "run": run, "host": host, "stem": stem, "pid": self.pid})
        self.tables = Tables(self.ring)
        self.tables.add("process", **_process_row(run, host, member, settings, blind_spots))
        self.dropped = 0
        self.hook_errors = 0
        self.first_error = ""
        self.cost_samples: deque[int] = deque(maxlen=COST_SAMPLES)
        self._crossing_ns = 0
        self.each_drain: list[Callable[[], None]] = []
        """Called by the drain thread, for hooks that have something to let go of."""
        self._calibrate = calibrate
        self._settings = settings
        self._buffer = self.ring.buffer
        self._free = deque(range(settings.ring_records))
        self._pending: list[Call | None] = [None] * settings.ring_records
        self._lock = threading.RLock()  # between seeing an end and evicting a record; reentrant for signal handlers
        self._threads = itertools.count(1)
        self._thread = threading.local()
        self._writer = LogWriter(folder, stem, settings)
        self._written = 0
        self._drain_cpu_ns = 0
        self._stats_at = time.monotonic() + FIRST_STATS_SECONDS
        self._stats_every = FIRST_STATS_SECONDS
        self._wake = threading.Event()
        self._reason = ""
        self._drainer = threading.Thread(target=self._drain_forever, name="commtrace-drain", daemon=True)
        self._drainer.start()

    # ---- on the way of a call -------------------------------------------------------------------------------------

    def thread(self) -> int:
        """Number of the calling thread."""
        try:
            return self._thread.number  # type: ignore[no-any-return]
        except AttributeError:
            number = self._thread.number = min(next(self._threads), 65535)
            return number

    def begin(
        self, kind: int, group: int, seq: int, payload: int, local: int, peer: int, tag: int,
        site: int, step: int, micro_batch: int, batch: int, phase: int, flags: int,
    ) -> int:  # fmt: skip
        """A call is about to be made: the slot of its record, or -1 where the ring is full (counted)."""
        try:
            slot = self._free.popleft()
        except IndexError:
            with self._lock:
                self.dropped += 1
            return -1
        _pack(
            self._buffer, ring.RECORDS_AT + slot * _SIZE, now(), 0, 0, 0, 0, payload, local, seq & 0xFFFFFFFF, group,
            site, step, micro_batch, peer, tag, batch, kind, self.thread(), phase, 0, flags, _BEGUN,
        )  # fmt: skip
        return slot

    def returned(self, slot: int, t_return: int, *, observable: bool) -> Call | None:
        """The call came back. Gives a handle on its end if one can be seen."""
        if slot < 0:
            return None
        at = ring.RECORDS_AT + slot * _SIZE
        _pack_time(self._buffer, at + _T_RETURN, t_return)
        if not observable:
            self._buffer[at + _STATE] = _UNOBSERVABLE
            return None
        call = self._pending[slot] = Call(slot)
        self._buffer[at + _STATE] = _RETURNED
        return call

    def ended(self, call: Call, t_wait: int, t_end: int, clock: Clock) -> None:
        """The end of a call was seen: `t_wait` (0: nobody waited), `t_end`, and who saw it."""
        self._finish(call, t_wait, t_end, clock, _COMPLETE)

    def unobservable(self, call: Call, t_wait: int = 0) -> None:
        """Nobody can see the end of this call any more."""
        self._finish(call, t_wait, 0, Clock.NONE, _UNOBSERVABLE)

    def failed(self, slot_or_call: int | Call, t_return: int = 0) -> None:
        """The call, or the wait for it, raised an exception."""
        if isinstance(slot_or_call, Call):
            self._finish(slot_or_call, 0, 0, Clock.NONE, _FAILED)
        elif slot_or_call >= 0:
            at = ring.RECORDS_AT + slot_or_call * _SIZE
            _pack_time(self._buffer, at + _T_RETURN, t_return)
            self._buffer[at + _STATE] = _FAILED

    def _finish(self, call: Call, t_wait: int, t_end: int, clock: Clock, state: int) -> None:
        with self._lock:
            slot, call.slot = call.slot, -1
            if slot < 0:
                return
            self._pending[slot] = None
            at = ring.RECORDS_AT + slot * _SIZE
            _pack_time(self._buffer, at + _T_WAIT, t_wait)
            _pack_time(self._buffer, at + _T_END, t_end)
            self._buffer[at + _CLOCK] = clock
            self._buffer[at + _STATE] = state

    def fault(self) -> None:
        """A hook failed (call this in its `except`): counted, the first one kept for the report, never raised."""
        self.hook_errors += 1
        if not self.first_error:
            self.first_error = traceback.format_exc(limit=-4)[-2000:]

    # ---- the drain thread -----------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Write out everything and end the log; `reason` is "exit" or "stop". Waits `exit_seconds` at most."""
        self._reason = reason
        self._wake.set()
        if threading.current_thread() is not self._drainer:
            self._drainer.join(self._settings.exit_seconds)
        if self._drainer.is_alive():
            say(
                f"the log could not be finished within {self._settings.exit_seconds:g} s; what is missing lies in {self.ring.path}"
            )

    def stats(self) -> dict[str, Any]:
        """The counters of docs/log-format.md, as of now."""
        # The crossing from C++ into the hook cannot be seen from within it. (sorted, as numpy's percentile takes 60 ms
        # of a core when it is called for the first time.)
        costs = sorted(cost + self._crossing_ns for cost in list(self.cost_samples))
        return {
            "mono_ns": now(),
            "calls": self._written + self._settings.ring_records - len(self._free),
            "dropped": self.dropped,
            "removed": self._writer.removed,
            "lost": self._writer.lost,
            "hook_errors": self.hook_errors,
            "first_error": self.first_error,
            "write_errors": self._writer.errors,
            "last_write_error": self._writer.last_error,
            "cost_samples": len(costs),
            "cost_ns": sum(costs),
            "cost_p99_ns": costs[len(costs) * 99 // 100] if costs else 0,
            "drain_cpu_ns": self._drain_cpu_ns,
        }

    def _drain_forever(self) -> None:
        try:
            if self._calibrate is not None:
                self._crossing_ns = self._calibrate()
        except Exception:
            self.fault()
        closing = False
        while not closing:
            closing = self._wake.wait(self._settings.drain_ms / 1000)
            try:
                for callback in self.each_drain:
                    callback()
                self._drain(closing)
                self._drain_cpu_ns = time.thread_time_ns()
                self._count(closing)
            except Exception:
                self.fault()
        self._finish_log()

    def _drain(self, closing: bool) -> None:
        state = self.ring.records["state"]
        slots = np.flatnonzero(state >= (_BEGUN if closing else _COMPLETE))
        if self._writer.ready and len(self._free) + len(slots) < self._settings.ring_records // 4:
            slots = np.concatenate([slots, self._evictable(self._settings.ring_records // 4)])
        if not len(slots) and not self._writer.unwritten(self.tables.lines):
            return
        written = slots[: self._writer.write(self.tables.lines, self.ring.records[slots], last=closing)]
        state[written] = State.FREE
        self._written += len(written)
        self._free.extend(written.tolist())

    def _evictable(self, count: int) -> Any:
        """Slots of the oldest calls that returned and were never seen to end: the ring needs their places.

        Their records are written as they are, "returned"; an end that comes later finds no record and is forgotten.
        """
        records = self.ring.records
        with self._lock:
            waiting = np.flatnonzero(records["state"] == _RETURNED)
            oldest = waiting[np.argsort(records["t_begin"][waiting], kind="stable")[:count]]
            for slot in oldest.tolist():
                call, self._pending[slot] = self._pending[slot], None
                if call is not None:
                    call.slot = -1
        return oldest

    def _count(self, closing: bool) -> None:
        stats = self.stats()
        self.ring.count(stats)
        if time.monotonic() >= self._stats_at or closing:
            # Ever more rarely: a log of weeks holds two dozen of these lines.
            self._stats_every *= 2
            self._stats_at = time.monotonic() + self._stats_every
            self.tables.add("stats", **stats)
            self.tables.add("clock", **identity.moment())

    def _finish_log(self) -> None:
        self.tables.add("end", reason=self._reason, **identity.moment())
        self._writer.write(self.tables.lines, self.ring.records[:0], last=True)
        self._writer.close()
        left = int(np.count_nonzero(self.ring.records["state"]))
        if left or self._writer.unwritten(self.tables.lines):
            say(
                f"{left} calls could not be written: {self._writer.last_error}. They stay in {self.ring.path or 'memory, and are lost'}."
            )
        else:
            self.ring.remove()


def _process_row(
    run: str, host: str, member: identity.Member, settings: Settings, blind_spots: list[str]
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "run": run,
        "rank": member.rank,
        "world_size": member.world_size,
        "local_rank": identity.local_rank(),
        "host": host,
        "pid": os.getpid(),
        "boot_id": identity.boot_id(),
        "recorder": "python",
        "versions": identity.versions(),
        "environment": identity.environment(),
        "launcher": identity.launcher(),
        "settings": dataclasses.asdict(settings),
        **identity.moment(),
        "simulated": False,
        "blind_spots": blind_spots,
    }
