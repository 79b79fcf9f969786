"""Calls that returned and whose end shows in a Request; what a receive's status tells; matched messages."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from commtrace.recording.recorder import PendingCall, Recorder
from commtrace.schema import Clock

from .communicators import MpiGroup


class Receipt:
    """A message that is to arrive. Its size, and of one from anybody its sender, show when it is there."""

    __slots__ = ("group", "peer", "tag")

    def __init__(self, group: MpiGroup, peer: int, tag: int) -> None:
        """`peer` and `tag` as they were asked for, -1: any."""
        self.group, self.peer, self.tag = group, peer, tag

    def arrived(self, recorder: Recorder, slot_or_call: int | PendingCall, status: Any) -> None:
        """What the status says goes into the record."""
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes >= 0:  # else: not told, and the record keeps the size of the buffer
            recorder.measured(slot_or_call, nbytes)
        source, tag = status.Get_source(), status.Get_tag()
        if (self.peer < 0 or self.tag < 0) and source >= 0 and tag >= 0:
            peer = self.group.peer(source)
            recorder.addressed(slot_or_call, peer, tag, self.group.message(peer, self.group.own, tag))


Ends = Sequence[tuple[PendingCall | None, Receipt | None]]


class Pending(weakref.ref[Any]):
    """Calls whose end shows in a Request. Weakly: a Request that is kept alive pins its buffers."""

    __slots__ = ("cancelled", "ends", "key")

    key: int
    ends: Ends
    cancelled: bool


class _Kept(weakref.ref[Any]):
    """Something to know about an object as long as it lives."""

    __slots__ = ("key", "value")

    key: int
    value: Any


class Requests:
    """The Requests that end calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._process = os.getpid  # an attribute: weak references die until the very end of the interpreter
        self._pending: dict[int, Pending] = {}
        self._kept: dict[int, _Kept] = {}

    # ---- what is under way -----------------------------------------------------------------------------------------

    def add(self, request: Any, ends: Ends) -> None:
        """These calls end when `request` does."""
        pending = Pending(request, self._died)
        pending.key, pending.ends, pending.cancelled = id(request), ends, False
        self._pending[pending.key] = pending

    def find(self, request: Any) -> Pending | None:
        """The calls that end with this Request, if any are known."""
        pending = self._pending.get(id(request))
        return pending if pending is not None and pending() is request else None

    def ended(self, pending: Pending, t_wait: int, t_end: int, clock: Clock, status: Any) -> None:
        """A wait (or, with `t_wait` 0, a poll) showed the end."""
        if self._pending.pop(pending.key, None) is not pending:
            return  # another thread has been faster
        recorder = self._recorder
        gone = pending.cancelled and status is not None and status.Is_cancelled()
        for call, receipt in pending.ends:
            if call is None:
                continue
            if gone:
                recorder.measured(call, 0)
                recorder.unobservable(call, t_wait)
                continue
            if receipt is not None and status is not None:
                receipt.arrived(recorder, call, status)
            recorder.ended(call, t_wait, t_end, clock)

    def failed(self, pending: Pending) -> None:
        """A wait raised."""
        if self._pending.pop(pending.key, None) is pending:
            for call, _ in pending.ends:
                if call is not None:
                    self._recorder.failed(call)

    def dropped(self, request: Any) -> None:
        """The program frees it, and whoever ends it nobody sees."""
        pending = self.find(request)
        if pending is not None:
            self._died(pending)

    def _died(self, reference: Any) -> None:
        pending: Pending = reference
        if self._recorder.pid != self._process() or self._pending.pop(pending.key, None) is not pending:
            return  # the log belongs to the process that this one was forked from, or is closed
        for call, _ in pending.ends:
            if call is not None:
                self._recorder.unobservable(call)

    # ---- what is known of an object --------------------------------------------------------------------------------

    def keep(self, holder: Any, value: Any) -> None:
        """Know this of a persistent request or a matched message, as long as it lives."""
        kept = _Kept(holder, self._lost)
        kept.key, kept.value = id(holder), value
        self._kept[kept.key] = kept

    def kept(self, holder: Any) -> Any:
        """What `keep` was told; None: nothing."""
        kept = self._kept.get(id(holder))
        return kept.value if kept is not None and kept() is holder else None

    def message(self, message: Any) -> tuple[MpiGroup, int, int] | None:
        """(group, source, tag) of a matched message."""
        found: tuple[MpiGroup, int, int] | None = self.kept(message)
        return found

    def _lost(self, reference: Any) -> None:
        kept: _Kept = reference
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]

    def forget(self) -> None:
        """The session has ended: nothing is followed from here on."""
        self._pending = {}
        self._kept = {}
