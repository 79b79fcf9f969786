"""The native recorder's wrappers around waits, polls and coalesced calls."""

from __future__ import annotations

import functools
from typing import Any

from commtrace.hooks.torch.tracer import TorchTracer
from commtrace.hooks.torch.works import WorkPatches
from commtrace.patching import Patches

from .slots import NativeSlots


class NativeWorkPatches(WorkPatches):
    """Wrappers that pass on to C++."""

    library: Any = None

    def _wrap_wait(self, patches: Patches, cls: Any, name: str) -> None:
        patches.replace(cls, name, functools.partial(self.library.waiting, cls))

    def _polled(self, work: Any) -> None:
        self.library.polled(work)

    def _batch_begins(self, tracer: TorchTracer, group: Any) -> None:
        if isinstance(tracer.recorder.slots, NativeSlots):
            tracer.recorder.slots.recording.batch_begins(group)

    def _batch_ends(self, tracer: TorchTracer, group: Any, work: Any) -> None:
        if isinstance(tracer.recorder.slots, NativeSlots):
            tracer.recorder.slots.recording.batch_ends(group, work)


native_patches = NativeWorkPatches()
