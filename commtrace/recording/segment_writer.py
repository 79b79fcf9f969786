"""Records on disk: `.npy` segments that start small, double, and are bounded in sum.

The open segment is called `.npy.open` and ends anywhere; closing it writes the number of records into its header and
renames it, from which moment `numpy.load` reads it. Ordinary writes only, because they return an error where a mapped
page would kill the process.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.schema import RECORD, Records

HEADER_BYTES: Final = 1024
EMPTY: Final[Records] = np.zeros(0, RECORD)


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


class WrittenSegment:
    """One file being filled. Raises OSError where the store does, and then holds whole records only."""

    def __init__(self, path: Path) -> None:
        """`path` is what the file is called once it is closed."""
        self.path = path.with_name(path.name + ".open")
        self.records = 0
        self._closed_path = path
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(self._fd, header(0))
        except OSError:
            self._close_fd()
            self.path.unlink(missing_ok=True)
            raise

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return HEADER_BYTES + self.records * RECORD.itemsize

    def append(self, records: Records) -> None:
        """Add records; after an error the file ends where it ended before."""
        truncate(self._fd, self.size)  # what an earlier attempt could not take back
        try:
            write_all(self._fd, records.tobytes())
        except OSError:
            with contextlib.suppress(OSError):
                truncate(self._fd, self.size)
            raise
        self.records += len(records)

    def vanished(self) -> bool:
        """Somebody removed the file: what is written to it is lost."""
        return unlinked(self._fd)

    def close(self) -> None:
        """Make it an ordinary `.npy` file; an empty one is removed."""
        if not self.records:
            self._close_fd()
            self.path.unlink(missing_ok=True)
            return
        try:
            truncate(self._fd, self.size)
            os.pwrite(self._fd, header(self.records), 0)
        finally:
            self._close_fd()
        os.rename(self.path, self._closed_path)
        self.path = self._closed_path

    def abandon(self) -> None:
        """Leave the file as it is; readers know how to read an open segment."""
        with contextlib.suppress(OSError):
            self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)


class SegmentSeries:
    """The segments of one process: numbered, growing, the oldest removed beyond `max_bytes`."""

    def __init__(self, folder: Path, stem: str, *, smallest: int, largest: int, max_bytes: int) -> None:
        self.stem = stem
        self._folder = folder
        # A fraction of the bound at most, so that removing the oldest never leaves next to nothing.
        self._length, self._largest = min(smallest, max_bytes // 4), min(largest, max_bytes // 4)
        self._max_bytes = max_bytes
        self._number = 0
        self._open: WrittenSegment | None = None
        self._full: deque[WrittenSegment] = deque()
        self.removed = 0
        """Records in segments that were removed to stay below the bound."""
        self.written = 0
        """Records written so far, the removed ones included."""

    def append(self, records: Records) -> None:
        """Add records. Raises OSError; `written` then tells how many of them are on disk."""
        while len(records):
            segment = self._segment()
            part = records[: max(1, (self._length - segment.size) // RECORD.itemsize)]
            segment.append(part)
            self.written += len(part)
            records = records[len(part) :]
            if segment.size + RECORD.itemsize > self._length:
                self.close()
                self._length = min(2 * self._length, self._largest)

    def vanished(self) -> bool:
        """The open segment was removed under our hands."""
        return self._open is not None and self._open.vanished()

    def forget_missing(self) -> int:
        """Somebody removed files: drop them from the books, begin a new segment. Returns how many records they had."""
        missing = [segment for segment in self._full if not os.path.exists(segment.path)]
        self._full = deque(segment for segment in self._full if segment not in missing)
        if self._open is not None:
            segment, self._open = self._open, None
            gone = segment.vanished() or not os.path.exists(segment.path)
            (missing if gone else self._full).append(segment)
            segment.abandon()
        return sum(segment.records for segment in missing)

    def close(self) -> None:
        """Finish the open segment. Raises OSError; its records then stay in a file that is called open."""
        if self._open is not None:
            segment, self._open = self._open, None
            if segment.records:
                self._full.append(segment)
            segment.close()

    def _segment(self) -> WrittenSegment:
        if self._open is None:
            self._make_room()
            try:
                self._open = WrittenSegment(self._folder / f"{self.stem}.{self._number:05d}.npy")
            except FileExistsError:  # left from an attempt that failed
                self._number += 1
                raise
            self._number += 1
        return self._open

    def _make_room(self) -> None:
        # The new segment counts at its full length, so that the bound holds until it is closed.
        while self._full and sum(segment.size for segment in self._full) + self._length > self._max_bytes:
            oldest = self._full[0]
            oldest.path.unlink(missing_ok=True)
            self._full.popleft()
            self.removed += oldest.records


def unlinked(fd: int) -> bool:
    """The file has no name any more, or is no file any more on its server."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return True


def truncate(fd: int, size: int) -> None:
    """What lies beyond `size` is not wanted; the next write goes there. Raises OSError."""
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
    os.lseek(fd, size, os.SEEK_SET)


def write_all(fd: int, data: bytes) -> None:
    """All of `data`, in as many writes as the system makes of it. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_records(path: Path) -> Records:
    """The whole records of a segment, open or closed. Raises OSError; a file that is no segment gives none."""
    data = path.read_bytes()[HEADER_BYTES:]
    return np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
