"""Files of a summary: tables that rows are appended to, and what is not in them yet, in shared memory.

The snapshot lies beside the ring, and outlives a killed process: the rows that it had not written, how many rows its
files had then, and how many records they all stand for. Recovery makes the files end where the snapshot begins; what
the ring keeps of later records follows in full.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from commtrace.summary_format import TABLES, Rows

from .segment_writer import HEADER_BYTES, header, truncate, write_all

SNAPSHOT_SUFFIX: Final = ".cells"


def table_path(folder: Path, stem: str, table: str) -> Path:
    """Return the file of a table of a process."""
    return folder / f"{stem}-{table}.npy"


def append_rows(path: Path, dtype: np.dtype[Any], written: int, data: bytes) -> int:
    """Write rows after the first `written` ones of a file, which is created, and forget what follows them.

    Returns:
        The number of rows in the file.

    Raises:
        FileNotFoundError: The file has fewer rows.
        OSError: Writing failed; the first `written` rows are as they were.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = HEADER_BYTES + written * dtype.itemsize
        if written and os.fstat(fd).st_size < size:
            raise FileNotFoundError(2, "rows were removed while the log was written", str(path))
        truncate(fd, size)
        write_all(fd, data)
        rows = written + len(data) // dtype.itemsize
        os.pwrite(fd, header(rows, dtype), 0)
        return rows
    finally:
        os.close(fd)


class Snapshot(NamedTuple):
    """What is not in the files of a summary, at one moment."""

    calls: int
    """Number of records, of those that the ring has kept, that files and `rows` stand for."""
    written: Mapping[str, int]
    """Number of rows in each file."""
    rows: Mapping[str, bytes]
    """Those that follow in each file."""


def write_snapshot(ring_path: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot beside a ring. Raises OSError."""
    facts = {
        "calls": snapshot.calls,
        "written": snapshot.written,
        "bytes": {t: len(r) for t, r in snapshot.rows.items()},
    }
    path = ring_path.with_suffix(SNAPSHOT_SUFFIX)
    partial = path.with_name(path.name + ".new")
    partial.write_bytes(json.dumps(facts).encode() + b"\n" + b"".join(snapshot.rows.values()))
    os.replace(partial, path)


def read_snapshot(ring_path: Path) -> Snapshot:
    """Return the snapshot beside a ring; an empty one if there is none yet."""
    written, rows = dict.fromkeys(TABLES, 0), dict.fromkeys(TABLES, b"")
    with suppress(FileNotFoundError):
        head, _, data = ring_path.with_suffix(SNAPSHOT_SUFFIX).read_bytes().partition(b"\n")
        facts = json.loads(head)
        for table in TABLES:
            rows[table], data = data[: facts["bytes"][table]], data[facts["bytes"][table] :]
        return Snapshot(facts["calls"], facts["written"], rows)
    return Snapshot(0, written, rows)


def count_calls(cells: Rows, steps: Rows) -> int:
    """Return the number of calls that rows of CELLS and STEPS stand for."""
    by_pattern = np.bincount(cells["pattern"], cells["calls"], minlength=int(steps["pattern"].max(initial=0)) + 1)
    times = np.where(steps["mixed"] == 1, 1, steps["steps"].astype(np.int64))
    return int((by_pattern[steps["pattern"]] * times).sum())
