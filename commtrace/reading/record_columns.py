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
_OF_PROCESS: Final = {"process": "number", "rank": "rank"}
"""Columns that are the same for all records of a process, by its attribute."""

_RECORDS_IN_CACHE: Final = 4096


@dataclass
class RecordColumns:
    """Room for records of several processes, as columns with the ids of the run."""

    columns: dict[str, Array]
    filled: int = 0

    @staticmethod
    def of(fields: Iterable[str], size: int) -> RecordColumns:
        """Return arrays for fields of the record, or of RECORDED_IDS, of length `size`."""
        types = {name: RECORD[RECORDED_IDS.get(name, name)] for name in fields}
        types |= dict.fromkeys((*IDS, *_OF_PROCESS), np.dtype(np.int64))
        return RecordColumns({name: np.empty(size, type_) for name, type_ in types.items()})

    def fill(self, records: Records, process: ProcessIds) -> RecordColumns:
        """Append records of a process. Returns itself."""
        rows = slice(self.filled, self.filled + len(records))
        _copy_fields(records, {name: self.columns[name][rows] for name in self.columns if name not in _OF_PROCESS})
        for name in IDS:
            self.columns[name][rows] = process.of_run(name, self.columns[name][rows])
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
    """Yield records in groups of equal length that may span processes; the last one may be shorter.

    Args:
        pieces: The records, and the process of each piece.
        fields: Fields of the record, or of RECORDED_IDS.
        size: Records of a group.
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
    # A few records at a time: a record is longer than a cache line, and a block of records is larger than a cache.
    for begin in range(0, len(records), _RECORDS_IN_CACHE):
        part = records[begin : begin + _RECORDS_IN_CACHE]
        for name, column in columns.items():
            column[begin : begin + _RECORDS_IN_CACHE] = part[RECORDED_IDS.get(name, name)]
