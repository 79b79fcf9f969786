"""Streamed lines of a text file, compressed or not, and JSON lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from commtrace.errors import ImportFileError

from .json_stream import loads, open_file

_LONGEST_LINE: Final = 16 << 20


class Lines:
    """The lines of a file, one at a time.

    Attributes:
        problem: Why the rest of the file could not be read; "" if it was read whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number of each line, from 1, and the line without spaces around it; empty lines are left out.

        Raises:
            ImportFileError: The file cannot be read.
        """
        number = 0
        try:
            with open_file(self.path) as file:
                while line := file.readline(_LONGEST_LINE + 1):
                    number += 1
                    if len(line) > _LONGEST_LINE:
                        self.problem = f"line {number:,} is longer than {_LONGEST_LINE >> 20} MiB"
                        return
                    if stripped := line.strip():
                        yield number, stripped
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.problem = f"its compressed data ends or is damaged after line {number:,} ({error})"
        except OSError as error:
            raise ImportFileError(f"{self.path}: cannot be read ({error.strerror or error})") from error


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None for anything else."""
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
