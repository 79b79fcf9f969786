"""Kernels of our own before torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
"""The keys that a call has yet to pass behind a kernel of ours: `redispatch(keyset & BELOW, ...)`."""


class Kernels:
    """What a hook registered. The key BackendSelect comes before every device's and costs other operators nothing.

    Kernels stay where they are when recording ends, and only hand on: torch frees a kernel that is taken out at once,
    though another thread may be on its way into it (it waits for the GIL there), and that thread's call then fails.
    """

    def __init__(self) -> None:
        # Not torch.library.Library, which takes its kernels out when the interpreter ends, under the threads' hands.
        self._libraries: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Something is registered."""
        return bool(self._libraries)

    def add(self, namespace: str, operator: str, kernel: Callable[..., Any]) -> None:
        """Call `kernel(keyset, *args)` first for this operator, from now on."""
        if namespace not in self._libraries:
            self._libraries[namespace] = torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)
        self._libraries[namespace].impl(operator, "BackendSelect", kernel, True)

    def take_out(self) -> None:
        """Take all of them out. Only where no other thread communicates."""
        while self._libraries:
            self._libraries.popitem()[1].reset()
