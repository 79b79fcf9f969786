"""Segment writer: records in `.npy` files that start small, double in size, and have a bounded total size.

The open segment is called `.npy.open` and may end anywhere. Closing it writes the number of records into its header and
renames it; from then on `numpy.load` reads it. Files are written and never mapped: a failed write returns an error,
whereas a mapped page that cannot be written kills the process.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np

from commtrace.schema import RECORD, Records

HEADER_BYTES: Final = 1024
EMPTY: Final[Records] = np.zeros(0, RECORD)


def header(records: int, dtype: np.dtype[Any] = RECORD) -> bytes:
    """Return an `.npy` header (format 1.0) of fixed length for a number of records."""
    descr = np.lib.format.dtype_to_descr(dtype)
    text = str({"descr": descr, "fortran_order": False, "shape": (records,)}).ljust(HEADER_BYTES - 11) + "\n"
    return np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text.encode()


class WrittenSegment:
    """One file being written. After an OSError it holds complete records only."""

    def __init__(self, path: Path) -> None:
        """Create the file; `path` is its name once it is closed. Raises OSError."""
        self.path = path.with_name(path.name + ".open")
        self.records = 0
        self._closed_path = path
        self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(self.fd, header(0))
        except OSError:
            self._close_fd()
            self.path.unlink(missing_ok=True)
            raise

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return HEADER_BYTES + self.records * RECORD.itemsize

    def append(self, records: Records) -> None:
        """Append records. After an OSError the file ends where it ended before."""
        truncate(self.fd, self.size)  # what a failed attempt could not remove
        try:
            write_all(self.fd, records.tobytes())
        except OSError:
            with contextlib.suppress(OSError):
                truncate(self.fd, self.size)
            raise
        self.records += len(records)

    def close(self) -> None:
        """Convert the file to an ordinary `.npy` file, or remove it if it is empty."""
        if not self.records:
            self._close_fd()
            self.path.unlink(missing_ok=True)
            return
        try:
            truncate(self.fd, self.size)
            os.pwrite(self.fd, header(self.records), 0)
        finally:
            self._close_fd()
        os.rename(self.path, self._closed_path)
        self.path = self._closed_path

    def abandon(self) -> None:
        """Leave the file as it is; readers can read an open segment."""
        with contextlib.suppress(OSError):
            self._close_fd()

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)


def write_segment(path: Path, records: Records) -> None:
    """Write records as a new, closed segment. Raises OSError; an open segment may then be left."""
    segment = WrittenSegment(path)
    try:
        segment.append(np.ascontiguousarray(records, RECORD))
        segment.close()
    except OSError:
        segment.abandon()
        raise


class SegmentSeries:
    """The segments of one process: numbered, growing in size; the oldest are removed beyond `max_bytes`."""

    def __init__(self, directory: Path, stem: str, *, smallest: int, largest: int, max_bytes: int) -> None:
        self.stem = stem
        self._directory = directory
        # At most a quarter of the limit, so that removing the oldest segment leaves most records.
        self._length, self._largest = min(smallest, max_bytes // 4), min(largest, max_bytes // 4)
        self._max_bytes = max_bytes
        self._number = 0
        self._open: WrittenSegment | None = None
        self._full: deque[WrittenSegment] = deque()
        self.removed = 0
        """Number of records in segments that were removed to stay below the limit."""
        self.written = 0
        """Number of records written so far, the removed ones included."""

    def append(self, records: Records) -> None:
        """Append records. Raises OSError; `written` then includes those that are on disk."""
        while len(records):
            segment = self._segment()
            chunk = records[: max(1, (self._length - segment.size) // RECORD.itemsize)]
            segment.append(chunk)
            self.written += len(chunk)
            records = records[len(chunk) :]
            if segment.size + RECORD.itemsize > self._length:
                self.close()
                self._length = min(2 * self._length, self._largest)

    def vanished(self) -> bool:
        """Return whether the open segment was removed by another program."""
        return self._open is not None and unlinked(self._open.fd)

    def forget_missing(self) -> int:
        """Forget removed files, and begin a new segment. Returns the number of records that they had."""
        missing = [segment for segment in self._full if not os.path.exists(segment.path)]
        self._full = deque(segment for segment in self._full if segment not in missing)
        if self._open is not None:
            segment, self._open = self._open, None
            gone = unlinked(segment.fd) or not os.path.exists(segment.path)
            (missing if gone else self._full).append(segment)
            segment.abandon()
        return sum(segment.records for segment in missing)

    def close(self) -> None:
        """Close the open segment. Raises OSError; its records then stay in a file named `.npy.open`."""
        if self._open is not None:
            segment, self._open = self._open, None
            if segment.records:
                self._full.append(segment)
            segment.close()

    def _segment(self) -> WrittenSegment:
        if self._open is None:
            # The new segment counts at its full length, so that the limit holds until it is closed.
            while self._full and sum(segment.size for segment in self._full) + self._length > self._max_bytes:
                self._full[0].path.unlink(missing_ok=True)
                self.removed += self._full.popleft().records
            try:
                self._open = WrittenSegment(self._directory / f"{self.stem}.{self._number:05d}.npy")
            except FileExistsError:  # left by a failed attempt
                self._number += 1
                raise
            self._number += 1
        return self._open


def unlinked(fd: int) -> bool:
    """Return whether the file no longer has a name, or is gone from its server."""
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:
        return True


def truncate(fd: int, size: int) -> None:
    """Truncate a file to `size` bytes, where the next write starts. Raises OSError."""
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)
    os.lseek(fd, size, os.SEEK_SET)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in as many writes as it takes. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_rows(path: Path, dtype: np.dtype[Any] = RECORD, rows: int | None = None) -> Records:
    """Return the complete rows of an `.npy` file that this module wrote, at most `rows`; none if it is missing.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        data = path.read_bytes()[HEADER_BYTES:]
    except FileNotFoundError:
        return np.zeros(0, dtype)
    return np.frombuffer(data, dtype, len(data) // dtype.itemsize)[:rows]
