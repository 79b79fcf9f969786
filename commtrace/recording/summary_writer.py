"""Summary writer: folds finished records into a summary, and writes it at intervals. Only the drain thread uses it."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from commtrace.schema import Records, State
from commtrace.settings import Settings
from commtrace.summary_format import TABLES

from .log_writer import LogWriter
from .ring import Ring
from .summary import Summary
from .summary_files import Snapshot, write_snapshot

FOLD_SECONDS: Final = 1.0
FOLD_RECORDS: Final = 8192
"""Number of records that are folded without waiting for FOLD_SECONDS."""
OPEN_STEPS: Final = 3
"""Maximum number of open steps before the newest one."""
SNAPSHOT_SECONDS: Final = 5.0
"""Maximum time between snapshots. With many calls they come sooner, before kept records are overwritten."""
WRITE_SECONDS: Final = 10.0


class SummaryWriter:
    """The summary of one process, and its files."""

    def __init__(self, settings: Settings, rank: int, ring: Ring, writer: LogWriter) -> None:
        now = time.monotonic()
        self._summary = Summary(rank, settings.summary_bytes, now)
        self._ring, self._writer = ring, writer
        self._records: list[Records] = []
        self._written = dict.fromkeys(TABLES, 0)
        self._max_unsaved, self._saved = settings.kept_records // 4, 0
        self._fold_at, self._snapshot_at, self._write_at = now, now + SNAPSHOT_SECONDS, now + WRITE_SECONDS
        self.calls = 0
        """Number of calls so far."""

    def add(self, records: Records) -> None:
        """Add records, which the ring keeps too. Their slots are freed next."""
        self._records.append(records)
        self.calls += len(records)

    def turn(self) -> None:
        """Fold records, and write a snapshot or the summary, if due."""
        now = time.monotonic()
        if now >= self._fold_at or sum(map(len, self._records)) >= FOLD_RECORDS:
            self._fold_at = now + FOLD_SECONDS
            self._fold()
            if now >= self._write_at:
                self._write_at, self._snapshot_at = now + WRITE_SECONDS, now + SNAPSHOT_SECONDS
                self._summary.flush(now)
                self._write()
            elif now >= self._snapshot_at or self._ring.kept_count - self._saved >= self._max_unsaved:
                self._snapshot_at = now + SNAPSHOT_SECONDS
                self._save()

    def finish(self) -> bool:
        """Write everything. Returns whether it is in the log."""
        self._fold()
        self._summary.finish()
        return self._write() or self._write()  # again in new files, if they were removed

    def _fold(self) -> None:
        records, self._records = self._records, []
        if records:
            self._summary.add(np.concatenate(records))
        # A step is over when the ring has no call of it and a later step has begun. A call that nothing waits for may
        # stay in the ring forever, so at most OPEN_STEPS steps stay open.
        steps = self._ring.records["step"][self._ring.records["state"] != State.FREE]
        newest = max(self._summary.last_step, int(steps.max(initial=-1)))
        self._summary.close_steps(max(newest - OPEN_STEPS, min(newest, int(steps.min(initial=newest)))))

    def _save(self) -> None:
        self._saved = self._ring.kept_count
        if self._ring.path is not None:
            rows = self._summary.rows_if_finished()
            write_snapshot(self._ring.path, Snapshot(self._ring.kept_count, self._written, rows))

    def _write(self) -> bool:
        rows = {name: b"".join(parts) for name, parts in self._summary.rows.items()}
        try:
            self._save()  # first: a kill may come while the rows are written
            if not self._writer.append_rows(rows, self._written):
                return False
        except FileNotFoundError:  # the log was removed: start again
            self._written = dict.fromkeys(TABLES, 0)
            self._summary.forget_patterns()
            return False
        self._summary.rows = {name: [] for name in TABLES}
        return True
