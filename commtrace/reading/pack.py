"""Writer of packed logs; `packed_log` describes and reads them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

import numpy as np
import pandas as pd

from commtrace.errors import LogError, OutputError
from commtrace.formatting import format_plural
from commtrace.output_files import atomic_directory
from commtrace.schema import EVENT_TABLE_VERSION, RECORD, Records

from .executors import DEFAULT_EXECUTOR
from .labels import ProcessIds
from .log import Log, LogDirectory, RunFolder
from .log_notes import Note, error_reason
from .packed_log import (
    EXTRA_COLUMNS,
    FACTS,
    PACKED_VERSION,
    PARTITION,
    PROCESSES,
    RECORDED_IDS,
    ROW_GROUP,
    TEXT_FIELDS,
    PackedRun,
    import_parquet,
    notes_to_store,
)
from .record_columns import RecordColumns, row_groups
from .recorded_run import EVENT_FIELDS, EventTable, RecordedRun
from .run_parts import Executor, RunPart
from .segment_reader import Segment, usable_records
from .stored_tables import SOURCE, STORED, source_digest, to_batches, to_bytes

PART_ROWS: Final = 1 << 23
"""Minimum number of slots in a part, except in the last."""

_TABLES_AT_ONCE: Final = 16 << 20
"""Bytes of tables and damaged slots that are written at once."""
_INCREASING: Final = ("seq", "step", *(f"{name}_ns" for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end")))
"""Columns that are stored as differences from row to row, which take fewer bytes."""
_FIELDS: Final = (*EVENT_FIELDS, "clock", "batch", "thread", *RECORDED_IDS)
"""Columns of `RecordColumns` that are written to the parts."""


@dataclass
class PackResult:
    """Numbers of packed runs, rows and bytes, and notes on the log."""

    runs: int = 0
    rows: int = 0
    log_bytes: int = 0
    packed_bytes: int = 0
    notes: tuple[Note, ...] = ()
    """Notes on recovered records, and on damage of the log."""


@dataclass(frozen=True)
class TablesToStore:
    """The function that computes the tables to store with a run's records, and a digest of its code."""

    tables: Callable[[RecordedRun], Iterable[tuple[str, Mapping[str, pd.DataFrame]]]]
    """Returns the names of analyses, each with its tables by name."""
    code: str
    """Digest of the code that computes them."""


def pack(
    path: Path,
    out: Path,
    *,
    force: bool = False,
    executor: Executor = DEFAULT_EXECUTOR,
    to_store: TablesToStore | None = None,
) -> PackResult:
    """Write all runs of a log as a packed log, in constant memory except for tables to store.

    Records of killed processes are recovered first; apart from that, the log does not change.

    Args:
        path: A log directory.
        out: The directory to write, which appears under its name only when it is complete.
        force: Whether to replace an existing packed log.
        executor: Reads the log and writes the parts.
        to_store: Tables to store with the records; None: none.

    Returns:
        Numbers of runs, rows and bytes, and notes on the log.

    Raises:
        LogError: There is no run, or it is packed already, a summary, or still being recorded.
        OutputError: `out` exists, cannot be written, or is in the log.
        MissingLibraryError: pyarrow is not installed.
    """
    import_parquet("commtrace pack")
    directory, out = LogDirectory(path, recover=True), Path(os.path.abspath(out.expanduser()))
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(directory.path)):
        raise OutputError(f"{out}: is in the log; give a directory outside of it")
    result = PackResult(notes=tuple(directory.recovered))
    with atomic_directory(out, force=force, marker=f"{PARTITION}*/{PROCESSES}") as part:
        for folder in directory.folders:
            if isinstance(folder, PackedRun):
                raise LogError(f"{folder.path}: is packed already; commands read it as it is")
            _pack_folder(directory, folder, part, result, executor, to_store)
    # Workers that died may have left some. A worker that only seemed dead adds none: its folder has another name now.
    for unfinished in out.glob(f"{PARTITION}*/.part-*"):
        unfinished.unlink(missing_ok=True)
    result.packed_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return result


def _pack_folder(
    directory: LogDirectory,
    folder: RunFolder,
    out: Path,
    result: PackResult,
    executor: Executor,
    to_store: TablesToStore | None,
) -> None:
    newest, processes, notes = directory.read(folder)
    for process in processes:
        if process.summary is not None:
            raise LogError(f"{process.path}: is a summary, which is small; pack only logs of COMMTRACE_MODE=events")
        if process.live_at_ns:
            raise LogError(f"{process.path}: process {process.pid} is recording; pack the log when it has ended")
    run_folder = out / _partition(newest)
    if (run_folder / PROCESSES).exists():  # a copy of the run is packed already
        run_folder = out / _partition(folder.name)
    facts = {
        "version": PACKED_VERSION, "folder": folder.name, "started_ns": folder.started_ns,
        **notes_to_store(notes),
    }  # fmt: skip
    run_folder.mkdir(exist_ok=True)
    runs: dict[str, RecordedRun] = {}

    def rows() -> Iterator[Mapping[str, Any]]:
        for run, same_run in groupby(sorted(processes, key=lambda process: process.run), lambda process: process.run):
            recorded = runs[run] = RecordedRun(Log(directory.path, run, tuple(same_run), (), ()), executor)
            part_folder = run_folder if run == newest else out / _partition(run)
            part_folder.mkdir(exist_ok=True)
            write_part = _PartWriter(recorded, run_folder, part_folder)
            segments = chain.from_iterable(executor.map("pack", write_part, recorded.parts(min_slots=PART_ROWS)))
            for process in recorded.processes:
                segment_rows = [*islice(segments, len(process.segments))]
                result.rows += sum(row["count"] - len(row["left_out"]) // 8 for row in segment_rows)
                tables = None
                with contextlib.suppress(OSError):  # there is a note already
                    tables = process.path.read_bytes()
                yield {"path": str(process.path), "tables": tables, "segments": segment_rows}
            deque(segments, maxlen=0)  # nothing is left: this only ends the executor's work

    _write_processes(run_folder / PROCESSES, facts, rows())
    if to_store:
        _store_tables(run_folder, runs[newest], to_store)
    result.runs += 1
    result.log_bytes += sum(file.stat().st_size for host in folder.hosts for file in host.iterdir() if file.is_file())
    if with_kept := sum(process.kept is not None for process in processes):
        text = f"{format_plural(with_kept, 'process', 'processes')} with last calls of steps that were not recorded"
        result.notes += (Note("process", folder.path, text, "not packed: stuck calls are found in the log"),)
    result.notes += (*notes, *(note for process in processes for note in process.record_notes()))


def _store_tables(folder: Path, run: RecordedRun, to_store: TablesToStore) -> None:
    """Write STORED: tables of the run in a folder. Leave out analyses with a table that `to_batches` rejects."""
    pyarrow, _ = import_parquet("commtrace pack")
    paths = {process.path for process in run.processes}
    processes = [process for process in PackedRun(folder).processes([]) if process.path in paths]
    columns = {"analysis": pyarrow.string(), "table": pyarrow.string(), "rows": pyarrow.binary()}
    schema = pyarrow.schema(columns, {SOURCE: source_digest(folder, processes, to_store.code)})
    with _parquet_writer(folder / STORED, schema, use_dictionary=False, write_statistics=False) as writer:
        for analysis, tables in to_store.tables(run):
            batches = {name: to_batches(table) for name, table in tables.items()}
            for name, table_batches in batches.items() if None not in batches.values() else ():
                for batch in table_batches or ():
                    row = {"analysis": analysis, "table": name, "rows": to_bytes(batch)}
                    writer.write_table(pyarrow.Table.from_pylist([row], schema))


def _partition(run: str) -> str:
    return PARTITION + quote(run, safe="")[:200]


class _PartWriter:
    """Writer of the parts of a run, small and picklable for worker processes.

    Attributes:
        folder: The folder of the parts.
    """

    def __init__(self, run: RecordedRun, run_folder: Path, folder: Path) -> None:
        """Number parts after those that are in `folder`; `run_folder` is the folder of PROCESSES."""
        self.folder, self._run_folder = folder, run_folder
        self._first = len([*folder.glob("part-*")])
        self._events = EventTable(run.labels)
        hosts = pd.Index(sorted({process.host for process in run.processes}))
        self._host_positions = hosts.get_indexer(pd.Index([process.host for process in run.processes]))
        texts = {"clock": pd.Index(TEXT_FIELDS["clock"]), "host": hosts}
        self._categories = {name: index.to_numpy(object) for name, index in (self._events.categories | texts).items()}
        self._metadata = {"commtrace.normal_form_version": str(EVENT_TABLE_VERSION), "commtrace.run": run.id}

    def __call__(self, part: RunPart) -> list[dict[str, Any]]:
        """Write a part. Return a row for each segment, for `_write_processes`."""
        if not self.folder.is_dir():
            hint = "workers and this process need the directory of --out under the same path"
            raise OutputError(f"{self.folder}: host {socket.gethostname()} has no such folder; {hint}")
        _, parquet = import_parquet("commtrace pack")
        schema = self._table(RecordColumns.of(_FIELDS, 0)).schema.with_metadata(self._metadata)
        options = {
            "use_dictionary": [name for name in schema.names if name not in _INCREASING],
            "column_encoding": dict.fromkeys(_INCREASING, "DELTA_BINARY_PACKED"),
            "sorting_columns": [parquet.SortingColumn(schema.names.index("rank"))],
        }
        path = self.folder / f"part-{self._first + part.number:05d}.parquet"
        unfinished = path.with_name(f".{path.name}.{uuid4().hex}")  # unique: a worker that seems dead may still write
        rows: list[dict[str, Any]] = []
        with _parquet_writer(unfinished, schema, **options) as writer:
            for records in row_groups(_packed_records(part, rows), _FIELDS, ROW_GROUP):
                writer.write_table(self._table(records))
        unfinished.replace(path)
        return [{**row, "file": os.path.relpath(path, self._run_folder)} for row in rows]

    def _table(self, records: RecordColumns) -> Any:
        """Return records as a pyarrow table with labels."""
        pyarrow, _ = import_parquet("commtrace pack")
        columns = self._events.columns(records)
        columns |= {name: records[name if name in RECORDED_IDS else field] for name, field in EXTRA_COLUMNS.items()}
        columns |= {"clock": records["clock"], "host": self._host_positions[records["process"]]}
        arrays = {}
        for name, column in columns.items():
            if name in self._categories:
                labels = self._categories[name]
                used = np.flatnonzero(np.bincount(column, minlength=len(labels)))
                positions = np.zeros(len(labels), np.int32)
                positions[used] = np.arange(len(used))
                texts = pyarrow.array(labels[used].tolist(), pyarrow.string())
                arrays[name] = pyarrow.DictionaryArray.from_arrays(pyarrow.array(positions[column]), texts)
            else:
                arrays[name] = pyarrow.array(column, mask=self._events.missing(name, column))
        return pyarrow.table(arrays)


def _packed_records(part: RunPart, rows: list[dict[str, Any]]) -> Iterator[tuple[Records, ProcessIds]]:
    """Yield the records of a part. Add a row for each segment: where its records are, and its other slots."""
    memory = bytearray(ROW_GROUP * RECORD.itemsize)  # new memory for each segment would cost as much as reading it
    next_row = 0
    for segment, process in zip(part.segments, part.processes, strict=True):
        first_row = next_row
        left_out, slots, count, last_step = [np.zeros(0, np.int64)], [np.zeros(0, RECORD)], 0, -1
        damaged: Counter[str] = Counter()
        for records, suspects in _slots(segment, memory):
            usable = usable_records(records, suspects, damaged, segment)
            yield records if usable.all() else records[usable], process
            next_row += int(usable.sum())
            left_out.append(np.flatnonzero(~usable) + count)
            slots.append(records[~usable])
            last_step = max(last_step, int(records["step"].max(where=usable, initial=-1)))
            count += len(records)
        segment.facts = +damaged, last_step, ""
        left_out_slots = np.concatenate(slots).tobytes()
        rows.append({
            "row": first_row, "count": count, "last_step": last_step,
            "left_out": np.concatenate(left_out).tobytes(), "left_out_slots": left_out_slots,
        })  # fmt: skip


def _slots(segment: Segment, memory: bytearray) -> Iterator[tuple[Records, set[str]]]:
    try:
        yield from segment.slots(ROW_GROUP, memory)
    except OSError as error:
        raise LogError(f"{segment.path}: cannot be read ({error_reason(error)}); the log was not packed") from error


@contextlib.contextmanager
def _parquet_writer(path: Path, schema: Any, **options: Any) -> Iterator[Any]:
    """Yield a writer of a Parquet file. An error leaves an incomplete file."""
    pyarrow, parquet = import_parquet("commtrace pack")
    with open(path, "xb") as file:
        writer = parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True, **options)
        try:
            yield writer
            writer.close()
        except BaseException:
            with contextlib.suppress(OSError, pyarrow.ArrowException):  # closing writes again, which may fail again
                writer.close()
            raise
        finally:
            writer.is_open = False  # otherwise its finalizer would close it again


def _write_processes(path: Path, facts: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write PROCESSES, with a row for each process."""
    pyarrow, _ = import_parquet("commtrace pack")
    segment = dict.fromkeys(("row", "count", "last_step"), pyarrow.int64())
    segment |= dict.fromkeys(("left_out", "left_out_slots"), pyarrow.binary())
    segment["file"] = pyarrow.string()
    segments = pyarrow.list_(pyarrow.struct(segment))
    columns = {"path": pyarrow.string(), "tables": pyarrow.binary(), "segments": segments}
    schema = pyarrow.schema(columns, {FACTS: json.dumps(facts)})
    options = {"use_dictionary": False, "write_statistics": False, "data_page_size": _TABLES_AT_ONCE}
    with _parquet_writer(path, schema, **options) as writer:
        batch, size = [], 0
        for row in rows:
            batch.append(row)
            size += len(row["tables"] or b"") + sum(len(segment["left_out_slots"]) for segment in row["segments"])
            if size >= _TABLES_AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                batch, size = [], 0
        writer.write_table(pyarrow.Table.from_pylist(batch, schema))
