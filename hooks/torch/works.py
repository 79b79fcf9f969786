"""The ends of calls: waits and polls of Work objects, and the brackets around coalesced calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commtrace.hooks.recorder_setup import fault
from commtrace.patching import Patches
from commtrace.recording.session import session

from .kernels import begin
from .tracer import current, now

_patches = Patches()


def install() -> None:
    """Wrap the methods, of subclasses too where they have their own; of two nested waits the inner one counts."""
    work: Any = dist.Work
    for cls in (work, *work.__subclasses__()):
        for name in ("wait", "synchronize"):
            _patches.wrap(cls, name, _waiting)
        _patches.wrap(cls, "is_completed", _polling)
    _patches.wrap(dist.ProcessGroup, "_start_coalescing", _start_coalescing)
    _patches.wrap(dist.ProcessGroup, "_end_coalescing", _end_coalescing)


def uninstall() -> None:
    """Put the methods back."""
    _patches.undo()


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


def _polling(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_completed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        t_end = now()
        tracer = current()
        if result and tracer is not None:
            try:
                pending = tracer.works.find(self)
                if pending is not None:
                    tracer.works.polled(pending, t_end)
            except Exception:
                fault()
        return result

    return is_completed


def _start_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            tracer = current()
            if tracer is None and session.settings is not None:
                tracer = begin()  # the first calls of a program may be a batch
            if tracer is not None:
                tracer.batches.begins(tracer.groups.of(self).number)
        except Exception:
            fault()
        return result

    return _start_coalescing


def _end_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        tracer = current()
        if tracer is not None:
            try:
                tracer.batches.ends(tracer.groups.of(self).number, work)
            except Exception:
                fault()
        return work

    return _end_coalescing
