"""Wrappers around the methods that show the ends of calls: waits and polls of Work objects, and coalescing.

They are no operators, so both recorders wrap them in Python; what differs is in a subclass of `WorkPatches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commtrace.hooks.recorder_setup import fault
from commtrace.patching import Patches
from commtrace.recording.session import session

from .recording_kernels import begin
from .tracer import TorchTracer, current, now


class WorkPatches:
    """The wrapped methods of Work and ProcessGroup. Of two nested waits the inner one counts."""

    def __init__(self) -> None:
        """Replace nothing yet."""
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods, and those of Work's subclasses that define their own."""
        work: Any = dist.Work
        for cls in (work, *work.__subclasses__()):
            for name in ("wait", "synchronize"):
                self._wrap_wait(self._patches, cls, name)
            self._patches.wrap(cls, "is_completed", self._polling)
        self._patches.wrap(dist.ProcessGroup, "_start_coalescing", self._start_coalescing)
        self._patches.wrap(dist.ProcessGroup, "_end_coalescing", self._end_coalescing)

    def uninstall(self) -> None:
        """Restore the methods."""
        self._patches.undo()

    def _wrap_wait(self, patches: Patches, cls: Any, name: str) -> None:
        """Replace a method of a Work class that waits."""
        raise NotImplementedError

    def _polled(self, work: Any) -> None:
        """Note that `work` is complete, as a poll has just shown."""
        raise NotImplementedError

    def _batch_begins(self, tracer: TorchTracer, group: Any) -> None:
        """Note that calls on this process group belong together from here on."""
        raise NotImplementedError

    def _batch_ends(self, tracer: TorchTracer, group: Any, work: Any) -> None:
        """Note that the batch is issued; it ends with `work` (None: the backend has waited, or orders a stream)."""
        raise NotImplementedError

    def _polling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        polled = self._polled

        def is_completed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if result:
                try:
                    polled(self)
                except Exception:
                    fault()
            return result

        return is_completed

    def _start_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        batch_begins = self._batch_begins

        def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                tracer = current()
                if tracer is None and session.settings is not None:
                    tracer = begin()  # the first calls of a program may be a batch
                if tracer is not None:
                    batch_begins(tracer, self)
            except Exception:
                fault()
            return result

        return _start_coalescing

    def _end_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        batch_ends = self._batch_ends

        def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(self, *args, **kwargs)
            try:
                tracer = current()
                if tracer is not None:
                    batch_ends(tracer, self, work)
            except Exception:
                fault()
            return work

        return _end_coalescing


class PythonWorkPatches(WorkPatches):
    """The wrappers of the Python recorder."""

    def _wrap_wait(self, patches: Patches, cls: Any, name: str) -> None:
        patches.wrap(cls, name, _waiting)

    def _polled(self, work: Any) -> None:
        t_end = now()
        tracer = current()
        pending = None if tracer is None else tracer.works.find(work)
        if pending is not None and tracer is not None:
            tracer.works.polled(pending, t_end)

    def _batch_begins(self, tracer: TorchTracer, group: Any) -> None:
        tracer.batches.begins(tracer.groups.of(group).number)

    def _batch_ends(self, tracer: TorchTracer, group: Any, work: Any) -> None:
        tracer.batches.ends(tracer.groups.of(group).number, work)


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
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
            fault()
        return result

    return wait


python_patches = PythonWorkPatches()
