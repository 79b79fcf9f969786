"""Files of a summary: tables to which rows are appended, and a shared-memory snapshot of the rows not yet in them.

The snapshot is beside the ring, and outlives a killed process. It has the rows that were not written, the number of
rows in each file at that time, and the number of records that they all represent. Recovery truncates each file to its
number of rows, and appends the rows of the snapshot. Later records that the ring has kept follow in full.
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


def table_path(directory: Path, stem: str, table: str) -> Path:
    """Return the path of a table of a process's summary."""
    return directory / f"{stem}-{table}.npy"


def append_rows(path: Path, dtype: np.dtype[Any], written: int, data: bytes) -> int:
    """Replace what follows the first `written` rows of a file, which is created if missing.

    Returns:
        The number of rows in the file.

    Raises:
        FileNotFoundError: The file has fewer rows.
        OSError: Writing failed; the first `written` rows are unchanged.
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
    """The part of a summary that was not in its files at one moment."""

    calls: int
    """Number of kept records that the files and `rows` represent."""
    written: Mapping[str, int]
    """Number of rows in each file."""
    rows: Mapping[str, bytes]
    """The rows that follow in each file."""


def write_snapshot(ring_path: Path, snapshot: Snapshot) -> None:
    """Replace the snapshot beside a ring. Raises OSError."""
    facts = {
        "calls": snapshot.calls,
        "written": snapshot.written,
        "bytes": {table: len(rows) for table, rows in snapshot.rows.items()},
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
    """Return the number of calls that rows of CELLS and STEPS represent."""
    by_pattern = np.bincount(cells["pattern"], cells["calls"], minlength=int(steps["pattern"].max(initial=0)) + 1)
    times = np.where(steps["mixed"] == 1, 1, steps["steps"].astype(np.int64))
    return int((by_pattern[steps["pattern"]] * times).sum())
