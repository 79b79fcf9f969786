"""Packed log: a Parquet data set with the records and tables of a log.

    logs/run1.packed/
      run=20261121-045421-3f9a1c/
        part-00000.parquet      calls of many ranks, a row each, in the order of the log: by rank
        _processes              also Parquet: the tables of each process, and where its records are in the parts
        _tables                 also Parquet: tables of a report (`stored_tables`)

The parts have the columns of the event table, those of EXTRA_COLUMNS, `host` and `clock`, which together determine the
record. Damaged and empty slots of segments are in `_processes`. Programs that read data sets ignore files that begin
with an underscore.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from commtrace.errors import LogError, MissingLibraryError, NewerLogError
from commtrace.schema import COPIED_COLUMNS, RECORD, Clock, Flag, Phase, Records, State, flags_label
from commtrace.statements import Statement, statement_fields, statement_of_fields

from .log_notes import Note, error_reason
from .process_reader import Process, rank_of_stem
from .segment_reader import BLOCK, Segment, Wanted, median_time, usable_records
from .table_reader import ProcessTables, parse_tables

PACKED_VERSION: Final = 1
PROCESSES: Final = "_processes"
FACTS: Final = b"commtrace.packed"
"""Metadata key in PROCESSES: JSON with `version`, and `folder`, `started_ns` and notes of the run in the log."""
PARTITION: Final = "run="
ROW_GROUP: Final = 1 << 17
"""Rows in a row group, which may be of several ranks."""

TEXT_FIELDS: Final = {
    **{name: [member.name.lower() for member in kind] for name, kind in (("phase", Phase), ("clock", Clock))},
    "state": [state.name.lower() for state in State],
    "flags": [flags_label(bits) for bits in range(sum(Flag) + 1)],
}
"""Record fields that are text in the parts, with the strings by number."""
RECORDED_IDS: Final[dict[str, str]] = {"kind_id": "kind", "group_id": "group", "site_id": "site"}
"""Columns with ids as the process recorded them, with their record fields."""
EXTRA_COLUMNS: Final = {"local_bytes": "local", "batch": "batch", "thread": "thread", **RECORDED_IDS}
"""Columns of the parts that are not in the event table (except `host` and `clock`), with their record fields."""
_COPIED: Final = {**COPIED_COLUMNS, **EXTRA_COLUMNS}


def import_parquet(feature: str, alternative: str = "") -> tuple[Any, Any]:
    """Import and return pyarrow and pyarrow.parquet.

    Raises:
        MissingLibraryError: pyarrow is not installed. The message names `feature` and `alternative`.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise MissingLibraryError.of_extra(feature, "pyarrow", "parquet", alternative) from None


class UnreadableFileError(LogError):
    """A file of a packed log cannot be read: its path, and the reason."""

    def __str__(self) -> str:
        path, reason = self.args
        return f"{path}: cannot be read ({reason}); pack the log again"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Any]:
    """Yield pyarrow.parquet to read a file of a packed log. Convert its errors to UnreadableFileError."""
    pyarrow, parquet = import_parquet(f"{path}: a packed log")
    try:
        yield parquet
    except (OSError, pyarrow.ArrowException) as error:
        reason = (error_reason(error) if isinstance(error, OSError) else str(error)).partition("\n")[0]
        raise UnreadableFileError(path, reason) from None


class PartFile:
    """A part of a packed log. It caches the last row group; a copy in another process opens the file again.

    Raises:
        LogError: The file cannot be read; raised on first use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[int, Records] = -1, np.zeros(0, RECORD)
        self._distinct: dict[tuple[int, str], set[Any]] = {}
        """Distinct values by row group and column."""

    def __reduce__(self) -> tuple[type[PartFile], tuple[Path]]:
        return PartFile, (self.path,)

    @cached_property
    def _file(self) -> Any:
        with reading(self.path) as parquet:
            return parquet.ParquetFile(self.path, page_checksum_verification=True)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """First row of each row group, and the number of rows."""
        metadata = self._file.metadata
        rows = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        return np.cumsum([0, *rows])

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield each row group with rows from `begin` to `end` - 1, and the range of these rows in the group."""
        first, last = np.searchsorted(self.starts, [begin, end - 1], "right") - 1
        for group in range(first, last + 1) if begin < end else ():
            low, high = self.starts[group], self.starts[group + 1]
            yield group, max(begin - low, 0), min(end, high) - low

    def may_hold(self, group: int, wanted: Wanted) -> bool:
        """Return whether a row group may have wanted rows: each column has a wanted value in some row."""
        return all(self._has(group, name, values) for name, values in wanted.items())

    def _has(self, group: int, name: str, values: Sequence[int] | Sequence[str]) -> bool:
        column = self._file.metadata.row_group(group).column(self._positions[name]).statistics
        if column is not None and column.has_min_max and not any(column.min <= v <= column.max for v in values):
            return False
        if (group, name) not in self._distinct:
            with reading(self.path):
                table = self._file.read_row_group(group, columns=[name], use_threads=False)
            self._distinct[group, name] = {*table[name].unique().to_pylist()}
        return not self._distinct[group, name].isdisjoint(values)

    @cached_property
    def _positions(self) -> dict[str, int]:
        """Indices of columns by name."""
        return {name: position for position, name in enumerate(self._file.schema_arrow.names)}

    def records(self, group: int) -> Records:
        """Return the records of a row group."""
        if self._read[0] != group:
            with reading(self.path):
                table = self._file.read_row_group(group, columns=[*_COPIED, *TEXT_FIELDS], use_threads=False)
            self._read = group, _records(table)
        return self._read[1]


def _records(table: Any) -> Records:
    records = np.empty(len(table), RECORD)
    for column, name in _COPIED.items():
        values = table[column]
        records[name] = (values.fill_null(0) if values.null_count else values).to_numpy()
    for name, texts in TEXT_FIELDS.items():
        numbers = {text: number for number, text in enumerate(texts)}
        begin = 0
        for chunk in table[name].chunks:
            known = np.array([numbers[text] for text in chunk.dictionary.to_pylist()], np.uint8)
            records[name][begin : begin + len(chunk)] = known[chunk.indices.to_numpy()]
            begin += len(chunk)
    return records


@dataclass
class PackedSegment(Segment):
    """A segment in a packed log. `path` is the part, `offset` its first row there, `count` its number of slots."""

    file: PartFile = field(default_factory=lambda: PartFile(Path()), compare=False)
    left_out: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), compare=False)
    """Positions of the slots without a row: empty and damaged ones."""
    left_out_slots: Records = field(default_factory=lambda: np.zeros(0, RECORD), compare=False)
    """Content of these slots."""
    highest_step: int = field(default=-1, compare=False)
    """The largest step of the records."""

    def blocks(
        self, size: int = BLOCK, memory: bytearray | None = None, wanted: Wanted | None = None
    ) -> Iterator[Records]:
        """Yield the records in the same blocks as the original segment. Skip row groups without wanted records.

        Raises:
            LogError: The part cannot be read.
        """
        last_step = -1
        for begin in range(0, self.count, size):
            end = min(begin + size, self.count)
            first, last = (self.offset + slot - int(np.searchsorted(self.left_out, slot)) for slot in (begin, end))
            spans = [*self.file.spans(first, last)]
            wanted_spans = [span for span in spans if not wanted or self.file.may_hold(span[0], wanted)]
            rows = sum(high - low for _, low, high in wanted_spans)
            records = np.empty(rows, RECORD) if memory is None else np.frombuffer(memory, RECORD, rows)
            filled = 0
            for group, low, high in wanted_spans:
                records[filled : filled + high - low] = self.file.records(group)[low:high]
                filled += high - low
            last_step = max(last_step, int(records["step"].max(initial=-1)))
            if len(wanted_spans) < len(spans):
                last_step = max(last_step, self.highest_step)
            yield records
        self.facts = self._damaged_slots, last_step, ""

    @property
    def facts_of_all(self) -> tuple[Any, ...]:
        """`facts` after `blocks` has read all records."""
        return self._damaged_slots, self.highest_step, ""

    @property
    def _damaged_slots(self) -> Counter[str]:
        damaged: Counter[str] = Counter()
        if len(self.left_out_slots):
            usable_records(self.left_out_slots, RECORD.names or (), damaged, self)
        return +damaged

    def usual_time(self) -> int:
        """Return a time on the process's clock near those of the first records, ns."""
        for group, low, high in self.file.spans(self.offset, self.offset + self.count - len(self.left_out)):
            return median_time(self.file.records(group)[low:high])
        return median_time(self.left_out_slots)

    def part(self, begin: int, count: int) -> Segment:
        """Return `count` slots from index `begin` on as a segment, or as many as there are."""
        count = min(count, self.count - begin)
        before, after = np.searchsorted(self.left_out, (begin, begin + count)).tolist()
        return replace(
            self,
            offset=self.offset + begin - before,
            count=count,
            left_out=self.left_out[before:after] - begin,
            left_out_slots=self.left_out_slots[before:after],
        )


class PackedRun:
    """A run of a packed log: the folder that holds PROCESSES.

    Attributes:
        path: The folder.
        name: Name of the folder that was packed.
        started_ns: Wall-clock time when the run began, in ns.

    Raises:
        LogError: PROCESSES cannot be read.
        NewerLogError: It has a newer format.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        try:
            with reading(folder / PROCESSES) as parquet:
                self._file = parquet.ParquetFile(folder / PROCESSES, page_checksum_verification=True)
            facts = json.loads(self._file.schema_arrow.metadata[FACTS])
        except (KeyError, ValueError, TypeError):
            raise LogError(f"{folder / PROCESSES}: not a file of a packed log") from None
        if facts["version"] > PACKED_VERSION:
            raise NewerLogError(
                f"{folder}: a packed log of version {facts['version']}, but this commtrace reads versions up to "
                f"{PACKED_VERSION}; upgrade commtrace"
            )
        self.name: str = facts["folder"]
        self.started_ns: int = facts["started_ns"]
        self._notes = [*_stored_notes(facts)]

    def processes(self, notes: list[Note]) -> Iterator[Process]:
        """Yield the processes. Add the notes on the log, and one for each part that is missing or cannot be read."""
        notes += self._notes
        files: dict[str, PartFile | None] = {}
        for row in self._rows():
            segments = []
            for segment in row["segments"]:
                if (name := segment["file"]) not in files:
                    files[name] = _open_part(self.path / name, notes)
                if (file := files[name]) is not None:
                    segments.append(_segment(file, segment))
            path = Path(row["path"])
            tables = ProcessTables() if row["tables"] is None else parse_tables(path, row["tables"])[0]
            yield Process(path, tables, tuple(segments))

    def _rows(self) -> Iterator[dict[str, Any]]:
        for group in range(self._file.num_row_groups):
            with reading(self.path / PROCESSES):
                rows = self._file.read_row_group(group, use_threads=False).to_pylist()
            yield from rows


def notes_to_store(notes: Iterable[Note]) -> dict[str, Any]:
    """Return the metadata on notes: `notes`, their texts, which older versions read, and `note_fields`."""
    notes = [*notes]
    return {
        "notes": [(note.kind, str(note.path), note.text, note.consequence) for note in notes],
        "note_fields": [
            (note.rank, note.subject, *map(statement_fields, (note.what, note.consequence))) for note in notes
        ],
    }


def _stored_notes(facts: Mapping[str, Any]) -> Iterator[Note]:
    for number, (kind, path, what, consequence) in enumerate(facts["notes"]):
        if "note_fields" in facts:
            rank, subject, *fields = facts["note_fields"][number]
            what, consequence = map(statement_of_fields, fields)
            yield Note(kind, Path(path), what, consequence, rank, subject)
        else:
            number_in_name = rank_of_stem(Path(path).name)
            yield Note(kind, Path(path), what, consequence, number_in_name if number_in_name >= 0 else None)


def _open_part(path: Path, notes: list[Note]) -> PartFile | None:
    file = PartFile(path)
    try:
        file.starts  # noqa: B018  reads the footer, which incomplete files lack
    except UnreadableFileError as error:
        what = Statement("cannot be read ({})", error.args[1]) if path.exists() else "missing"
        notes.append(Note("unreadable" if path.exists() else "missing", path, what, "its records are missing"))
        return None
    return file


def _segment(file: PartFile, row: Mapping[str, Any]) -> PackedSegment:
    left_out = np.frombuffer(row["left_out"], np.int64)
    slots = np.frombuffer(row["left_out_slots"], RECORD)
    return PackedSegment(
        file.path, row["row"], row["count"], file=file, left_out=left_out, left_out_slots=slots,
        highest_step=row["last_step"],
    )  # fmt: skip
