"""Segment reader: files of records that are closed, still open, or cut. Any other file becomes a note."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from commtrace.schema import RECORD, Records, State

from .log_notes import Note, error_reason

BLOCK: Final = 1 << 18
"""Number of records read at once, 24 MiB."""


@dataclass(frozen=True)
class Segment:
    """One file of records as it was when the log was opened; what a live process appends later is not read."""

    path: Path
    offset: int
    """Size of the header in bytes."""
    count: int
    """Number of complete records in the file, empty ones included."""

    def blocks(self, size: int = BLOCK, memory: bytearray | None = None) -> Iterator[Records]:
        """Yield the records, shape (n,) with n <= size, without slots that were never filled.

        Files are read and not mapped: a mapped page of a removed file would kill this process. Records that cannot be
        read any more (a live process removes its oldest segment) are missing from the sum, as coverage reports.

        Args:
            size: Most records of a block.
            memory: Room for `size` records. Each block then lies in it, until the next one is asked for: new memory
                for each block would cost as much as reading. None: every block has its own memory.
        """
        try:
            with self._open() as file:
                file.seek(self.offset)
                for begin in range(0, self.count, size):
                    wanted = min(size, self.count - begin) * RECORD.itemsize
                    block = memoryview(bytearray(wanted) if memory is None else memory)[:wanted]
                    data = block[: file.readinto(block)]
                    records = np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
                    filled = records["state"] != State.FREE
                    yield records if filled.all() else records[filled]
        except OSError:
            return

    def _open(self) -> BufferedReader:
        try:
            return open(self.path, "rb")
        except FileNotFoundError:  # closed, and thereby renamed, since the log was opened; the header keeps its size
            return open(self.path.with_suffix(""), "rb")


class _CutError(ValueError):
    """The header of a segment is incomplete."""


def inspect_segment(path: Path) -> tuple[Segment | None, list[Note]]:
    """Find the records of a file by its header; None for a file without any. Returns notes on what is wrong with it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            stated = _read_header(file)
            offset = file.tell()
    except OSError as error:
        return None, [Note("unreadable", path, error_reason(error), "its records are left out")]
    except _CutError:
        return None, [Note("cut", path, f"cut after {size:,} bytes, within the header", "it holds no record")]
    except ValueError as error:
        return None, [Note("foreign", path, str(error), "it is left out")]
    count, rest = divmod(size - offset, RECORD.itemsize)
    segment, is_closed = Segment(path, offset, count), path.suffix != ".open"
    if is_closed and count != stated:
        what, consequence = f"the header states {stated:,} records, {count:,} are there", "all were read"
        if count < stated:
            what, consequence = f"cut after {count:,} of {stated:,} records", f"{stated - count:,} are missing"
        return segment, [Note("cut", path, what, consequence)]
    return segment, [Note("cut", path, "cut within its last record", "that record is missing")] if rest else []


def _read_header(file: BinaryIO) -> int:
    """Return the number of records in an `.npy` header, and leave the file at the first of them."""
    head = file.read(10)
    if b"\x93NUMPY\x01\x00".startswith(head[:8]) and len(head) < 10:
        raise _CutError
    if head[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("not an .npy file of format 1.0")
    text = file.read(int.from_bytes(head[8:], "little"))
    if len(text) < int.from_bytes(head[8:], "little"):
        raise _CutError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape, _, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(head[8:] + text))
    except Exception:  # numpy parses the header as Python, so garbage raises nearly anything
        raise ValueError("its .npy header cannot be read") from None
    if dtype != RECORD or len(shape) != 1:
        raise ValueError("an .npy file of something other than records")
    return int(shape[0])
