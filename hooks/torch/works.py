"""Wrappers of the methods that observe the ends of calls: waits and polls of Work objects, and coalescing.

These methods are not operators, so both recorders wrap them in Python. `WorkPatches` records the ends for the Python
recorder, and a subclass for the native one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commtrace.hooks.recorder_setup import count_fault
from commtrace.patching import Patches, Wrapper
from commtrace.recording.session import session

from .recording_kernels import ensure_tracer
from .tracer import TorchTracer, current, now


class WorkPatches:
    """The wrapped methods of Work and ProcessGroup. Of two nested waits, the inner one is recorded."""

    def __init__(self) -> None:
        self._patches = Patches()
        self.uninstall = self._patches.undo

    def install(self) -> None:
        """Wrap the methods, and those of Work's subclasses that define their own."""
        work: Any = dist.Work
        for cls in (work, *work.__subclasses__()):
            for name in ("wait", "synchronize"):
                self._wrap_wait(self._patches, cls, name)
            self._patches.wrap(cls, "is_completed", _call_after(self._polled))
        self._patches.wrap(dist.ProcessGroup, "_start_coalescing", _call_after(self._started_coalescing))
        self._patches.wrap(dist.ProcessGroup, "_end_coalescing", _call_after(self._ended_coalescing))

    def _wrap_wait(self, patches: Patches, cls: Any, name: str) -> None:
        """Wrap a waiting method of a Work class."""
        patches.wrap(cls, name, _wrap_wait_method)

    def _polled(self, work: Any, completed: bool) -> None:
        """Record the end of the calls that end with `work`, if a poll has shown that it is complete."""
        t_end = now()
        tracer = current() if completed else None
        pending = None if tracer is None else tracer.works.find(work)
        if pending is not None and tracer is not None:
            tracer.works.polled(pending, t_end)

    def _started_coalescing(self, group: Any, _: Any) -> None:
        tracer = current()
        if tracer is None and session.settings is not None:
            tracer = ensure_tracer()  # the first calls of a program may be a batch
        if tracer is not None:
            self._batch_begins(tracer, group)

    def _ended_coalescing(self, group: Any, work: Any) -> None:
        tracer = current()
        if tracer is not None:
            self._batch_ends(tracer, group, work)

    def _batch_begins(self, tracer: TorchTracer, group: Any) -> None:
        """Begin a batch: the next calls on this process group belong to it."""
        tracer.batches.begins(tracer.groups.get(group).number)

    def _batch_ends(self, tracer: TorchTracer, group: Any, work: Any) -> None:
        """Close the batch, which ends with `work` (None: the backend has waited, or orders a stream)."""
        tracer.batches.ends(tracer.groups.get(group).number, work)


def _call_after(note: Callable[[Any, Any], None]) -> Wrapper:
    """Return a wrapper that calls `note(self, result)` after the method."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                note(self, result)
            except Exception:
                count_fault()
            return result

        return method

    return wrapper


def _wrap_wait_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current()
        pending = None if tracer is None else tracer.works.find(self)
        if pending is None or tracer is None:
            return original(self, *args, **kwargs)
        t_wait = now()
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            tracer.works.failed(pending)
            raise
        t_end = now()
        try:
            tracer.works.waited(pending, t_wait, t_end)
        except Exception:
            count_fault()
        return result

    return wait
