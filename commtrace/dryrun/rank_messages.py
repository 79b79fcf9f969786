"""Messages between simulated ranks that run side by side: small values, exchanged in files.

A program never reads most of what it communicates. What it does read (the shape of the next activation, the length of a
pickled object, a vote) is integers in small tensors. These are written to a file of the sender, each with a key. A rank
waits for a message that its sender has not written yet. A small message whose values were not computed is also written,
without data, so that no rank waits for it.

    messages/rank-00003.bin     pickled pairs (key, bytes or None), in the order in which they were sent
    messages/waits-00005        "3 1200": rank 5 waits for a message from rank 3, and has read 1200 bytes of its file
    messages/skip-00005         rank 5 is to continue without that message, because all ranks wait
    messages/done-00003         rank 3 has ended: it will send no more messages
    messages/calls-00003        number of calls that rank 3 has made
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Final

import torch

from .untouched_memory import MAX_DATA_ELEMENTS

MAX_BYTES: Final = 1 << 16
"""Size of the largest message of integers; of pickled objects, MAX_DATA_ELEMENTS."""
_MAX_FLOAT_BYTES: Final = 256
_POLL_SECONDS: Final = 0.005
_CALLS_SECONDS: Final = 2.0


class RankMessages:
    """The messages that one simulated rank sends and receives."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._received: dict[int, dict[Hashable, bytes | None]] = defaultdict(dict)
        self._read_bytes: dict[int, int] = defaultdict(int)  # of each sender's file
        self._out = open(folder / f"rank-{rank:05d}.bin", "wb", buffering=0)
        self._calls, self._calls_written = 0, time.monotonic()

    def count_call(self) -> None:
        """Count a call, for the progress output."""
        self._calls += 1
        if time.monotonic() > self._calls_written + _CALLS_SECONDS:
            self._calls_written = time.monotonic()
            self._write("calls", str(self._calls))

    def post(self, key: Hashable, tensor: torch.Tensor, *, computed: bool) -> None:
        """Write a message that this rank sends to its file, if it is small; without data unless `computed`."""
        if _may_be_read(tensor):
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if computed else None
            self._out.write(pickle.dumps((key, data)))

    def fetch(self, source: int, key: Hashable, into: torch.Tensor) -> bool:
        """Fill a tensor with a message from `source`. Waits until `source` has sent it or has ended.

        Returns:
            Whether `source` sent a message with data under that key.
        """
        if source == self._rank or not _may_be_read(into):
            return False
        if not into.nbytes:
            return True
        self._wait_for(source, key)
        data = self._received[source].pop(key, None)
        if data is None or len(data) != into.nbytes:
            return False
        with torch.no_grad():
            into.copy_(torch.frombuffer(bytearray(data), dtype=into.dtype).view(into.shape))
        return True

    def _wait_for(self, source: int, key: Hashable) -> None:
        waits, skip = (self._folder / f"{name}-{self._rank:05d}" for name in ("waits", "skip"))
        announced = ""
        while True:
            done = (self._folder / f"done-{source:05d}").exists()  # before reading: it may send and end meanwhile
            self._read(source)
            if key in self._received[source] or done or skip.exists():
                break
            if announced != (announced := f"{source} {self._read_bytes[source]}"):
                self._write("waits", announced)
            time.sleep(_POLL_SECONDS)
        if announced:
            waits.unlink()  # first: otherwise this rank, which no longer waits, could get `skip` again
            skip.unlink(missing_ok=True)

    def _read(self, source: int) -> None:
        """Read the messages that `source` has sent since the last call."""
        path = self._folder / f"rank-{source:05d}.bin"
        if not path.exists():
            return
        # Stops at the end of the file, or at a message that is being written.
        with contextlib.suppress(EOFError, pickle.UnpicklingError), open(path, "rb") as file:
            file.seek(self._read_bytes[source])
            while True:
                key, data = pickle.load(file)
                self._received[source][key] = data
                self._read_bytes[source] = file.tell()

    def _write(self, name: str, text: str) -> None:
        """Write a small file atomically."""
        path = self._folder / f"{name}-{self._rank:05d}"
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)


def _may_be_read(tensor: torch.Tensor) -> bool:
    """Return whether a program may read the values of a message: objects, small tensors of integers, a few floats."""
    if tensor.dtype is torch.uint8:
        return tensor.nbytes <= MAX_DATA_ELEMENTS
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return tensor.nbytes <= (_MAX_FLOAT_BYTES if is_float else MAX_BYTES)
