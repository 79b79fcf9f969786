"""Messages between simulated ranks, which run side by side: small values, in files.

A program never looks at most of what is communicated. What it does look at (the shape of the next activation, the
length of a pickled object, a vote) is whole numbers in small tensors. These are kept, with their sender and a key. A
rank that needs a message which its sender has not written yet waits for it. A small message without computed values is
kept as well, without data, so that no rank waits for it.

    mail/rank-00003.bin     pickled pairs (key, bytes or None), in the order in which they were sent
    mail/waits-00005        "3 1200": rank 5 waits for a message of rank 3, of which it has read 1200 bytes
    mail/skip-00005         rank 5 is to continue without that message: all ranks wait
    mail/done-00003         rank 3 has ended: it will send no more messages
    mail/calls-00003        number of calls that rank 3 has made
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

MAX_BYTES: Final = 1 << 16
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
        """Count a call, for the line of progress."""
        self._calls += 1
        if time.monotonic() > self._calls_written + _CALLS_SECONDS:
            self._calls_written = time.monotonic()
            self._write("calls", str(self._calls))

    def post(self, key: Hashable, tensor: torch.Tensor, *, computed: bool) -> None:
        """Keep a message that this rank sends, if it is small; without its data if that is not `computed`."""
        if _is_kept(tensor):
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if computed else None
            self._out.write(pickle.dumps((key, data)))

    def fetch(self, source: int, key: Hashable, into: torch.Tensor) -> bool:
        """Fill a tensor with the message that `source` sends. Waits until it has sent it, or has ended.

        Returns:
            Whether `source` sent a message with data under that key.
        """
        if source == self._rank or not _is_kept(into):
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
            done = (self._folder / f"done-{source:05d}").exists()  # before reading: it may end just after
            self._read(source)
            if key in self._received[source] or done or skip.exists():
                break
            if announced != (announced := f"{source} {self._read_bytes[source]}"):
                self._write("waits", announced)
            time.sleep(_POLL_SECONDS)
        if announced:
            waits.unlink()  # first: otherwise a rank that no longer waits would be resumed again
            skip.unlink(missing_ok=True)

    def _read(self, source: int) -> None:
        """Read what `source` has sent since it was read last."""
        file = self._folder / f"rank-{source:05d}.bin"
        if not file.exists():
            return
        # Ends at the end of the file, or at a message that is being written.
        with contextlib.suppress(EOFError, pickle.UnpicklingError), open(file, "rb") as mail:
            mail.seek(self._read_bytes[source])
            while True:
                key, data = pickle.load(mail)
                self._received[source][key] = data
                self._read_bytes[source] = mail.tell()

    def _write(self, name: str, text: str) -> None:
        """Write a small file atomically."""
        path = self._folder / f"{name}-{self._rank:05d}"
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)


def _is_kept(tensor: torch.Tensor) -> bool:
    """Return whether a program may look at the values of a message: whole numbers, or a few others."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return tensor.nbytes <= (_MAX_FLOAT_BYTES if is_float else MAX_BYTES)
