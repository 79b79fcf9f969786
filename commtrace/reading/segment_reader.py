"""Segment reader: reads files of records that are closed, open or cut. Any other file results in a note."""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.schema import RECORD, Clock, Flag, Phase, Records, State
from commtrace.statements import Quantity, Statement

from .log_notes import Note, error_reason

BLOCK: Final = 1 << 18
"""Number of records read at once, 24 MiB."""

Wanted: TypeAlias = Mapping[str, Sequence[int] | Sequence[str]]
"""Wanted values by column of the event table."""

_TIMES: Final = ("t_begin", "t_return", "t_wait", "t_start", "t_end")
_FAR: Final = 1 << 58
"""A time may differ by at most this from the process's others, ns: nine years."""
_MAX_TIME: Final = 1 << 62
"""Largest time on any clock: differences of two fit in 64 bits."""
_MAX_BYTES: Final = 1 << 50
_HIGHEST: Final = {
    **dict.fromkeys(_TIMES, _FAR),
    **dict.fromkeys(("payload", "local"), _MAX_BYTES),
    "phase": max(Phase),
    "clock": max(Clock),
    "flags": sum(Flag),
    "state": max(State),
}
_LOWEST: Final = dict.fromkeys(("step", "micro_batch", "peer", "tag"), -1)
_UNSIGNED: Final = np.dtype([(name, RECORD[name].str.replace("i8", "u8")) for name in RECORD.names or ()])
"""Record type with unsigned times and bytes: a negative value exceeds every limit, so one comparison is enough."""
_READ_AT_ONCE: Final = 4096 * RECORD.itemsize
"""Bytes read at once, which stay in the cache until they are checked."""


@dataclass
class Segment:
    """One file of records as it was when the log was opened; what a live process appends later is not read."""

    path: Path
    offset: int
    """Position of the first record in bytes."""
    count: int
    """Number of complete slots from there, including empty ones."""
    damaged: dict[str, int] = field(default_factory=dict, compare=False)
    """Number of records left out because a field has an impossible value, by field; set when `blocks` has read all."""
    last_step: int = field(default=-1, compare=False)
    """The largest step of its records; set like `damaged`."""
    read_error: str = field(default="", compare=False)
    """Why records could not be read; set like `damaged`."""

    @property
    def facts(self) -> tuple[Any, ...]:
        """`damaged`, `last_step` and `read_error`; set them to take over those of a copy in another process."""
        return self.damaged, self.last_step, self.read_error

    @facts.setter
    def facts(self, facts: tuple[Any, ...]) -> None:
        self.damaged, self.last_step, self.read_error = facts

    def blocks(
        self, size: int = BLOCK, memory: bytearray | None = None, wanted: Wanted | None = None
    ) -> Iterator[Records]:
        """Yield the records, shape (n,) with n <= size, without empty slots and damaged records.

        Files are read, not mapped: access to a mapped page of a removed file would kill this process. Records that can
        no longer be read (a live process removes its oldest segment) are left out, with a note.

        Args:
            size: Maximum number of records in a block.
            memory: Buffer for `size` records, which each block overwrites: new memory for each block would cost as
                much as reading it. None: every block has its own memory.
            wanted: Wanted values by column of the event table. Records without them may be left out.
        """
        damaged: Counter[str] = Counter()
        last_step, read_error = -1, ""
        try:
            for records, suspects in self.slots(size, memory):
                usable = usable_records(records, suspects, damaged, self)
                last_step = max(last_step, int(records["step"].max(where=usable, initial=-1)))
                yield records if usable.all() else records[usable]
        except OSError as error:
            read_error = error_reason(error)
        self.facts = +damaged, last_step, read_error

    def slots(self, size: int = BLOCK, memory: bytearray | None = None) -> Iterator[tuple[Records, set[str]]]:
        """Yield all slots, in the same blocks as `blocks`, with the fields that may have impossible values.

        Raises:
            OSError: The file cannot be read.
        """
        with self._open() as file:
            file.seek(self.offset)
            for begin in range(0, self.count, size):
                length = min(size, self.count - begin) * RECORD.itemsize
                yield _read(file, memoryview(bytearray(length) if memory is None else memory)[:length])

    def usual_time(self) -> int:
        """Return a time on the process's clock near those of the first records, ns.

        Raises:
            OSError: The file cannot be read.
        """
        with self._open() as file:
            file.seek(self.offset)
            records = np.frombuffer(file.read(min(self.count * RECORD.itemsize, _READ_AT_ONCE)), RECORD)
            return median_time(records)

    def last(self, count: int) -> Segment:
        """Return the last `count` records as a segment, or all if there are fewer."""
        return self.part(max(0, self.count - count), count)

    def part(self, begin: int, count: int) -> Segment:
        """Return `count` records from index `begin` on as a segment, or as many as there are."""
        return replace(self, offset=self.offset + begin * RECORD.itemsize, count=min(count, self.count - begin))

    def _open(self) -> BufferedReader:
        try:
            return open(self.path, "rb")
        except FileNotFoundError:  # closed, and so renamed, since the log was opened; the header has the same size
            return open(self.path.with_suffix(""), "rb")


@dataclass
class MemorySegment(Segment):
    """Records of a live process that are not on disk yet."""

    records: Records = field(default_factory=lambda: np.zeros(0, RECORD), compare=False)

    def slots(self, size: int = BLOCK, memory: bytearray | None = None) -> Iterator[tuple[Records, set[str]]]:
        """Yield all records in one block."""
        yield self.records, {*(RECORD.names or ())}

    def usual_time(self) -> int:
        """Return a time on the process's clock near those of the records, ns."""
        return median_time(self.records)

    def part(self, begin: int, count: int) -> Segment:
        """Return all records: those of a ring are in no order."""
        return self


def last_records(segments: Iterable[Segment], count: int) -> tuple[Segment, ...]:
    """Return the last `count` records of a process as segments, in order."""
    kept: list[Segment] = []
    for segment in reversed([*segments]):
        if count > 0:
            kept.append(segment.last(count))
            count -= segment.count
    return tuple(reversed(kept))


def blocks_from_end(segments: Sequence[Segment], size: int) -> Iterator[Records]:
    """Yield the records of a process, from the last one backwards, in blocks of at most `size`, each in order."""
    for segment in reversed(segments):
        for end in range(segment.count, 0, -size):
            begin = max(0, end - size)
            yield from segment.part(begin, end - begin).blocks()


def _read(file: BufferedReader, block: memoryview) -> tuple[Records, set[str]]:
    """Fill a block with records. Return them, and the fields that have an impossible value in some record."""
    suspects: set[str] = set()
    filled = 0
    while count := file.readinto(block[filled : filled + _READ_AT_ONCE]):
        part = np.frombuffer(block[filled:], _UNSIGNED, count // RECORD.itemsize)
        filled += count
        if len(part):
            suspects |= {name for name, highest in _HIGHEST.items() if part[name].max() > highest}
            suspects |= {name for name, lowest in _LOWEST.items() if part[name].min() < lowest}
            suspects |= {"local"} if (part["local"] > part["payload"]).any() else set()
    return np.frombuffer(block, RECORD, filled // RECORD.itemsize), suspects


def median_time(records: Records) -> int:
    """Return the median begin of records, ns, 0 if none has one: most are not damaged."""
    begins = records["t_begin"][(records["state"] != State.FREE) & (records["t_begin"] > 0)]
    return min(int(np.partition(begins, len(begins) // 2)[len(begins) // 2]), _MAX_TIME) if len(begins) else 0


def usable_records(
    records: Records, suspects: Container[str], damaged: Counter[str], segment: Segment
) -> npt.NDArray[np.bool_]:
    """Return a mask of the slots that hold a record without impossible values, shape (n,).

    Args:
        records: The slots, shape (n,).
        suspects: Fields that may have impossible values.
        damaged: Counts of records with impossible values by field, which are increased.
        segment: The segment of the slots. What a time may be depends on its others: a clock may start anywhere.
    """
    usable = np.asarray(records["state"] != State.FREE)
    values = records.view(_UNSIGNED)
    is_late = any(bool((values[name] > _FAR).any()) for name in _TIMES if name in suspects)
    usual = segment.usual_time() if is_late else 0
    for name, impossible in _impossible(records, suspects, usual):
        damaged[name] += int((usable & impossible).sum())
        usable &= ~impossible
    return usable


def _impossible(
    records: Records, suspects: Container[str], usual_time: int
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Yield each of `suspects` with a mask of the records that have an impossible value in it, shape (n,)."""
    values = records.view(_UNSIGNED)
    earliest, latest = max(usual_time - _FAR, 0), min(usual_time + _FAR, _MAX_TIME)
    for name in RECORD.names or ():
        if name in _TIMES and name in suspects:
            yield name, (values[name] > latest) | ((values[name] < earliest) & (values[name] > 0))
        elif name in suspects:
            highest = values["payload"] if name == "local" else _HIGHEST.get(name, np.iinfo(RECORD[name]).max)
            yield name, (values[name] < _LOWEST.get(name, 0)) | (values[name] > highest)


def damage_notes(path: Path, segments: Sequence[Segment]) -> Iterator[Note]:
    """Yield notes on the records that were left out of the segments of a process."""
    if damaged := sum((Counter(segment.damaged) for segment in segments if segment.damaged), Counter()):
        fields = ", ".join(name for name in RECORD.names or () if name in damaged)
        records = Quantity(damaged.total(), "record")
        yield Note("garbled", path, Statement("{} with impossible values ({})", records, fields), "left out")
    for segment in segments:
        if segment.read_error:
            yield Note("unreadable", segment.path, segment.read_error, "its records are left out")


class _CutError(ValueError):
    """Error for a segment with an incomplete header."""


def inspect_segment(path: Path) -> tuple[Segment | None, list[Note]]:
    """Return the segment in a file, or None if there is none, and notes on what is wrong with the file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            stated = _read_header(file)
            offset = file.tell()
    except OSError as error:
        return None, [Note("unreadable", path, error_reason(error), "its records are left out")]
    except _CutError:
        return None, [
            Note("cut", path, Statement("cut after {:,} bytes, within the header", size), "it holds no record")
        ]
    except ValueError as error:
        return None, [Note("foreign", path, str(error), "it is left out")]
    count, rest = divmod(size - offset, RECORD.itemsize)
    segment, is_closed = Segment(path, offset, count), path.suffix != ".open"
    if is_closed and count != stated:
        if count < stated:
            what = Statement("cut after {:,} of {:,} records", count, stated)
            return segment, [Note("cut", path, what, Statement("{:,} are missing", stated - count))]
        what = Statement("the header states {:,} records, but there are {:,}", stated, count)
        return segment, [Note("cut", path, what, "all were read")]
    if is_closed and rest:
        return segment, [
            Note("garbled", path, Statement("{:,} bytes follow the last record", rest), "they are left out")
        ]
    return segment, [Note("cut", path, "cut within its last record", "that record is missing")] if rest else []


def _read_header(file: BinaryIO) -> int:
    """Return the number of records that a file's `.npy` header states. Advance the file to the first one."""
    head = file.read(10)
    if b"\x93NUMPY\x01\x00".startswith(head[:8]) and len(head) < 10:
        raise _CutError
    if head[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not an .npy file of format 1.0")
    text = file.read(int.from_bytes(head[8:], "little"))
    if len(text) < int.from_bytes(head[8:], "little"):
        raise _CutError
    return _stated_count(head[8:] + text)


@functools.lru_cache(maxsize=256)  # segments often have equal headers, also when they are read again
def _stated_count(header: bytes) -> int:
    """Return the number of records that an `.npy` header states."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, _, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(header))
    except Exception:  # numpy parses the header as Python, so garbage raises nearly anything
        raise ValueError("its .npy header cannot be read") from None
    if dtype != RECORD or len(shape) != 1:
        raise ValueError("an .npy file of something other than records")
    return int(shape[0])
