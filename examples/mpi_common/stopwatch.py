"""Seconds by part of the iteration."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

COMMUNICATION: Final = "communication"
"""In MPI or torch.distributed, waiting for other ranks included."""
COPY_OUT: Final = "copy to host"
COPY_BACK: Final = "copy to device"
EXCLUSIVE: Final = (COMMUNICATION, COPY_OUT, COPY_BACK)
"""Parts that never overlap; what an iteration takes beside them is computation."""


class Stopwatch:
    """Adds up wall-clock seconds by name: `with watch("communication"): ...`.

    On a GPU it waits for the device before and after, so that a part is charged with its own work only; what might
    have overlapped does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: Counter[str] = Counter()
        self._settle: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else _nothing

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Seconds within belong to `name`."""
        self._settle()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._settle()
            self.seconds[name] += time.perf_counter() - begin  # type: ignore[assignment]  # a Counter of floats


def _nothing() -> None:
    pass
