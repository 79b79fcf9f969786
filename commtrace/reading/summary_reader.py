"""Reader of summaries: cells as rows that represent several calls, and histograms of durations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from commtrace.recording.segment_writer import read_rows
from commtrace.recording.summary_files import Snapshot, table_path
from commtrace.schema import RECORD
from commtrace.summary_format import CELL_KEY, SUMS, TABLES, TO_SELF, Rows

MIXED: Final = -3
"""Value of `step` for calls of several steps that a summary counts only together."""
CALLS: Final = np.dtype([*RECORD.descr, ("calls", "<i8"), ("exact", "u1")])
"""Records that each represent `calls` calls; `exact`: each call has these sizes; otherwise they are means."""

_ROWS: Final = 1 << 17
_FIELDS: Final = [name for name in CELL_KEY.names or () if name != "bits"]


@dataclass(frozen=True)
class SummaryTables:
    """The summary of one process. `snapshot`: what a live process had not written yet."""

    folder: Path
    stem: str
    snapshot: Snapshot | None = None

    def table(self, name: str) -> Rows:
        """Return the rows of a table of `summary_format.TABLES`."""
        path, dtype = table_path(self.folder, self.stem, name), TABLES[name]
        if self.snapshot is None:
            return read_rows(path, dtype)
        # Later rows of the file repeat what is in the snapshot, or in the records that follow it.
        rows = read_rows(path, dtype, self.snapshot.written[name])
        return np.concatenate([rows, np.frombuffer(self.snapshot.rows[name], dtype)])

    @cached_property
    def summed_steps(self) -> npt.NDArray[np.int64]:
        """First and last step of each range in which calls, or their sizes, are known only as sums, shape (n, 2)."""
        steps, cells = self.table("steps"), self.table("cells")
        has_sums = np.isin(steps["pattern"], cells["pattern"][(cells["bits"] & SUMS) > 0])
        summed = steps[(steps["mixed"] == 1) & (steps["steps"] > 1) | has_sums]
        return np.stack([summed["first"], summed["last"]], axis=1).astype(np.int64)

    def calls(self, rank: int) -> Iterator[Rows]:
        """Yield the calls as rows of CALLS in blocks. The step of each row is one step, or MIXED.

        Args:
            rank: Rank of the process.
        """
        parts: list[Rows] = []
        rows = 0
        for part in self._parts(rank):
            parts.append(part)
            rows += len(part)
            if rows >= _ROWS:
                yield np.concatenate(parts)
                parts, rows = [], 0
        if parts:
            yield np.concatenate(parts)

    def _parts(self, rank: int) -> Iterator[Rows]:
        cells, steps = self.table("cells"), self.table("steps")
        cells = cells[np.argsort(cells["pattern"], kind="stable")]
        begins, ends = (np.searchsorted(cells["pattern"], steps["pattern"], side) for side in ("left", "right"))
        for row, begin, end in zip(steps.tolist(), begins.tolist(), ends.tolist(), strict=True):
            _, first, last, num_steps, mixed = row
            pattern = _as_calls(cells[begin:end], rank)
            if mixed:
                pattern["step"] = MIXED if num_steps > 1 else first
                yield pattern
                continue
            at_once = max(1, _ROWS // max(1, len(pattern)))
            for step in range(first, last + 1, at_once):
                block_steps = np.arange(step, min(step + at_once, last + 1))
                block = np.tile(pattern, len(block_steps))
                block["step"] = np.repeat(block_steps, len(pattern))
                yield block


def _as_calls(cells: Rows, rank: int) -> Rows:
    """Return cells as rows of CALLS. Sums of sizes become rows with the mean rounded up or down, so sums stay exact."""
    is_sum = (cells["bits"] & SUMS) > 0
    rows = np.zeros(len(cells), CALLS)
    for name in _FIELDS:
        rows[name] = cells[name]
    rows["calls"], rows["exact"] = cells["calls"], ~is_sum
    rows["peer"] = np.where(cells["bits"] & TO_SELF, rank, -1)
    rows["micro_batch"] = rows["tag"] = -1
    sums = rows[is_sum]
    if not len(sums):
        return rows
    payload, more_payload = np.divmod(sums["payload"], sums["calls"])
    local, more_local = np.divmod(sums["local"], sums["calls"])
    both, either = np.minimum(more_payload, more_local), np.maximum(more_payload, more_local)
    parts = [rows[~is_sum]]
    for calls, with_payload, with_local in (
        (both, True, True),
        (either - both, more_payload > more_local, more_local > more_payload),
        (sums["calls"] - either, False, False),
    ):
        part = sums.copy()
        part["calls"], part["payload"], part["local"] = calls, payload + with_payload, local + with_local
        parts.append(part[calls > 0])
    return np.concatenate(parts)
