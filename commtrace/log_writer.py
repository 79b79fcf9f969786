"""Writes one process's tables and records to the log directory, and lives through whatever the store does.

Only the drain thread comes here: no call of the program ever waits for the store. An error is counted, said once on
stderr, and tried again from time to time; the records stay in the ring until then.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

from commtrace.ring import Records
from commtrace.segments import SegmentSeries, write_all
from commtrace.settings import Settings

RETRY_SECONDS = 5.0


class LogWriter:
    """The files of one process, made when the first record comes."""

    def __init__(self, folder: Path, stem: str, settings: Settings) -> None:
        self._folder = folder
        self._tables_path = folder / f"{stem}.jsonl"
        self._tables_fd = -1
        self._lines_written = self._tables_size = 0
        self._series = SegmentSeries(
            folder,
            stem,
            smallest=settings.segment_min_bytes,
            largest=settings.segment_max_bytes,
            max_bytes=settings.max_bytes,
        )
        self._retry_at = 0.0
        self.lost = 0
        """Records in files that somebody removed while the log was written."""
        self.errors = 0
        """Times that the store refused."""
        self.last_error = ""

    @property
    def removed(self) -> int:
        """Records in segments that were removed to keep the log below its bound."""
        return self._series.removed

    def write(self, lines: list[bytes], records: Records, *, last: bool = False) -> int:
        """Bring the log up to date: all table lines so far, and these records.

        Returns how many of the records need no more care, because they are written. Never raises OSError.
        """
        before = self._series.written
        if self.ready or last:
            try:
                self._make_files()
                self._write_lines(lines)
                self._series.append(records)
            except OSError as error:
                self._note(error)
        return self._series.written - before

    @property
    def ready(self) -> bool:
        """The store did not refuse a moment ago."""
        return time.monotonic() >= self._retry_at

    def unwritten(self, lines: list[bytes]) -> int:
        """How many of these table lines the log does not have."""
        return len(lines) - self._lines_written

    def close(self) -> None:
        """Finish the open segment. Never raises OSError."""
        try:
            self._series.close()
            if self._tables_fd >= 0:
                os.close(self._tables_fd)
                self._tables_fd = -1
        except OSError as error:
            self._note(error)

    def _make_files(self) -> None:
        if self._tables_fd >= 0 and (os.fstat(self._tables_fd).st_nlink == 0 or self._series.vanished()):
            self._start_over()
        if self._tables_fd < 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_EXCL
            self._tables_fd = os.open(self._tables_path, flags, 0o666)

    def _start_over(self) -> None:
        # Somebody removed our files. What comes from here on is still worth having, with its tables whole.
        self.lost += self._series.forget_missing()
        if os.fstat(self._tables_fd).st_nlink == 0:
            os.close(self._tables_fd)
            self._tables_fd = -1
            self._lines_written = self._tables_size = 0
        self._note(FileNotFoundError(errno.ENOENT, "the log was removed while it was written", str(self._folder)))
        self._retry_at = 0.0

    def _write_lines(self, lines: list[bytes]) -> None:
        # Lines come first: a record on disk never refers to a row that is not.
        while self._lines_written < len(lines):
            chunk = lines[self._lines_written : self._lines_written + 1000]
            data = b"".join(chunk)
            try:
                write_all(self._tables_fd, data)
            except OSError:
                os.ftruncate(self._tables_fd, self._tables_size)
                raise
            self._tables_size += len(data)
            self._lines_written += len(chunk)

    def _note(self, error: OSError) -> None:
        self.last_error = f"{error.strerror} ({error.filename or self._folder})"
        if self.errors == 0:
            say(f"cannot write the log: {self.last_error}. The program goes on; writing is tried again.")
        self.errors += 1
        self._retry_at = time.monotonic() + RETRY_SECONDS


def say(message: str) -> None:
    """One line on stderr. Tracing never prints to stdout, which belongs to the program."""
    try:
        sys.stderr.write(f"commtrace: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # stderr is closed or gone; there is nobody to tell
