"""Calls that returned and whose end will show: in a Work, in a tensor that is waited for, or in a batch's Work."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing import reductions

from commtrace.recording.recorder import PendingCall, Recorder, now
from commtrace.recording.session import session
from commtrace.schema import Clock

_WeakStorage: Any = reductions.StorageWeakRef  # torch does not annotate it


class Pending(weakref.ref[Any]):
    """Calls whose end shows in a Work. Weakly: a Work that is kept alive pins its tensors."""

    __slots__ = ("calls", "cost", "key", "on_host", "thread")

    key: int
    calls: list[PendingCall]
    on_host: bool
    cost: int
    thread: int


class Works:
    """The Works that end calls. On a device a wait only orders streams, and is no end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._session = session
        self._process = os.getpid  # an attribute: weak references die until the very end of the interpreter
        self._pending: dict[int, Pending] = {}
        # Works that their callers may not have yet, by thread; each is dropped after two drains at the latest.
        self._fresh: dict[int, Any] = {}
        self._old: dict[int, Any] = {}

    def add(self, work: Any, calls: list[PendingCall], on_host: bool) -> Pending:
        """These calls end when `work` does."""
        pending = Pending(work, self._died)
        thread = threading.get_ident()
        pending.key, pending.calls, pending.on_host, pending.cost, pending.thread = id(work), calls, on_host, 0, thread
        self._pending[pending.key] = pending
        self._fresh[thread] = work
        return pending

    def find(self, work: Any) -> Pending | None:
        """The calls that end with this Work, if any are known."""
        pending = self._pending.get(id(work))
        return pending if pending is not None and pending() is work else None

    def waited(self, pending: Pending, t_wait: int, t_end: int) -> None:
        """A wait came back."""
        if not self._take(pending):
            return  # another thread's wait has been faster
        for call in pending.calls:
            if pending.on_host:
                self._recorder.ended(call, t_wait, t_end, Clock.WAIT)
            else:
                self._recorder.unobservable(call, t_wait)
        if pending.cost:
            self._recorder.cost_samples.append(pending.cost + now() - t_end)

    def polled(self, pending: Pending, t_end: int) -> None:
        """A poll said that it is complete."""
        if pending.on_host and self._take(pending):
            for call in pending.calls:
                self._recorder.ended(call, 0, t_end, Clock.TEST)

    def failed(self, pending: Pending) -> None:
        """A wait raised."""
        if self._take(pending):
            for call in pending.calls:
                self._recorder.failed(call)

    def _take(self, pending: Pending) -> bool:
        if self._pending.get(pending.key) is not pending:
            return False
        del self._pending[pending.key]
        work, thread = pending(), pending.thread
        for kept in (self._fresh, self._old):
            if work is not None and kept.get(thread) is work:
                kept.pop(thread, None)
        return True

    def _died(self, reference: Any) -> None:
        """Nobody in Python holds this Work any more: who waits for it, if anyone, is C++."""
        pending: Pending = reference
        if self._recorder.pid != self._process() or not self._take(pending):
            return  # the log belongs to the process that this one was forked from, or is closed
        for call in pending.calls:
            self._recorder.unobservable(call)
        if pending.cost:
            self._recorder.cost_samples.append(pending.cost)

    def release(self) -> None:
        """By the drain thread: callers have had time to take their Works.

        When the session has ended this is the last time, and all are let go of: what a call of another thread still
        has under way counts as forgotten. Nothing is followed from there on.
        """
        self._old, self._fresh = self._fresh, {}
        if self._session.recorder is not self._recorder:
            self._old = {}
            self._pending = {}


class TensorWaits:
    """The waits of functional collectives name a tensor; as in torch, its storage decides which call is meant."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # A weak reference keeps the address of a storage from being used again, but not its memory.
        self._calls: dict[int, tuple[Any, PendingCall, bool]] = {}

    def add(self, tensors: Iterable[torch.Tensor], call: PendingCall, on_host: bool) -> None:
        """The call ends when a wait for one of these tensors does."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._calls[storage._cdata] = _WeakStorage(storage), call, on_host

    def waited(self, tensor: torch.Tensor, t_wait: int, t_end: int) -> None:
        """A wait for this tensor came back."""
        _, call, on_host = self._calls.pop(tensor.untyped_storage()._cdata, (None, None, False))
        if call is not None and on_host:
            self._recorder.ended(call, t_wait, t_end, Clock.WAIT)
        elif call is not None:
            self._recorder.unobservable(call, t_wait)

    def release(self) -> None:
        """By the drain thread: nobody can wait any more for tensors that are gone."""
        for key, (storage, call, _) in list(self._calls.items()):
            if storage.expired():
                self._calls.pop(key, None)
                if all(other is not call for _, other, _ in list(self._calls.values())):
                    self._recorder.unobservable(call)


class Batch:
    """Calls between _start_coalescing and _end_coalescing."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[PendingCall] = []
        self.on_host = False


class Batches:
    """The batches that are open, by number of their group."""

    def __init__(self, recorder: Recorder, works: Works) -> None:
        self._recorder, self._works = recorder, works
        self._numbers = itertools.count(1)
        self._open: dict[int, Batch] = {}
        self.of: Callable[[int], Batch | None] = self._open.get

    def begins(self, group: int) -> None:
        """Calls on this group belong together until `ends`."""
        self._close(self._open.pop(group, None), None)  # one that an exception has left open
        self._open[group] = Batch(next(self._numbers))

    def ends(self, group: int, work: Any) -> None:
        """The batch is issued; its one Work (None: the backend has waited itself, or on a stream) ends its calls."""
        self._close(self._open.pop(group, None), work)

    def _close(self, batch: Batch | None, work: Any) -> None:
        if batch is None:
            return
        if work is not None and batch.calls:
            self._works.add(work, batch.calls, batch.on_host)
            return
        for call in batch.calls:
            self._recorder.unobservable(call)
