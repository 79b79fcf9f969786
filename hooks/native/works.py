"""Waits, polls and coalesced calls, as torch_works has them for the portable recorder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from commtrace.hooks.recorder_setup import fault
from commtrace.hooks.torch.kernels import begin
from commtrace.hooks.torch.tracer import TorchTracer, current
from commtrace.patching import Patches
from commtrace.recording.session import session

from .slots import NativeSlots

_patches = Patches()


def install(library: Any) -> None:
    """Wrap the methods, of subclasses too where they have their own."""
    work: Any = dist.Work
    for cls in (work, *work.__subclasses__()):
        for name in ("wait", "synchronize"):
            _patches.replace(cls, name, functools.partial(library.waiting, cls))
        _patches.wrap(cls, "is_completed", _polling(library))
    _patches.wrap(dist.ProcessGroup, "_start_coalescing", _start_coalescing)
    _patches.wrap(dist.ProcessGroup, "_end_coalescing", _end_coalescing)


def uninstall() -> None:
    """Put the methods back."""
    _patches.undo()


def _polling(library: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def is_completed(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if result:
                library.polled(self)
            return result

        return is_completed

    return wrapper


def _recording(tracer: TorchTracer | None) -> Any:
    slots = None if tracer is None else tracer.recorder.slots
    return slots.recording if isinstance(slots, NativeSlots) else None


def _start_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            tracer = current()
            if tracer is None and session.settings is not None:
                tracer = begin()  # the first calls of a program may be a batch
            recording = _recording(tracer)
            if recording is not None:
                recording.batch_begins(self)
        except Exception:
            fault()
        return result

    return _start_coalescing


def _end_coalescing(original: Callable[..., Any]) -> Callable[..., Any]:
    def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        try:
            recording = _recording(current())
            if recording is not None:
                recording.batch_ends(self, work)
        except Exception:
            fault()
        return work

    return _end_coalescing
