"""Records of several processes as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from commtrace.schema import RECORD, Records

from .labels import Array, ProcessIds
from .packed_log import RECORDED_IDS

IDS: Final = (*RECORDED_IDS.values(),)
_PROCESS_COLUMNS: Final = {"process": "number", "rank": "rank"}
"""Columns that are equal in all records of a process, with the attributes of `ProcessIds`."""

_RECORDS_IN_CACHE: Final = 4096


@dataclass
class RecordColumns:
    """Preallocated columns for records of several processes, with the ids of the run."""

    columns: dict[str, Array]
    filled: int = 0

    @staticmethod
    def of(fields: Iterable[str], size: int) -> RecordColumns:
        """Allocate columns of length `size` for fields of the record or of RECORDED_IDS."""
        types = {name: RECORD[RECORDED_IDS.get(name, name)] for name in fields}
        types |= dict.fromkeys((*IDS, *_PROCESS_COLUMNS), np.dtype(np.int64))
        return RecordColumns({name: np.empty(size, type_) for name, type_ in types.items()})

    def fill(self, records: Records, process: ProcessIds) -> RecordColumns:
        """Append records of a process. Return self."""
        rows = slice(self.filled, self.filled + len(records))
        _copy_fields(records, {name: self.columns[name][rows] for name in self.columns if name not in _PROCESS_COLUMNS})
        for name in IDS:
            self.columns[name][rows] = process.run_ids(name, self.columns[name][rows])
        self.columns["process"][rows], self.columns["rank"][rows] = process.number, process.rank
        self.filled += len(records)
        return self

    def __len__(self) -> int:
        return self.filled

    def __getitem__(self, name: str) -> Array:
        return self.columns[name][: self.filled]


def row_groups(
    pieces: Iterable[tuple[Records, ProcessIds]], fields: Iterable[str], size: int
) -> Iterator[RecordColumns]:
    """Yield records in groups of equal length, which may span processes; the last may be shorter.

    Args:
        pieces: The records in pieces, each with the ids of its process.
        fields: Fields of the record or of RECORDED_IDS.
        size: Number of records in a group.
    """
    fields = [*fields]
    columns = RecordColumns.of(fields, size)
    for records, process in pieces:
        while len(records):
            rows, records = np.split(records, [size - len(columns)])
            columns.fill(rows, process)
            if len(columns) == size:
                yield columns
                columns = RecordColumns.of(fields, size)
    if len(columns):
        yield columns


def _copy_fields(records: Records, columns: Mapping[str, Array]) -> None:
    """Copy fields of records into columns of the same length."""
    # A few records at a time, which stay in the cache while one field after the other is copied.
    for begin in range(0, len(records), _RECORDS_IN_CACHE):
        part = records[begin : begin + _RECORDS_IN_CACHE]
        for name, column in columns.items():
            column[begin : begin + _RECORDS_IN_CACHE] = part[RECORDED_IDS.get(name, name)]
