"""The native recorder of torch.distributed: installs C++ kernels, and starts with the first call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from commtrace.current_step import progress
from commtrace.errors import CommtraceError, warn
from commtrace.hooks import purposes, recorder_setup
from commtrace.hooks.recorder_setup import KernelBackend, count_fault
from commtrace.hooks.torch import recording_kernels as torch_kernels
from commtrace.hooks.torch import tracer as torch_tracer
from commtrace.hooks.torch.c10d_operators import Operator
from commtrace.hooks.torch.tracer import TorchTracer
from commtrace.hooks.torch.works import WorkPatches
from commtrace.patching import Patches
from commtrace.recording.counters import Counters
from commtrace.recording.ring import Ring
from commtrace.recording.session import session

from . import libraries
from .native_slots import NativeSlots
from .rows import Rows

_library: Any = None
_operators: list[Operator] = []
_patches = Patches()


class NativeWorkPatches(WorkPatches):
    """Wrappers around waits, polls and coalesced calls that forward to C++."""

    def _wrap_wait(self, patches: Patches, cls: Any, name: str) -> None:
        patches.replace(cls, name, functools.partial(_library.replace_wait, cls))

    def _polled(self, work: Any, completed: bool) -> None:
        if completed:
            _library.note_completed(work)

    def _batch_begins(self, tracer: TorchTracer, group: Any) -> None:
        if isinstance(tracer.recorder.slots, NativeSlots):
            tracer.recorder.slots.recording.batch_begins(group)

    def _batch_ends(self, tracer: TorchTracer, group: Any, work: Any) -> None:
        if isinstance(tracer.recorder.slots, NativeSlots):
            tracer.recorder.slots.recording.batch_ends(group, work)


def usable() -> bool:
    """Return whether the native recorder can be used. Warn if it fails to load, or is requested but not built."""
    global _library
    settings, recorder = session.settings, session.recorder
    if settings is None:
        return False
    reason = ""
    if settings.recorder == "python":
        reason = libraries.PYTHON_REQUESTED
    elif recorder is not None and not isinstance(recorder.slots, NativeSlots):
        reason = "another library's hook had begun to record without it"
    else:
        try:
            _library = _library or libraries.TORCH.load()
        except libraries.NotBuiltError as error:
            reason = str(error)
            if settings.recorder == "native":
                warn(f"{error}. The Python recorder is used instead.")
        except (ImportError, OSError, CommtraceError) as error:
            reason = f"the native recorder cannot be used: {error}"
            warn(f"the native recorder cannot be used: {error}. The Python recorder is used instead.")
    return libraries.note_choice("torch", reason)


@_patches.installer
def install(operators: Sequence[Operator], functional: Sequence[str]) -> None:
    """Install kernels for these c10d and _c10d_functional operators, and wrap the waits."""
    recorder_setup.install_backend(KernelBackend(_library.crossing, _make_slots))
    _patches.on_undo(recorder_setup.install_backend, torch_kernels.PYTHON_BACKEND)
    torch_tracer.start_listeners.insert(0, _start)
    _patches.on_undo(torch_tracer.start_listeners.remove, _start)
    _patches.include(NativeWorkPatches())
    if not _operators:
        add_kernels(operators, functional)
    purposes.keep_in(_library.purposes)
    _patches.on_undo(purposes.keep_here)
    progress.wrap_with(_library.as_part)
    _patches.on_undo(progress.wrap_with, None)
    _library.arm(_begin)
    _patches.on_undo(_library.disarm)


uninstall = _patches.undo
"""Restore what was wrapped. The kernels stay, but only redispatch."""


def add_kernels(operators: Sequence[Operator], functional: Sequence[str]) -> None:
    """Add kernels to these c10d and _c10d_functional operators, which have none."""
    _operators[:] = operators
    _library.install(operators, functional)


def remove_kernels() -> None:
    """Remove the kernels between recordings. Safe only while no other thread communicates."""
    if _library is not None:
        _library.remove_kernels()
        _operators.clear()


def _make_slots(ring: Ring) -> NativeSlots:
    settings = session.settings
    return NativeSlots(
        ring,
        _library,
        sites=settings is not None and settings.sites,
        device_times=settings is not None and settings.device_times,
    )


def _begin() -> bool:
    """Begin to record. C++ calls this with the first call. Return whether later calls may try again."""
    try:
        torch_kernels.ensure_tracer()
    except Exception:
        count_fault(unrecorded=1)
    return session.settings is not None


def _start(tracer: TorchTracer) -> None:
    """Start recording in C++ when a recorder has begun."""
    slots = tracer.recorder.slots
    if isinstance(slots, NativeSlots):
        tracer.recorder.drain_callbacks.append(_collect(tracer.recorder.counters, slots.recording))
        tracer.sites.cleared.append(slots.recording.forget_sites)
        slots.recording.start(Rows(tracer, slots.recording, list(_operators)))


def _collect(counters: Counters, recording: Any) -> Callable[[], None]:
    """Return a function that adds what C++ has counted to the recorder's counters."""

    def collect() -> None:
        recording.resolve()
        *counted, untimed, device_clock_ns = recording.tally()
        counters.add(*counted)
        counters.untimed, counters.device_clock_ns = untimed, device_clock_ns

    return collect
