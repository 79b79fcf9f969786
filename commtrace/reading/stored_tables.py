"""Tables that `commtrace pack` computed of a run, so that a report of the packed log does not read its records.

They are in one Parquet file beside the parts. Each row group has a row: name of the analysis, name of the table ("":
the merged table of a fold), and rows of the table in Arrow's IPC format. They count only if all that they were computed
from is the same (`source_of`). If not, or if the file is damaged, records are read as if there was no such file.
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
"""Key of the metadata of STORED: `source_of` what its tables were computed from."""
ROWS_AT_ONCE: Final = 1 << 17
"""Rows of a table that are in one row group."""
MERGED: Final = ""
"""Name of the merged table of a fold."""

_FOOTER_END: Final = 8
"""Bytes of a Parquet file after its footer: the footer's length, and a constant."""


def source_of(folder: Path, processes: Iterable[Process], code: str) -> str:
    """Return a digest of what the tables of a packed run are computed from.

    Args:
        folder: The folder of the run.
        processes: Its processes.
        code: A digest of the code that computes the tables.

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
    """Return the size and the footer of a Parquet file, which has statistics of all values, and where they are."""
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
        code: A digest of the code that computes tables.

    Raises:
        LogError: The file cannot be read, or its tables were computed from something else.
        OSError: A part cannot be read.
    """

    def __init__(self, log: Log, folder: Path, code: str) -> None:
        self._path = folder / STORED
        self._segments = [segment for process in log.processes for segment in process.segments]
        self._groups: dict[str, dict[str, list[int]]] = {}
        with reading(self._path) as parquet:
            self._file = parquet.ParquetFile(self._path, page_checksum_verification=True)
            if (self._file.schema_arrow.metadata or {}).get(SOURCE) != source_of(folder, log.processes, code).encode():
                raise LogError(f"{self._path}: of other files, or by another version of commtrace; pack the log again")
            names = self._file.read(columns=["analysis", "table"], use_threads=False).to_pylist()
        for group, row in enumerate(names):
            self._groups.setdefault(row["analysis"], {}).setdefault(row["table"], []).append(group)

    def read(self, analysis: str) -> dict[str, pd.DataFrame] | None:
        """Return the tables of an analysis by name, if there are any that can be read.

        The segments then know of their records what reading would find out.
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
    """Return the stored tables of a run; None if there are none, or, as a line on stderr says, none that count.

    `code_digest` reads all of the code: it is called only where there are stored tables.
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
    """Return a table as record batches of pyarrow; None if its columns would not come back as they are."""
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
