"""Pending calls by Request, persistent requests, matched messages, and receives completed from their status."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from commtrace.recording.recorder import PendingCall, Recorder
from commtrace.schema import Clock

from .communicators import MpiGroup


class PendingReceive(NamedTuple):
    """A message to receive. Its size is known on arrival, and so are its sender and tag if the call accepts any."""

    group: MpiGroup
    peer: int  # accepted by the call; -1: any
    tag: int

    def arrived(self, recorder: Recorder, slot_or_call: int | PendingCall, status: Any) -> None:
        """Complete the record from the status."""
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes >= 0:  # else: undefined, and the record keeps the size of the buffer
            recorder.set_size(slot_or_call, nbytes)
        source, tag = status.Get_source(), status.Get_tag()
        if (self.peer < 0 or self.tag < 0) and source >= 0 and tag >= 0:
            peer = self.group.peer(source)
            recorder.set_source(slot_or_call, peer, tag, next(self.group.counter(peer, tag, sends=False)))


Ends = Sequence[tuple[PendingCall | None, PendingReceive | None]]


class PendingRequest(weakref.ref[Any]):
    """A weak reference to the Request that ends these calls; a strong one would pin its buffers."""

    __slots__ = ("cancelled", "ends", "key")

    key: int
    ends: Ends
    cancelled: bool


class Requests:
    """The Requests that end calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._process = os.getpid  # an attribute: weak references may die after modules are torn down
        self._pending: dict[int, PendingRequest] = {}
        self._kept: dict[int, tuple[weakref.ref[Any], Any]] = {}

    # ---- pending calls ---------------------------------------------------------------------------------------------

    def add(self, request: Any, ends: Ends) -> None:
        """Note that these calls end when `request` does."""
        pending = PendingRequest(request, self._died)
        pending.key, pending.ends, pending.cancelled = id(request), ends, False
        self._pending[pending.key] = pending

    def find(self, request: Any) -> PendingRequest | None:
        """Return the calls that end with this Request, if any are known."""
        pending = self._pending.get(id(request))
        return pending if pending is not None and pending() is request else None

    def ended(self, pending: PendingRequest, t_wait: int, t_end: int, clock: Clock, status: Any) -> None:
        """Record the end of these calls, shown by a wait or, with `t_wait` 0, by a poll."""
        if self._pending.pop(pending.key, None) is not pending:
            return  # another thread's wait returned first
        recorder = self._recorder
        cancelled = pending.cancelled and status is not None and status.Is_cancelled()
        for call, receive in pending.ends:
            if call is None:
                continue
            if cancelled:
                recorder.set_size(call, 0)
                recorder.unobservable(call, t_wait)
                continue
            if receive is not None and status is not None:
                receive.arrived(recorder, call, status)
            recorder.ended(call, t_wait, t_end, clock)

    def failed(self, pending: PendingRequest) -> None:
        """Record that these calls failed, because a wait raised an exception."""
        if self._pending.pop(pending.key, None) is pending:
            for call, _ in pending.ends:
                if call is not None:
                    self._recorder.failed(call)

    def cancel(self, request: Any) -> None:
        """Note that the program has cancelled a Request: its status shows whether that succeeded."""
        pending = self.find(request)
        if pending is not None:
            pending.cancelled = True

    def dropped(self, request: Any) -> None:
        """Give up on a Request that the program frees: its end cannot be observed."""
        pending = self.find(request)
        if pending is not None:
            self._died(pending)

    def _died(self, reference: Any) -> None:
        pending: PendingRequest = reference
        if self._recorder.pid != self._process() or self._pending.pop(pending.key, None) is not pending:
            return  # the log belongs to the process that this one was forked from, or is closed
        for call, _ in pending.ends:
            if call is not None:
                self._recorder.unobservable(call)

    # ---- values by object ------------------------------------------------------------------------------------------

    def keep(self, holder: Any, value: Any) -> None:
        """Keep a value for a persistent request or a matched message until that is deallocated."""
        key, kept = id(holder), self._kept

        def died(reference: weakref.ref[Any]) -> None:
            if key in kept and kept[key][0] is reference:
                del kept[key]

        kept[key] = weakref.ref(holder, died), value

    def kept(self, holder: Any) -> Any:
        """Return the value kept for this object; None if there is none."""
        known = self._kept.get(id(holder))
        return known[1] if known is not None and known[0]() is holder else None

    def forget(self) -> None:
        """Drop everything when the session has ended."""
        self._pending = {}
        self._kept = {}
