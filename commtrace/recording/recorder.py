"""Python recorder: the functions that hooks call for each communication call.

It writes a record when a call begins, and adds to it when the call returns and when its end is observed. A thread
empties the ring (`commtrace.recording.drain`). Nothing here raises into the program, holds a lock for long, or touches
the file system.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any, Final

from commtrace import identity, launchers
from commtrace.identity import RankIdentity
from commtrace.process_setup.processor_limits import core_list
from commtrace.process_setup.variables import read_variables
from commtrace.schema import FORMAT, RECORD, RECORD_STRUCT, VERSION, Clock, State
from commtrace.settings import Settings

from . import ring
from .counters import Counters
from .drain import Drain
from .exit_byte import append_exit_status
from .leaving import Leaving
from .log_writer import LogWriter
from .peer_watch import PeerWatch
from .slots import PendingCall, Slots
from .table_lines import TableLines

__all__ = ["PendingCall", "Recorder", "now"]

now: Final = time.monotonic_ns

_pack: Final = Struct(RECORD_STRUCT).pack_into
_pack_time: Final = Struct("<q").pack_into
_pack_size: Final = Struct("<2q").pack_into  # payload, local
_pack_seq: Final = Struct("<I").pack_into
_pack_peer: Final = Struct("<2i").pack_into  # peer, tag
_SIZE: Final = RECORD.itemsize
_T_RETURN, _T_WAIT, _T_END, _PAYLOAD, _SEQ, _PEER, _CLOCK, _STATE = (
    RECORD.fields[name][1]  # type: ignore[index]
    for name in ("t_return", "t_wait", "t_end", "payload", "seq", "peer", "clock", "state")
)
_FREE, _BEGUN, _RETURNED, _COMPLETE, _UNOBSERVABLE, _FAILED = (int(state) for state in State)


class Recorder:
    """The recorder of one process, from its first communication call on."""

    def __init__(
        self,
        settings: Settings,
        rank_identity: RankIdentity,
        *,
        blind_spots: list[str],
        calibrate: Callable[[], int] | None = None,
        make_slots: Callable[[ring.Ring], Slots] | None = None,
    ) -> None:
        """Make the ring and start the drain thread.

        Args:
            settings: How to record.
            rank_identity: Rank of this process.
            blind_spots: Calls that the hooks cannot observe, for the log.
            calibrate: Returns the time in ns that a call takes before and after the hook can read a clock.
            make_slots: Makes the slots of the ring. Default: `Slots`; C++ also takes slots of the native recorder.
        """
        self.pid = os.getpid()
        run, host = identity.agree_on_run(rank_identity), identity.host()
        stem = f"rank{rank_identity.rank:05d}-{self.pid}"
        identity_of_ring = {
            "directory": settings.directory, "run": run, "host": host, "pid": self.pid, "stem": stem,
            "steps": settings.steps, "mode": settings.mode, "drain_ms": settings.drain_ms,
        }  # fmt: skip
        name = f"{os.getuid()}-{self.pid}-{os.urandom(4).hex()}"
        self.rank_identity = rank_identity
        self.sites = settings.sites
        self.counters = Counters()
        self._threads = itertools.count(1)
        self._thread = threading.local()
        self.ring = ring.make_ring(settings.ring_records, settings.shm, name, identity_of_ring, settings.kept_records)
        try:
            self._buffer: Any = self.ring.buffer
            self.slots = (make_slots or Slots)(self.ring)
            self._free, self._pending = self.slots.free, self.slots.pending
            self._half = self.ring.capacity // 2
            self.tables = TableLines(self.ring)
            self._add_process(settings, run, host, blind_spots)
            self.run_directory = Path(settings.directory) / run
            writer = LogWriter(
                self.run_directory / host,
                stem,
                settings,
                lambda stem: self.ring.describe({**identity_of_ring, "stem": stem}),
            )
            peers = PeerWatch(self.ring, settings.shm, run, rank_identity.rank, self.tables)
            try:
                self._drain = Drain(
                    self.slots, self.tables, self.counters, writer, settings, rank_identity.rank, calibrate, peers.stop
                )
            except BaseException:
                peers.stop()
                raise
            self.leaving = Leaving(self.tables, peers.check)
            self.drain_callbacks = self._drain.callbacks
        except BaseException:
            self.ring.remove()
            raise

    def _add_process(self, settings: Settings, run: str, host: str, blind_spots: list[str]) -> None:
        """Add the row of the table `process`."""
        self.tables.add(
            "process", format=FORMAT, version=VERSION, run=run, rank=self.rank_identity.rank,
            world_size=self.rank_identity.world_size, local_rank=launchers.launcher_value("local_rank"), host=host,
            pid=self.pid, boot_id=identity.boot_id(), cores=core_list(), recorder=self.slots.recorder,
            versions=identity.versions(), environment=read_variables(),
            launcher=identity.launcher_run_name(), settings=settings.as_dict(), **identity.clock_readings(),
            simulated=False, blind_spots=blind_spots,
        )  # fmt: skip

    def thread(self) -> int:
        """Return the number of the calling thread, from 1."""
        try:
            return self._thread.number  # type: ignore[no-any-return]
        except AttributeError:
            number = self._thread.number = min(next(self._threads), 65535)
            return number

    def begin(
        self, kind: int, group: int, seq: int, payload: int, local: int, peer: int, tag: int,
        site: int, step: int, micro_batch: int, batch: int, phase: int, flags: int,
    ) -> int:  # fmt: skip
        """Record that a call begins, with the fields of `schema.RECORD`.

        Returns:
            The slot of the record, or -1 if the ring is full, which is counted.

        Raises:
            struct.error: A number does not fit into its field.
        """
        slot = -1
        try:
            try:
                slot = self._free.popleft()
            except IndexError:
                slot = self.slots.grow()
            if len(self._free) == self._half:
                self.slots.wake()
            _pack(
                self._buffer, ring.RECORDS_AT + slot * _SIZE, now(), 0, 0, 0, 0, payload, local, seq & 0xFFFFFFFF,
                group, site, step, micro_batch, peer, tag, batch, kind, self.thread(), phase, 0, flags, _BEGUN,
            )  # fmt: skip
            return slot
        except IndexError:
            self.slots.drop(1)
            return -1
        except BaseException:  # a signal handler's, for instance
            if slot >= 0:
                self._buffer[ring.RECORDS_AT + slot * _SIZE + _STATE] = _FREE
                self._free.append(slot)
            raise

    def returned(self, slot: int, t_return: int, *, observable: bool) -> PendingCall | None:
        """Record that a call returned. Returns a handle for its end if the end is observable."""
        if slot < 0:
            return None
        at = ring.RECORDS_AT + slot * _SIZE
        _pack_time(self._buffer, at + _T_RETURN, t_return)
        if not observable:
            self._buffer[at + _STATE] = _UNOBSERVABLE
            return None
        call = self._pending[slot] = PendingCall(slot)
        self._buffer[at + _STATE] = _RETURNED
        return call

    def set_unobservable(self, slot: int, t_return: int) -> None:
        """Record that a call returned and its end is unobservable, because the hook failed. Keep a recorded end."""
        with self.slots.lock:
            at = ring.RECORDS_AT + slot * _SIZE
            if slot < 0 or self._buffer[at + _STATE] not in (_BEGUN, _RETURNED):
                return  # the drain thread may have freed the slot
            self.slots.detach([slot])
            _pack_time(self._buffer, at + _T_RETURN, t_return)
            self._buffer[at + _STATE] = _UNOBSERVABLE

    def set_size(self, slot_or_call: int | PendingCall, payload: int, local: int = 0) -> None:
        """Set a size that is known only after the call was made. Call this before its end is recorded."""
        with self.slots.lock:
            slot = slot_or_call.slot if isinstance(slot_or_call, PendingCall) else slot_or_call
            if slot >= 0:
                _pack_size(self._buffer, ring.RECORDS_AT + slot * _SIZE + _PAYLOAD, payload, local)

    def set_source(self, slot_or_call: int | PendingCall, peer: int, tag: int, seq: int) -> None:
        """Set a source that is known only when the message arrives. Call this before its end is recorded."""
        with self.slots.lock:
            slot = slot_or_call.slot if isinstance(slot_or_call, PendingCall) else slot_or_call
            if slot >= 0:
                at = ring.RECORDS_AT + slot * _SIZE
                _pack_peer(self._buffer, at + _PEER, peer, tag)
                _pack_seq(self._buffer, at + _SEQ, seq & 0xFFFFFFFF)

    def ended(self, call: PendingCall, t_wait: int, t_end: int, clock: Clock) -> None:
        """Record the end of a call: `t_wait` (0: no wait), `t_end`, and how the end was observed."""
        self._finish(call, t_wait, t_end, clock, _COMPLETE)

    def unobservable(self, call: PendingCall, t_wait: int = 0) -> None:
        """Record that the end of a call can no longer be observed."""
        self._finish(call, t_wait, 0, Clock.NONE, _UNOBSERVABLE)

    def failed(self, slot_or_call: int | PendingCall, t_return: int = 0) -> None:
        """Record that a call, or the wait for it, raised an exception."""
        if isinstance(slot_or_call, PendingCall):
            self._finish(slot_or_call, 0, 0, Clock.NONE, _FAILED)
        elif slot_or_call >= 0:
            at = ring.RECORDS_AT + slot_or_call * _SIZE
            _pack_time(self._buffer, at + _T_RETURN, t_return)
            self._buffer[at + _STATE] = _FAILED

    def _finish(self, call: PendingCall, t_wait: int, t_end: int, clock: Clock, state: int) -> None:
        with self.slots.lock:
            slot, call.slot = call.slot, -1
            if slot < 0:
                return
            self._pending[slot] = None
            at = ring.RECORDS_AT + slot * _SIZE
            try:
                self._write_end(at, t_wait, t_end, clock, state)
            except BaseException:
                # A signal handler's, for instance: write the whole end, as half of it would be inconsistent. The state
                # comes last: once it is set, the slot may already be another call's.
                if self._buffer[at + _STATE] == _RETURNED:
                    self._write_end(at, t_wait, t_end, clock, state)
                raise

    def _write_end(self, at: int, t_wait: int, t_end: int, clock: Clock, state: int) -> None:
        _pack_time(self._buffer, at + _T_WAIT, t_wait)
        _pack_time(self._buffer, at + _T_END, t_end)
        self._buffer[at + _CLOCK] = clock
        self._buffer[at + _STATE] = state

    def close(self, reason: str) -> None:
        """Write everything and end the log; `reason` is "exit" or "stop". Waits at most `exit_seconds`."""
        self.leaving.end()
        self._drain.close(reason)

    def close_at_exit(self) -> None:
        """Close the log at the end of the process, which appends its exit status."""
        self.leaving.leave()
        self.close("exit")
        if self._drain.finished_tables is not None:
            append_exit_status(self._drain.finished_tables)

    def stats(self) -> dict[str, Any]:
        """Return the current counters, as docs/reference/log-format.md describes them."""
        return self._drain.stats()

    def forked(self) -> None:
        """Detach a forked child, so that nothing it does reaches the parent's ring or log.

        The child may still wait for an operation that was in flight.
        """
        self.slots.forked()
        self.counters.forked()
        self.tables.forked()
        self.ring.forked()
        self._buffer = self.ring.buffer
