"""Writer of packed logs; `packed_log` describes and reads them."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import pandas as pd

from commtrace.errors import LogError, OutputError
from commtrace.output_files import atomic_directory
from commtrace.schema import EVENT_TABLE_VERSION, RECORD, Records

from .labels import Array, RecordLabels
from .log import Log, LogDirectory, Process, RunFolder
from .log_notes import Note, error_reason
from .packed_log import EXTRA_COLUMNS, FACTS, PACKED_VERSION, PARTITION, PROCESSES, TEXT_FIELDS, import_parquet
from .recorded_run import EventTable, RecordedRun
from .segment_reader import Segment, usable_records

ROW_GROUP: Final = 1 << 17
"""Rows of a row group: of one rank or of many."""
PART_ROWS: Final = 1 << 23
"""Rows from which a part is ended with the segment."""

_TABLES_AT_ONCE: Final = 16 << 20
"""Bytes of tables and damaged slots that are written at once."""
_INCREASING: Final = ("seq", "step", *(f"{name}_ns" for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end")))
"""Columns whose differences from row to row take fewer bytes than their values."""


@dataclass
class Packed:
    """What was packed."""

    runs: int = 0
    rows: int = 0
    log_bytes: int = 0
    packed_bytes: int = 0
    notes: tuple[Note, ...] = ()
    """What was recovered, and damage of the log."""


def pack(path: Path, out: Path, *, force: bool = False) -> Packed:
    """Write all runs of a log as a packed log, in constant memory. The log does not change.

    Args:
        path: A log directory.
        out: The directory to write, which appears under its name only when it is complete.
        force: Whether to replace an existing packed log.

    Returns:
        Numbers of runs, rows and bytes, and notes on the log.

    Raises:
        LogError: There is no run, it is packed already, or a process is still recording it.
        OutputError: `out` exists, cannot be written, or is in the log.
        MissingLibraryError: pyarrow is not installed.
    """
    import_parquet("commtrace pack")
    directory, out = LogDirectory(path, recover=True), Path(os.path.abspath(out.expanduser()))
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(directory.path)):
        raise OutputError(f"{out}: is in the log; give a directory outside of it")
    packed = Packed(notes=tuple(directory.recovered))
    with atomic_directory(out, force=force, marker=f"{PARTITION}*/{PROCESSES}") as part:
        for folder in directory.folders:
            if folder.is_packed:
                raise LogError(f"{folder.path}: is packed already; commands read it as it is")
            _pack_folder(directory, folder, part, packed)
        packed.packed_bytes = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
    return packed


def _pack_folder(directory: LogDirectory, folder: RunFolder, out: Path, packed: Packed) -> None:
    newest, processes, notes = directory.read(folder)
    for process in processes:
        if process.seen_alive_ns:
            raise LogError(f"{process.path}: process {process.pid} is recording; pack the log when it has ended")
    home = out / _partition(newest)
    if (home / PROCESSES).exists():  # copies of a run
        home = out / _partition(folder.name)
    facts = {
        "version": PACKED_VERSION, "folder": folder.name, "started_ns": folder.started_ns,
        "notes": [(note.kind, str(note.path), note.what, note.consequence) for note in notes],
    }  # fmt: skip
    home.mkdir(exist_ok=True)
    with _ProcessWriter(home / PROCESSES, facts) as process_writer:
        for run, of_run in groupby(sorted(processes, key=lambda process: process.run), lambda process: process.run):
            recorded = RecordedRun(Log(directory.path, run, tuple(of_run), (), ()))
            with _PartWriter(home if run == newest else out / _partition(run), recorded) as parts:
                for process, labels in zip(recorded.processes, recorded.labels, strict=True):
                    process_writer.add(process, [_pack_segment(part, labels, parts, home) for part in process.segments])
                parts.flush()
            packed.rows += parts.rows
        process_writer.flush()
    packed.runs += 1
    packed.log_bytes += sum(file.stat().st_size for host in folder.hosts for file in host.iterdir() if file.is_file())
    for process in processes:
        if process.kept is not None:
            text = "the last calls of steps that were not recorded"
            packed.notes += (Note("process", process.kept.path, text, "not packed: stuck calls are found in the log"),)
    packed.notes += (*notes, *(note for process in processes for note in process.record_notes()))


def _partition(run: str) -> str:
    return PARTITION + quote(run, safe="")[:200]


def _pack_segment(segment: Segment, labels: RecordLabels, parts: _PartWriter, home: Path) -> dict[str, Any]:
    """Write the records of a segment to the parts. Return where they are, and the slots that have no record."""
    file, row = parts.place()
    left_out, slots, count, last_step = [np.zeros(0, np.int64)], [np.zeros(0, RECORD)], 0, -1
    damaged: Counter[str] = Counter()
    for records, suspects in _slots(segment):
        usable = usable_records(records, suspects, damaged)
        parts.add(records[usable], labels)
        left_out.append(np.flatnonzero(~usable) + count)
        slots.append(records[~usable])
        last_step = max(last_step, int(records["step"].max(where=usable, initial=-1)))
        count += len(records)
    segment.damaged, segment.last_step = +damaged, last_step
    return {
        "file": os.path.relpath(file, home), "row": row, "count": count, "last_step": last_step,
        "left_out": np.concatenate(left_out).tobytes(), "left_out_slots": np.concatenate(slots).tobytes(),
    }  # fmt: skip


def _slots(segment: Segment) -> Iterator[tuple[Records, set[str]]]:
    try:
        yield from segment.slots(ROW_GROUP)
    except OSError as error:
        raise LogError(f"{segment.path}: cannot be read ({error_reason(error)}); the log was not packed") from error


@contextlib.contextmanager
def _parquet_writer(path: Path, schema: Any, **options: Any) -> Iterator[Any]:
    """Yield a writer of a file. An error leaves half a file."""
    pyarrow, parquet = import_parquet("commtrace pack")
    with open(path, "xb") as file:
        writer = parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True, **options)
        try:
            yield writer
            writer.close()
        except BaseException:
            with contextlib.suppress(OSError, pyarrow.ArrowException):  # what it cannot write any more
                writer.close()
            raise
        finally:
            writer.is_open = False  # or its finalizer would try again


class _PartWriter:
    """Writer of the parts of one run, in row groups of equal length that may span processes.

    Attributes:
        rows: Number of rows so far.
    """

    def __init__(self, folder: Path, run: RecordedRun) -> None:
        self.rows = 0
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._pyarrow, self._parquet = import_parquet("commtrace pack")
        self._part = contextlib.ExitStack()
        self._events = EventTable(run.labels)
        hosts = pd.Index(sorted({process.host for process in run.processes}))
        self._host_of = hosts.get_indexer(pd.Index([process.host for process in run.processes]))
        texts = {"clock": pd.Index(TEXT_FIELDS["clock"]), "host": hosts}
        self._categories = {name: index.to_numpy(object) for name, index in (self._events.categories | texts).items()}
        schema = self._table(self._columns(np.zeros(0, RECORD), run.labels[0])).schema
        metadata = {"commtrace.normal_form_version": str(EVENT_TABLE_VERSION), "commtrace.run": run.id}
        self._schema = schema.with_metadata(metadata)

    def __enter__(self) -> _PartWriter:
        self._open()
        return self

    def __exit__(self, *error: Any) -> None:
        self._part.__exit__(*error)

    def place(self) -> tuple[Path, int]:
        """Return the part of the next record, and its row there. Begins another part if that is due."""
        if self._part_rows >= PART_ROWS:
            self.flush()
            self._part.close()
            self._open()
        return self._path, self._part_rows

    def add(self, records: Records, labels: RecordLabels) -> None:
        """Append records of a process."""
        self._pending.append(self._columns(records, labels))
        self._part_rows += len(records)
        self.rows += len(records)
        while sum(len(columns["rank"]) for columns in self._pending) >= ROW_GROUP:
            self._write_row_group()

    def _open(self) -> None:
        self._path = self._folder / f"part-{len([*self._folder.glob('part-*')]):05d}.parquet"
        writer = _parquet_writer(
            self._path,
            self._schema,
            use_dictionary=[name for name in self._schema.names if name not in _INCREASING],
            column_encoding=dict.fromkeys(_INCREASING, "DELTA_BINARY_PACKED"),
            sorting_columns=[self._parquet.SortingColumn(self._schema.names.index("rank"))],
        )
        self._writer = self._part.enter_context(writer)
        self._pending: list[dict[str, Array]] = []
        self._part_rows = 0

    def flush(self) -> None:
        """Write the records that are no row group yet."""
        if self._pending:
            self._write_row_group()

    def _write_row_group(self) -> None:
        joined = {name: np.concatenate([columns[name] for columns in self._pending]) for name in self._pending[0]}
        self._writer.write_table(self._table({name: column[:ROW_GROUP] for name, column in joined.items()}))
        self._pending = [{name: column[ROW_GROUP:] for name, column in joined.items()}]

    def _columns(self, records: Records, labels: RecordLabels) -> dict[str, Array]:
        columns = self._events.columns(records, labels)
        columns |= {name: records[field] for name, field in (EXTRA_COLUMNS | {"clock": "clock"}).items()}
        columns["host"] = np.full(len(records), self._host_of[labels.number])
        return {name: np.ascontiguousarray(column) for name, column in columns.items()}

    def _table(self, columns: Mapping[str, Array]) -> Any:
        arrays = {}
        for name, column in columns.items():
            if name in self._categories:
                used = np.flatnonzero(np.bincount(column))
                positions = self._pyarrow.array(np.searchsorted(used, column).astype(np.int32))
                texts = self._pyarrow.array(self._categories[name][used].tolist(), self._pyarrow.string())
                arrays[name] = self._pyarrow.DictionaryArray.from_arrays(positions, texts)
            elif name == "group_size":
                arrays[name] = self._pyarrow.array(column.astype(np.int32), mask=column == 0)
            else:
                arrays[name] = self._pyarrow.array(column, mask=np.isnan(column) if name == "wire_bytes" else None)
        return self._pyarrow.table(arrays)


class _ProcessWriter:
    """Writer of PROCESSES: a row per process."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        pyarrow, _ = import_parquet("commtrace pack")
        segment = dict.fromkeys(("row", "count", "last_step"), pyarrow.int64())
        segment |= dict.fromkeys(("left_out", "left_out_slots"), pyarrow.binary())
        segment["file"] = pyarrow.string()
        columns = {
            "path": pyarrow.string(),
            "tables": pyarrow.binary(),
            "segments": pyarrow.list_(pyarrow.struct(segment)),
        }
        self._schema = pyarrow.schema(columns, {FACTS: json.dumps(facts)})
        self._table = pyarrow.Table.from_pylist
        self._file = _parquet_writer(
            path, self._schema, use_dictionary=False, write_statistics=False, data_page_size=_TABLES_AT_ONCE
        )
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def __enter__(self) -> _ProcessWriter:
        self._writer = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def add(self, process: Process, segments: Sequence[Mapping[str, Any]]) -> None:
        """Append a process."""
        try:
            tables = process.path.read_bytes()
        except OSError:  # a note says so
            tables = None
        self._rows.append({"path": str(process.path), "tables": tables, "segments": segments})
        self._bytes += len(tables or b"") + sum(len(segment["left_out_slots"]) for segment in segments)
        if self._bytes >= _TABLES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the processes that are not written yet."""
        self._writer.write_table(self._table(self._rows, self._schema))
        self._rows, self._bytes = [], 0
