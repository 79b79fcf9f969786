"""Segments of records, closed, open, cut or foreign. What is no segment becomes a note."""

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
"""Records read at once: 24 MiB."""


@dataclass(frozen=True)
class Segment:
    """One file of records, as it was when the log was opened. A live process may add to it; that is not read."""

    path: Path
    offset: int
    """Bytes of the header."""
    count: int
    """Whole records in the file, empty ones included."""

    def blocks(self, size: int = BLOCK, memory: bytearray | None = None) -> Iterator[Records]:
        """The records, at most `size` at a time. Slots that were never filled are left out.

        With `memory` of `size` records, blocks lie in it, each until the next one is asked for: new memory for each
        would cost as much as reading.

        Files are read and not mapped: a mapped page of a vanished file would kill this process. What cannot be read
        any more (a live process removes its oldest segment) is missing from the sum, where coverage finds it.
        """
        try:
            with self._open() as file:
                file.seek(self.offset)
                for begin in range(0, self.count, size):
                    wanted = min(size, self.count - begin) * RECORD.itemsize
                    data: memoryview | bytes
                    if memory is None:
                        data = file.read(wanted)
                    else:
                        whole = memoryview(memory)[:wanted]
                        data = whole[: file.readinto(whole)]
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
    """The header of a segment does not end."""


def inspect_segment(path: Path) -> tuple[Segment | None, list[Note]]:
    """Where the records of a file lie. Reads the header only."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            promised = _read_header(file)
            offset = file.tell()
    except OSError as error:
        return None, [Note("unreadable", path, error_reason(error), "its records are left out")]
    except _CutError:
        return None, [Note("cut", path, f"cut after {size:,} bytes, within the header", "it holds no record")]
    except ValueError as error:
        return None, [Note("foreign", path, str(error), "it is left out")]
    count, rest = divmod(size - offset, RECORD.itemsize)
    segment = Segment(path, offset, count)
    return segment, _length_notes(segment, None if path.suffix == ".open" else promised, rest)


def _read_header(file: BinaryIO) -> int:
    """Number of records that an `.npy` header promises; the file then stands at the first of them."""
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


def _length_notes(segment: Segment, promised: int | None, rest: int) -> list[Note]:
    path, count = segment.path, segment.count
    if promised is not None and count < promised:
        return [Note("cut", path, f"cut after {count:,} of {promised:,} records", f"{promised - count:,} are missing")]
    if promised is not None and count > promised:
        return [Note("cut", path, f"the header promises {promised:,} records, {count:,} are there", "all were read")]
    return [Note("cut", path, "cut within its last record", "that record is missing")] if rest else []
