"""Tables that `commtrace pack` computed from a run, so that a report of the packed log does not read its records.

They are in one Parquet file next to the parts. Each row group has one row: the name of the analysis, the name of the
table ("": the merged table of a fold), and rows of the table in Arrow's IPC format. They are used only if everything
that they were computed from is unchanged (`source_digest`). Otherwise, or if the file is damaged, records are read as
if the file did not exist.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from commtrace.errors import LogError

from .log import Log
from .packed_log import PROCESSES, PackedSegment, import_parquet, reading
from .process_reader import Process

STORED: Final = "_tables"
SOURCE: Final = b"commtrace.source"
"""Metadata key in STORED: the `source_digest` of its tables."""
ROWS_AT_ONCE: Final = 1 << 17
"""Maximum number of a table's rows in one row group."""
MERGED: Final = ""
"""Name of the merged table of a fold."""

_FOOTER_END: Final = 8
"""Bytes of a Parquet file after its footer: the footer's length and a magic number."""


def source_digest(folder: Path, processes: Iterable[Process], code: str) -> str:
    """Return a digest of everything that the tables of a packed run are computed from.

    Args:
        folder: The folder of the run.
        processes: Its processes.
        code: Digest of the code that computes the tables.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.sha256(code.encode())
    digest.update((folder / PROCESSES).read_bytes())
    parts = set()
    for process in sorted(processes, key=lambda process: process.path):
        segments = [(segment.path.name, segment.offset, segment.count) for segment in process.segments]
        digest.update(repr((str(process.path), segments)).encode())
        parts |= {segment.path for segment in process.segments}
    for part in sorted(parts):
        digest.update(_footer(part))
    return digest.hexdigest()


def _footer(path: Path) -> bytes:
    """Return the size and footer of a Parquet file. The footer has the positions and statistics of all values."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _FOOTER_END))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - _FOOTER_END - length))
        return size.to_bytes(8, "little") + file.read(length)


class StoredTables:
    """The stored tables of a packed run.

    Args:
        log: The run.
        folder: The folder of the run.
        code: Digest of the code that computes tables.

    Raises:
        LogError: The file cannot be read, or its tables were computed from other files or by other code.
        OSError: A part cannot be read.
    """

    def __init__(self, log: Log, folder: Path, code: str) -> None:
        self._path = folder / STORED
        self._segments = [segment for process in log.processes for segment in process.segments]
        self._groups: dict[str, dict[str, list[int]]] = {}
        with reading(self._path) as parquet:
            self._file = parquet.ParquetFile(self._path, page_checksum_verification=True)
            metadata = self._file.schema_arrow.metadata or {}
            if metadata.get(SOURCE) != source_digest(folder, log.processes, code).encode():
                reason = "computed from other files, or by another version of commtrace"
                raise LogError(f"{self._path}: {reason}; pack the log again")
            names = self._file.read(columns=["analysis", "table"], use_threads=False).to_pylist()
        for group, row in enumerate(names):
            self._groups.setdefault(row["analysis"], {}).setdefault(row["table"], []).append(group)

    def read(self, analysis: str) -> dict[str, pd.DataFrame] | None:
        """Return the tables of an analysis by name; None if there are none that can be read.

        Set the `facts` of the segments, as reading their records would.
        """
        try:
            with reading(self._path):
                tables = {name: self._table(groups) for name, groups in self._groups.get(analysis, {}).items()}
        except LogError as error:
            _warn(error)
            return None
        while tables and self._segments:
            segment = self._segments.pop()
            if isinstance(segment, PackedSegment):
                segment.facts = segment.facts_of_all
        return tables or None

    def _table(self, groups: Sequence[int]) -> pd.DataFrame:
        pyarrow, _ = import_parquet("a packed log")
        parts = []
        for group in groups:
            (rows,) = self._file.read_row_group(group, columns=["rows"], use_threads=False)["rows"]
            parts.append(pyarrow.ipc.open_stream(rows.as_buffer()).read_all())
        table: pd.DataFrame = pyarrow.concat_tables(parts).to_pandas(use_threads=False)
        return table


def open_stored(log: Log, code_digest: Callable[[], str]) -> StoredTables | None:
    """Return the stored tables of a run; None if there are none. Report unusable ones on stderr.

    `code_digest` reads all of the code, so it is called only if there are stored tables.
    """
    if log.packed is None or not (log.packed / STORED).exists():
        return None
    try:
        return StoredTables(log, log.packed, code_digest())
    except (OSError, LogError) as error:
        _warn(error)
        return None


def _warn(error: Exception) -> None:
    print(f"commtrace: {error}; until then, calls are read in place of tables, which takes longer", file=sys.stderr)


def to_batches(table: pd.DataFrame) -> list[Any] | None:
    """Return a table as pyarrow record batches; None if they would not restore its columns exactly."""
    pyarrow, _ = import_parquet("commtrace pack")
    try:
        arrow = pyarrow.Table.from_pandas(table)
    except pyarrow.ArrowException:
        return None
    if not all(dtype.kind in "biuf" for dtype in table.dtypes):
        restored = arrow.to_pandas()
        if not (restored.equals(table) and restored.dtypes.equals(table.dtypes)):
            return None
    return arrow.to_batches(ROWS_AT_ONCE) or [pyarrow.RecordBatch.from_pylist([], arrow.schema)]


def to_bytes(batch: Any) -> bytes:
    """Return a record batch in Arrow's IPC format."""
    pyarrow, _ = import_parquet("commtrace pack")
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    rows: bytes = sink.getvalue().to_pybytes()
    return rows
