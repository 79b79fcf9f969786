"""Messages between simulated ranks: small values in files, from a rank that ran to ranks that run later.

A program never looks at most of what is communicated. What it does look at (the shape of the next activation, the
length of a pickled object, a vote) is whole numbers in small tensors. These are kept, with their sender and a key. A
rank that needs a message which its sender has not written yet ends at once, and is run again when the sender has
written more. A small message without computed values is kept as well, without data, so that no rank waits for it.

    mail/rank-00003.bin     pickled pairs (key, bytes or None), in the order in which they were sent
    mail/wants-00005        "3": rank 5 ended because it waits for a message of rank 3
    mail/done-00003         rank 3 has ended: it will send no more messages
"""

from __future__ import annotations

import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path
from typing import Final

import torch

from commtrace.recording.session import session

MAX_BYTES: Final = 1 << 16
_MAX_FLOAT_BYTES: Final = 256

WAITING: Final = 75
"""Exit status of a rank that waits for another rank's message (EX_TEMPFAIL of <sysexits.h>)."""


class RankMessages:
    """The messages that one simulated rank sends and receives."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._received: dict[int, dict[Hashable, bytes | None]] = defaultdict(dict)
        self._read_sizes: dict[int, int] = {}  # bytes of each sender's file when it was read
        self._out = open(folder / f"rank-{rank:05d}.bin", "wb", buffering=0)

    def post(self, key: Hashable, tensor: torch.Tensor, *, computed: bool) -> None:
        """Keep a message that this rank sends, if it is small; without its data if that is not `computed`."""
        if _is_kept(tensor):
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if computed else None
            self._out.write(pickle.dumps((key, data)))

    def fetch(self, source: int, key: Hashable, into: torch.Tensor) -> bool:
        """Fill a tensor with the message that `source` sent.

        Ends this process if `source` has not sent the message yet, but may still do so.

        Returns:
            Whether `source` sent a message with data under that key.
        """
        if source == self._rank or not _is_kept(into):
            return False
        if not into.nbytes:
            return True
        while True:
            done = (self._folder / f"done-{source:05d}").exists()  # before reading: it may end just after
            if self._has_arrived(source, key) or done:
                break
            self._wait_for(source)
        data = self._received[source].get(key)
        if data is None or len(data) != into.nbytes:
            return False
        with torch.no_grad():
            into.copy_(torch.frombuffer(bytearray(data), dtype=into.dtype).view(into.shape))
        return True

    def _has_arrived(self, source: int, key: Hashable) -> bool:
        file = self._folder / f"rank-{source:05d}.bin"
        size = file.stat().st_size if file.exists() else 0
        if key not in self._received[source] and size != self._read_sizes.get(source):
            self._read_sizes[source], self._received[source] = size, _read_messages(file)
        return key in self._received[source]

    def _wait_for(self, source: int) -> None:
        (self._folder / f"wants-{self._rank:05d}").write_text(str(source))
        recorder = session.recorder
        if recorder is not None:
            recorder.ring.remove()  # else it would look like that of a killed process
        sys.stdout.flush()
        os._exit(WAITING)  # not an exception, which the program could catch


def _is_kept(tensor: torch.Tensor) -> bool:
    """Return whether a program may look at the values of a message: whole numbers, or a few others."""
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return tensor.nbytes <= (_MAX_FLOAT_BYTES if is_float else MAX_BYTES)


def _read_messages(file: Path) -> dict[Hashable, bytes | None]:
    messages: dict[Hashable, bytes | None] = {}
    try:
        with open(file, "rb") as mail:
            while True:
                key, data = pickle.load(mail)
                messages[key] = data
    except (OSError, EOFError, pickle.UnpicklingError):
        return messages  # the end of the file, or a message that is being written
