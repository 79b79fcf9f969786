"""Records on disk: `.npy` segments that start small, double, and are bounded in sum.

The open segment is called `.npy.open` and ends anywhere; closing it writes the number of records into its header and
renames it, from which moment `numpy.load` reads it. Ordinary writes only, because they return an error where a mapped
page would kill the process.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.ring import Records
from commtrace.schema import RECORD

HEADER_BYTES: Final = 1024


def header(records: int) -> bytes:
    """An `.npy` header (format 1.0) of fixed length, for that many records."""
    descr = np.lib.format.dtype_to_descr(RECORD)
    text = str({"descr": descr, "fortran_order": False, "shape": (records,)})
    return (
        np.lib.format.magic(1, 0)
        + (HEADER_BYTES - 10).to_bytes(2, "little")
        + text.ljust(HEADER_BYTES - 11).encode()
        + b"\n"
    )


class Segment:
    """One file being filled. Raises OSError where the store does, and then holds whole records only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = 0
        self._opened = path.with_name(path.name + ".open")
        self._fd = os.open(self._opened, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(self._fd, header(0))
        except OSError:
            self.abandon()
            self._opened.unlink(missing_ok=True)
            raise

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.records * RECORD.itemsize

    def append(self, records: Records) -> None:
        """Add records; after an error the file ends where it ended before."""
        try:
            write_all(self._fd, records.tobytes())
        except OSError:
            os.ftruncate(self._fd, self.size)
            os.lseek(self._fd, 0, os.SEEK_END)
            raise
        self.records += len(records)

    def vanished(self) -> bool:
        """Somebody removed the file: what is written to it is lost."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Make it an ordinary `.npy` file; an empty one is removed."""
        if self.records:
            os.pwrite(self._fd, header(self.records), 0)
            os.close(self._fd)
            os.rename(self._opened, self.path)
        else:
            self.abandon()
            self._opened.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leave the file as it is; readers know how to read an open segment."""
        os.close(self._fd)


class SegmentSeries:
    """The segments of one process: numbered, growing, the oldest removed beyond `max_bytes`."""

    def __init__(self, folder: Path, stem: str, *, smallest: int, largest: int, max_bytes: int) -> None:
        self._folder, self._stem = folder, stem
        # A fraction of the bound at most, so that removing the oldest never leaves next to nothing.
        self._length, self._largest = min(smallest, max_bytes // 4), min(largest, max_bytes // 4)
        self._max_bytes = max_bytes
        self._number = 0
        self._open: Segment | None = None
        self._closed: deque[Segment] = deque()
        self.removed = 0
        """Records in segments that were removed to stay below the bound."""
        self.written = 0
        """Records written so far, the removed ones included."""

    def append(self, records: Records) -> None:
        """Add records. Raises OSError; `written` then tells how many of them are on disk."""
        while len(records):
            segment = self._segment()
            room = max(1, (self._length - segment.size) // RECORD.itemsize)
            segment.append(records[:room])
            self.written += len(records[:room])
            records = records[room:]
            if segment.size + RECORD.itemsize > self._length:
                self._finish()

    def vanished(self) -> bool:
        """The open segment was removed under our hands."""
        return self._open is not None and self._open.vanished()

    def forget_missing(self) -> int:
        """Somebody removed files: drop them from the books, begin a new segment. Returns how many records were in them."""
        missing = [segment for segment in self._closed if not segment.path.exists()]
        self._closed = deque(segment for segment in self._closed if segment not in missing)
        if self._open is not None:
            if self._open.vanished():
                missing.append(self._open)
            self._open.abandon()
            self._open = None
        return sum(segment.records for segment in missing)

    def close(self) -> None:
        """Finish the open segment."""
        if self._open is not None:
            self._finish()

    def _segment(self) -> Segment:
        if self._open is None:
            path = self._folder / f"{self._stem}.{self._number:05d}.npy"
            self._number += 1
            self._open = Segment(path)
            self._make_room()
        return self._open

    def _finish(self) -> None:
        assert self._open is not None
        segment, self._open = self._open, None
        segment.close()
        if segment.records:
            self._closed.append(segment)
        self._length = min(2 * self._length, self._largest)

    def _make_room(self) -> None:
        # The new segment counts at its full length, so that the bound holds until it is closed.
        while self._closed and sum(segment.size for segment in self._closed) + self._length > self._max_bytes:
            oldest = self._closed.popleft()
            oldest.path.unlink(missing_ok=True)
            self.removed += oldest.records


def write_all(fd: int, data: bytes) -> None:
    """All of `data`, in as many writes as the system makes of it. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_records(path: Path) -> Records:
    """The whole records of a segment, open or closed. Raises OSError; a file that is no segment gives none."""
    data = path.read_bytes()[HEADER_BYTES:]
    return np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
