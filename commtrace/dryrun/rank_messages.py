"""What simulated ranks tell each other: small messages, in files, from a rank that ran to one that runs later.

Most of what is communicated is never looked at. What a program does look at (the shape of the next activation, the
length of a pickled object, a vote) is whole numbers in small tensors, and these are kept, by sender and by where they
belong. A rank that asks for one which its sender has not written yet ends at once, and is run again when the sender has
come further. That a small message was sent whose numbers nobody knows is kept as well, so that nobody waits for them.

    mail/rank-00003.bin     pickled pairs (where it belongs, bytes or None), in the order in which they were sent
    mail/wants-00005        "3": rank 5 ended because it waits for something of rank 3
    mail/done-00003         rank 3 ran to its end: it will send nothing more
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
_MOST_BYTES_OF_FLOATS: Final = 256

WAITING: Final = 75
"""Status of a rank that ended to wait for another one's mail (EX_TEMPFAIL of <sysexits.h>)."""


class RankMessages:
    """Of one simulated rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._received: dict[int, dict[Hashable, bytes | None]] = defaultdict(dict)
        self._sizes: dict[int, int] = {}  # of what was sent, when it was read
        self._out = open(folder / f"rank-{rank:05d}.bin", "wb", buffering=0)

    def post(self, where: Hashable, tensor: torch.Tensor, *, known: bool) -> None:
        """Keep what this rank sends, where it is worth it; of what is not known, that it was sent."""
        if tensor.nbytes <= MAX_BYTES and is_kept(tensor):
            data = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if known else None
            self._out.write(pickle.dumps((where, data)))

    def fetch(self, source: int, where: Hashable, into: torch.Tensor) -> bool:
        """Fill a tensor with what `source` sent there. False where it sent nothing that was worth keeping.

        Where it may still, this process ends.
        """
        if source == self._rank or into.nbytes > MAX_BYTES or not is_kept(into):
            return False
        if not into.nbytes:
            return True
        while True:
            done = self._is_done(source)  # before a look at what it sent: it may be done just after
            if self._has_come(source, where) or done:
                break
            self._wait_for(source)
        data = self._received[source].get(where)
        if data is None or len(data) != into.nbytes:
            return False
        with torch.no_grad():
            into.copy_(torch.frombuffer(bytearray(data), dtype=into.dtype).view(into.shape))
        return True

    def _has_come(self, source: int, where: Hashable) -> bool:
        file = self._folder / f"rank-{source:05d}.bin"
        size = file.stat().st_size if file.exists() else 0
        if where not in self._received[source] and size != self._sizes.get(source):
            self._sizes[source], self._received[source] = size, read_messages(file)
        return where in self._received[source]

    def _is_done(self, source: int) -> bool:
        return (self._folder / f"done-{source:05d}").exists()

    def _wait_for(self, source: int) -> None:
        (self._folder / f"wants-{self._rank:05d}").write_text(str(source))
        recorder = session.recorder
        if recorder is not None:
            recorder.ring.remove()  # or somebody would take it for that of a process that was killed
        sys.stdout.flush()
        os._exit(WAITING)  # not an exception: nobody may catch it


def is_kept(tensor: torch.Tensor) -> bool:
    """Numbers that a program may look at."""
    return tensor.nbytes <= _MOST_BYTES_OF_FLOATS or not (tensor.is_floating_point() or tensor.is_complex())


def read_messages(file: Path) -> dict[Hashable, bytes | None]:
    """All that a rank has sent so far."""
    found: dict[Hashable, bytes | None] = {}
    try:
        with open(file, "rb") as mail:
            while True:
                where, data = pickle.load(mail)
                found[where] = data
    except (OSError, EOFError, pickle.UnpicklingError):
        return found  # its end, or a message that was being written
