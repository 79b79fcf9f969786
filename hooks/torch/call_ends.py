"""Calls that have returned but not ended: a Work, a tensor, or a batch's Work shows their end."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing import reductions

from commtrace.recording.recorder import PendingCall, Recorder, now
from commtrace.recording.session import session
from commtrace.schema import Clock

_WeakStorage: Any = reductions.StorageWeakRef  # torch does not annotate it


class PendingWork(weakref.ref[Any]):
    """Reference to the Work that ends these calls; weak, because a Work pins its tensors."""

    __slots__ = ("calls", "cost", "first", "key", "on_host", "thread")

    key: int
    calls: list[PendingCall]
    on_host: bool
    cost: int
    first: bool
    thread: int


class Works:
    """The Works that end calls. On a device, a wait only orders streams and is not an end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._session = session
        self._process = os.getpid  # an attribute: Works may die after module globals
        self._pending: dict[int, PendingWork] = {}
        # Last Work by thread, which the caller may not hold yet. Dropped after at most two drains.
        self._fresh: dict[int, Any] = {}
        self._old: dict[int, Any] = {}

    def add(self, work: Any, calls: list[PendingCall], on_host: bool) -> PendingWork:
        """Note that these calls end when `work` does."""
        pending = PendingWork(work, self._died)
        thread = threading.get_ident()
        pending.key, pending.calls, pending.on_host, pending.cost, pending.thread = id(work), calls, on_host, 0, thread
        self._pending[pending.key] = pending
        self._fresh[thread] = work
        return pending

    def find(self, work: Any) -> PendingWork | None:
        """Return the calls that end with this Work, if any are known."""
        pending = self._pending.get(id(work))
        return pending if pending is not None and pending() is work else None

    def waited(self, pending: PendingWork, t_wait: int, t_end: int) -> None:
        """Record the end of these calls after a wait has returned."""
        if not self._take(pending):
            return  # another thread's wait returned earlier
        for call in pending.calls:
            if pending.on_host:
                self._recorder.ended(call, t_wait, t_end, Clock.WAIT)
            else:
                self._recorder.unobservable(call, t_wait)
        self._note_cost(pending, now() - t_end)

    def polled(self, pending: PendingWork, t_end: int) -> None:
        """Record the end of these calls after a poll has shown that the Work is complete."""
        if pending.on_host and self._take(pending):
            for call in pending.calls:
                self._recorder.ended(call, 0, t_end, Clock.TEST)
            self._note_cost(pending, now() - t_end)

    def failed(self, pending: PendingWork) -> None:
        """Record that these calls failed after a wait has raised an exception."""
        if self._take(pending):
            for call in pending.calls:
                self._recorder.failed(call)
            self._note_cost(pending)

    def _note_cost(self, pending: PendingWork, ns: int = 0) -> None:
        """Count the cost of calls that have ended, if it was sampled; `ns`: that of their end."""
        if pending.cost:
            self._recorder.counters.note_cost(pending.cost + ns, sampled=True, first=pending.first)

    def _take(self, pending: PendingWork) -> bool:
        if self._pending.get(pending.key) is not pending:
            return False
        del self._pending[pending.key]
        work, thread = pending(), pending.thread
        for kept in (self._fresh, self._old):
            if work is not None and kept.get(thread) is work:
                kept.pop(thread, None)
        return True

    def _died(self, reference: Any) -> None:
        """Give up on a Work that Python no longer holds: only C++ can still wait for it."""
        pending: PendingWork = reference
        if self._recorder.pid != self._process() or not self._take(pending):
            return  # in a forked child, or the calls have ended, or the log is closed
        for call in pending.calls:
            self._recorder.unobservable(call)
        self._note_cost(pending)

    def release(self) -> None:
        """Drop Works whose callers have had time to take them. Called by the drain thread.

        After the session has ended, drop everything: the ends of calls that are still under way in
        other threads are not observed.
        """
        self._old, self._fresh = self._fresh, {}
        if self._session.recorder is not self._recorder:
            self._old = {}
            self._pending = {}


class TensorWaits:
    """Calls of functional collectives. Waits take a tensor, whose storage identifies the call."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # A weak reference to a storage prevents the reuse of its address; its memory is freed.
        self._calls: dict[int, tuple[Any, PendingCall, bool]] = {}

    def add(self, tensors: Iterable[torch.Tensor], call: PendingCall, on_host: bool) -> None:
        """Note that the call ends when a wait for one of these tensors does."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._calls[storage._cdata] = _WeakStorage(storage), call, on_host

    def waited(self, tensor: torch.Tensor, t_wait: int, t_end: int) -> None:
        """Record the end of a call after a wait for this tensor has returned."""
        _, call, on_host = self._calls.pop(tensor.untyped_storage()._cdata, (None, None, False))
        if call is not None and on_host:
            self._recorder.ended(call, t_wait, t_end, Clock.WAIT)
        elif call is not None:
            self._recorder.unobservable(call, t_wait)

    def release(self) -> None:
        """Give up on calls whose tensors are gone. Called by the drain thread."""
        for key, (storage, call, _) in list(self._calls.items()):
            if storage.expired():
                self._calls.pop(key, None)
                if all(other is not call for _, other, _ in list(self._calls.values())):
                    self._recorder.unobservable(call)


@dataclass
class Batch:
    """Calls between _start_coalescing and _end_coalescing."""

    number: int
    calls: list[PendingCall] = field(default_factory=list)
    on_host: bool = False


class Batches:
    """The open batches, by the number of their group."""

    def __init__(self, recorder: Recorder, works: Works) -> None:
        """Write ends with this recorder, and follow the batches' Works."""
        self._recorder, self._works = recorder, works
        self._numbers = itertools.count(1)
        self._open: dict[int, Batch] = {}
        self.of: Callable[[int], Batch | None] = self._open.get

    def begins(self, group: int) -> None:
        """Open a batch: calls on this group belong together until `ends`."""
        self.ends(group, None)  # if an exception left one open
        self._open[group] = Batch(next(self._numbers))

    def ends(self, group: int, work: Any) -> None:
        """Close the batch. Its one Work ends its calls; None: the backend has waited itself, or orders a stream."""
        batch = self._open.pop(group, None)
        if batch is None:
            return
        if work is not None and batch.calls:
            self._works.add(work, batch.calls, batch.on_host)
            return
        for call in batch.calls:
            self._recorder.unobservable(call)
