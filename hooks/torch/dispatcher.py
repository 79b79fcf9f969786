"""Registration of Python kernels that run before torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
"""The dispatch keys after commtrace's kernels: `redispatch(keyset & BELOW, ...)` calls the next kernel."""


class Kernels:
    """The kernels of one hook. The key BackendSelect comes before every device's and costs other operators nothing.

    Kernels stay when recording ends, and only pass calls on: torch frees a removed kernel at once, although another
    thread may be entering it (waiting for the GIL), and that thread's call would fail.
    """

    def __init__(self) -> None:
        # Not torch.library.Library: it unregisters kernels at interpreter exit, while threads may still call them.
        self._libraries: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Return whether any kernel is registered."""
        return bool(self._libraries)

    def add(self, namespace: str, operator: str, kernel: Callable[..., Any]) -> None:
        """Register `kernel(keyset, *args)` for this operator, before torch's kernels."""
        if namespace not in self._libraries:
            self._libraries[namespace] = torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)
        _keep_uncompiled(kernel)
        self._libraries[namespace].impl(operator, "BackendSelect", kernel, True)

    def remove(self) -> None:
        """Unregister all kernels. Only where no other thread communicates."""
        while self._libraries:
            self._libraries.popitem()[1].reset()


def _keep_uncompiled(kernel: Callable[..., Any]) -> None:
    """Keep torch.compile from compiling a kernel, and what it calls: it would, where a compiled function communicates.

    Sizes are then symbols, and the call would have no record. Older versions of torch cannot be told.
    """
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skips = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(kernel.__code__, skips)
    except AttributeError:
        return
