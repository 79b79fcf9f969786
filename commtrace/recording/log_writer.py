"""Log writer: writes one process's tables and records to the log directory, and tolerates failures of the file system.

Only the drain thread uses it: no call of the program ever waits for the file system. Errors are counted, and the first
is printed on stderr. The write is retried from time to time; the records stay in the ring until it succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from commtrace.errors import warn
from commtrace.schema import Records
from commtrace.settings import Settings
from commtrace.summary_format import TABLES

from .kept_records import write_kept
from .segment_writer import EMPTY, SegmentSeries, truncate, unlinked, write_all
from .summary_files import append_rows, table_path

RETRY_SECONDS: Final = 5.0
CHECK_SECONDS: Final = 1.0
"""Interval between checks that the files still exist. On shared storage each check is a request to a server."""

_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class LogWriter:
    """The files of one process, created by the first write."""

    def __init__(
        self, directory: Path, stem: str, settings: Settings, on_rename: Callable[[str], None] = lambda stem: None
    ) -> None:
        """Create no files yet. If their stem changes, call `on_rename` with the new one before creating them."""
        self.directory = directory
        self._stem = stem
        self._on_rename = on_rename
        self._tables_path = directory / f"{stem}.jsonl"
        self._tables_fd = -1
        self._lines_written = self._tables_size = 0
        smallest, largest = settings.segment_min_bytes, settings.segment_max_bytes
        self._series = SegmentSeries(directory, stem, smallest=smallest, largest=largest, max_bytes=settings.max_bytes)
        self._retry_at = self._check_at = 0.0
        self.lost = 0
        """Number of records in files that were removed while the log was being written."""
        self.errors = 0
        """Number of failed writes."""
        self.last_error = ""

    @property
    def removed(self) -> int:
        """Number of records in segments that were removed to keep the log below its limit."""
        return self._series.removed

    @property
    def ready(self) -> bool:
        """Whether to try a write: none has failed in the last RETRY_SECONDS."""
        return time.monotonic() >= self._retry_at

    def retry(self) -> None:
        """Check the files and write at the next call, even if a write has just failed."""
        self._retry_at = self._check_at = 0.0

    def write(self, lines: list[bytes], records: Records) -> int:
        """Write all table lines so far, and records. Never raises OSError.

        Returns:
            The number of records, from the first, that were written.
        """
        before = self._series.written
        if self.ready:
            try:
                self._make_files()
                try:
                    self._write_all(lines, records)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    self._start_over()
                    self._make_files()
                    self._write_all(lines, records[self._series.written - before :])
            except OSError as error:
                self._note(error)
        return self._series.written - before

    def append_rows(self, rows: Mapping[str, bytes], written: dict[str, int]) -> bool:
        """Append rows to the tables of a summary, and count them.

        Args:
            rows: The rows by table.
            written: Number of rows in each file. Updated if all rows are written; otherwise the next call repeats them.

        Returns:
            Whether all rows are written.

        Raises:
            FileNotFoundError: A file was removed.
        """
        if not self.ready:
            return False
        counts = {}
        try:
            for table, data in rows.items():
                if data or written[table]:  # also without new rows, to detect that the file was removed
                    path = table_path(self.directory, self._series.stem, table)
                    counts[table] = append_rows(path, TABLES[table], written[table], data)
        except OSError as error:
            self._note(error)
            if isinstance(error, FileNotFoundError):
                self._retry_at = 0.0  # retry at once, in new files
                raise
            return False
        written.update(counts)
        return True

    def dump(self, kept: Records, number: int) -> bool:
        """Write kept records to the file with this number. Returns whether they were written. Never raises OSError."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_kept(self.directory, self._series.stem, kept, number)
        except OSError as error:
            self._note(error)
            return False
        return True

    def unwritten(self, lines: list[bytes]) -> int:
        """Return how many of the table lines are not in the log."""
        return len(lines) - self._lines_written

    @property
    def tables_path(self) -> Path:
        """The file of the table lines."""
        return self._tables_path

    def finish(self, lines: list[bytes], kept: Records = EMPTY) -> None:
        """Write the last lines and the kept records, and close the files. Never raises OSError."""
        self._retry_at = 0.0
        self.write(lines, EMPTY)
        write_last = partial(write_kept, self.directory, self._series.stem, kept)
        for action in (write_last, self._series.close, self._close_tables):
            try:
                action()
            except OSError as error:
                self._note(error)

    def _write_all(self, lines: list[bytes], records: Records) -> None:
        # Lines come first, so that a record on disk never refers to a missing row.
        while self._lines_written < len(lines):
            chunk = lines[self._lines_written : self._lines_written + 1000]
            data = b"".join(chunk)
            truncate(self._tables_fd, self._tables_size)  # discard what a failed attempt may have left
            write_all(self._tables_fd, data)
            self._tables_size += len(data)
            self._lines_written += len(chunk)
        self._series.append(records)

    def _make_files(self) -> None:
        if self._tables_fd >= 0 and time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_SECONDS
            if unlinked(self._tables_fd) or self._series.vanished():
                self._start_over()
        if self._tables_fd < 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open_tables()

    def _open_tables(self) -> None:
        # The name is taken if a process with the same pid used it, in another container or before an exec.
        head, _, pid = self._stem.rpartition("-")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_EXCL
        for number in itertools.count(1):
            stem = self._stem if number == 1 else f"{head}-{number}-{pid}"
            path = self.directory / f"{stem}.jsonl"
            if path != self._tables_path:
                self._on_rename(stem)
                self._tables_path = path
            with contextlib.suppress(FileExistsError):
                self._tables_fd = os.open(path, flags, 0o666)
                self._series.stem = stem
                return

    def _start_over(self) -> None:
        # The files were removed or moved. Write what follows to new files, with complete tables.
        self.lost += self._series.forget_missing()
        if unlinked(self._tables_fd) or not self._tables_path.exists():
            self._lines_written = self._tables_size = 0
            self._close_tables()
        self._note(
            FileNotFoundError(errno.ENOENT, "the log was removed while it was being written", str(self.directory))
        )
        self._retry_at = 0.0

    def _close_tables(self) -> None:
        fd, self._tables_fd = self._tables_fd, -1
        if fd >= 0:
            os.close(fd)

    def _note(self, error: OSError) -> None:
        self.last_error = f"{error.strerror or error} ({error.filename or self.directory})"
        if self.errors == 0:
            warn(f"cannot write the log: {self.last_error}. The program goes on; writing will be retried.")
        self.errors += 1
        self._retry_at = time.monotonic() + RETRY_SECONDS
