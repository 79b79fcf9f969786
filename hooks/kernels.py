"""Kernels of our own before torch's, reversibly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Library: Any = torch.library.Library  # torch does not annotate it

BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
"""The keys that a call has yet to pass behind a kernel of ours: `redispatch(keyset & BELOW, ...)`."""


class Kernels:
    """What a hook registered. The key BackendSelect comes before every device's and costs other operators nothing."""

    def __init__(self) -> None:
        self._libraries: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Something is registered."""
        return bool(self._libraries)

    def add(self, namespace: str, operator: str, kernel: Callable[..., Any]) -> None:
        """Call `kernel(keyset, *args)` first for this operator."""
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")
        self._libraries[namespace].impl(operator, kernel, "BackendSelect", with_keyset=True)

    def remove(self) -> None:
        """Take all of them out."""
        while self._libraries:
            self._libraries.popitem()[1]._destroy()
