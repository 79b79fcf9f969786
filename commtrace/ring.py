"""The records of one process that are not on disk yet, in memory that outlives the process.

A ring is a file under /dev/shm, mapped into the process: writing a record is a store to memory, and when the process
is killed its ring still lies there for the next commtrace on that host (`commtrace.salvage`). Never a file on shared
storage: a page that cannot be backed kills the process with SIGBUS. Space is reserved when the ring is made, which
tmpfs honours; where there is no room, private memory serves, and only the salvage is lost.

    offset 0        identity: JSON, padded with blanks (pid, log directory, stem of the log's files ...)
    offset 8192     the last counters: JSON, padded with blanks
    offset 16384    the records, 96 bytes each; a record whose state byte is not 0 is whole and not on disk yet

Beside it, under the same name in `.jsonl`, lie the process's tables. A lock on the ring (POSIX, so neither inherited by
forked children nor tied to process numbers, which containers reuse) says that its process lives.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.schema import RECORD

IDENTITY_AT: Final = 0
COUNTERS_AT: Final = 8192
RECORDS_AT: Final = 16384
RING_FORMAT: Final = "commtrace-ring"

Records = npt.NDArray[np.void]


class Ring:
    """A fixed number of record slots; `buffer` is their memory, `records` the same as a numpy array."""

    def __init__(self, capacity: int, path: Path | None) -> None:
        self.capacity = capacity
        self.path: Path | None = path
        self.tables_path: Path | None = None if path is None else path.with_suffix(".jsonl")
        self._tables_fd = -1
        size = RECORDS_AT + capacity * RECORD.itemsize
        if path is None:
            self._fd = -1
            self.buffer = mmap.mmap(-1, size)
        else:
            self._fd, self.buffer, self._tables_fd = _create(path, size)
        self.records: Records = np.frombuffer(self.buffer, RECORD, capacity, RECORDS_AT)

    def describe(self, identity: dict[str, Any]) -> None:
        """Say whose ring this is. Raises ValueError where the description is too long for its place."""
        self._put(IDENTITY_AT, COUNTERS_AT, {"format": RING_FORMAT, "capacity": self.capacity, **identity})

    def count(self, counters: dict[str, Any]) -> None:
        """Leave the counters where a salvage finds them."""
        self._put(COUNTERS_AT, RECORDS_AT, counters)

    def _put(self, start: int, end: int, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        if len(text) > end - start:
            raise ValueError(f"a description of {len(text)} bytes does not fit into {end - start}")
        self.buffer[start:end] = text.ljust(end - start)

    def keep_table_line(self, line: bytes) -> None:
        """A copy of a table line for the salvage; the log gets it by another way."""
        if self._tables_fd >= 0:
            try:
                os.write(self._tables_fd, line)
            except OSError:
                os.close(self._tables_fd)  # no room: a salvage then finds tables as far as they go
                self._tables_fd = -1

    def remove(self) -> None:
        """The ring has served: everything in it is on disk."""
        for path in (self.path, self.tables_path):
            if path is not None:
                path.unlink(missing_ok=True)
        self.path = self.tables_path = None
        for fd in (self._fd, self._tables_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._tables_fd = -1


def make(capacity: int, folder: str, name: str) -> Ring:
    """A ring in `folder` (memory-backed), or in private memory where that has no room for it."""
    try:
        return Ring(capacity, Path(folder) / f"commtrace-{name}.ring")
    except (OSError, ValueError):
        return Ring(capacity, None)


def _create(path: Path, size: int) -> tuple[int, mmap.mmap, int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    tables_fd = -1
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, size)
        tables_fd = os.open(
            path.with_suffix(".jsonl"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        return fd, mmap.mmap(fd, size), tables_fd
    except BaseException:
        for opened in (fd, tables_fd):
            if opened >= 0:
                os.close(opened)
        path.unlink(missing_ok=True)
        path.with_suffix(".jsonl").unlink(missing_ok=True)
        raise


class LeftRing:
    """A ring found in `/dev/shm`, opened for reading; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError for a file that cannot be read or is no ring."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The lock is tried before anything is read: nobody writes any more once it is ours.
            self.owner_lives = not _lock(self._fd)
            data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
            self.identity: dict[str, Any] = json.loads(data[IDENTITY_AT:COUNTERS_AT].rstrip(b"\0 ") or b"{}")
            self.counters: dict[str, Any] = json.loads(data[COUNTERS_AT:RECORDS_AT].rstrip(b"\0 ") or b"{}")
            if self.identity.get("format") != RING_FORMAT:
                raise ValueError(f"{path}: not a ring of commtrace")
            records = np.frombuffer(data, RECORD, (len(data) - RECORDS_AT) // RECORD.itemsize, RECORDS_AT)
            self.records: Records = records[records["state"] != 0]
        except BaseException:
            os.close(self._fd)
            raise

    def tables(self) -> bytes:
        """The process's tables, as JSON lines."""
        try:
            return self.path.with_suffix(".jsonl").read_bytes()
        except OSError:
            return b""

    def remove(self) -> None:
        """Its content is safe elsewhere."""
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".jsonl").unlink(missing_ok=True)

    def __enter__(self) -> LeftRing:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
