"""Streamed JSON: the members of one large array in a file, in batches, without holding the file in memory.

A trace is one object with a few small members and one array of millions of events. The file is read in pieces. A
piece is cut at a boundary between two events, found by searching for "}, {" from its end, first for one that is
followed by the first key of the first event, as objects within events usually begin with other keys: text from one
boundary to the next is parsed as an array, and parsing fails unless the cut was between events, so that a cut is never
guessed wrong.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from commtrace.errors import ImportFileError

_PIECE: Final = 4 << 20
_LARGEST_EVENT: Final = 64 << 20
"""Bytes that may be read without finding the end of an event, or of the members before the array."""
_BOUNDARY: Final = re.compile(rb"\}\s*,\s*(?=\{)")
_FIRST_KEY: Final = re.compile(rb'\s*\{\s*("[^"\\]{1,100}")\s*:')
_ARRAY_END: Final = re.compile(rb"\]\s*(?=[,}]|$)")
_TOKENS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_ATTEMPTS: Final = 4

try:
    import orjson

    _loads: Callable[[bytes], Any] = orjson.loads
except ImportError:  # the extra `import` is not installed
    _loads = json.loads


def open_file(path: Path) -> BinaryIO:
    """Open a file, decompressed if it begins as a gzip file does. Raises OSError."""
    with open(path, "rb") as file:
        magic = file.read(2)
    return gzip.open(path, "rb") if magic == b"\x1f\x8b" else open(path, "rb")  # type: ignore[return-value]


def read_head(path: Path, size: int) -> bytes:
    """Return the first (decompressed) bytes of a file, as many as can be read, at most `size`. Raises OSError."""
    head = b""
    with open_file(path) as file, contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile):
        while len(head) < size and (piece := file.read1(size - len(head))):  # type: ignore[attr-defined]
            head += piece
    return head


def loads(text: bytes) -> Any:
    """Parse JSON, including what profilers write although JSON has no such values: NaN, control characters, bad UTF-8.

    Raises:
        ValueError: The text is not JSON.
    """
    try:
        return _loads(text)
    except ValueError:
        return _lenient_loads(text)


def natural(value: Any, below: float = math.inf) -> int | None:
    """Return a parsed value if it is an integer, not negative and below a limit, else None: files may hold anything."""
    return value if type(value) is int and 0 <= value < below else None


def _lenient_loads(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8", "replace"), strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector: it would search millions of parsed objects, which have no cycles, for some."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class JsonArray:
    """The array that is one member of the object in a JSON file, or a file that is an array.

    Attributes:
        members: The other members of the object; those after the array once it has been read.
        problem: Why the rest of the array could not be read; "" if it was read whole.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.members: dict[str, Any] = {}
        self.problem = ""
        self._name = re.compile(rb'"' + re.escape(name.encode()) + rb'"\s*:\s*\[')
        self._offset = 0
        """Position of the buffer's first byte in the (decompressed) file."""

    def batches(self) -> Iterator[list[Any]]:
        """Yield the items of the array in lists.

        Raises:
            ImportFileError: The file cannot be read, or has no such array.
        """
        try:
            with open_file(self.path) as file:
                yield from self._batches(file)
        except OSError as error:
            raise ImportFileError(f"{self.path}: cannot be read ({error.strerror or error})") from error

    def _read(self, file: BinaryIO) -> bytes:
        try:
            return file.read(_PIECE)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.problem = f"its compressed data ends or is damaged ({error})"
            return b""

    def _batches(self, file: BinaryIO) -> Iterator[list[Any]]:
        buffer, is_end, boundary = self._find_array(file), False, _BOUNDARY
        while not self.problem or buffer:
            piece = b"" if self.problem else self._read(file)
            is_end, buffer = not piece, buffer + piece
            if boundary is _BOUNDARY and (key := _FIRST_KEY.match(buffer)):
                boundary = re.compile(_BOUNDARY.pattern + rb"(?=\{\s*" + re.escape(key[1]) + rb")")
            cut = _last_boundary(buffer, boundary) or _last_boundary(buffer, _BOUNDARY) or _scanned_boundary(buffer)
            if cut is None and (array := self._close(buffer, is_end=is_end)) is not None:
                yield array
                return
            if cut is not None:
                end, items = cut
                yield items
                self._offset += end
                buffer = buffer[end:]
            if is_end:
                yield from self._rest(buffer)
                return
            if len(buffer) > _LARGEST_EVENT:
                self.problem = f"an event at byte {self._offset:,} is longer than {_LARGEST_EVENT >> 20} MiB"
                return

    def _find_array(self, file: BinaryIO) -> bytes:
        """Return the first bytes of the array; read the members before it."""
        buffer = b""
        while piece := self._read(file):
            buffer += piece
            text = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if text.startswith(b"["):
                self._offset = len(buffer) - len(text) + 1
                return text[1:]
            if not text.startswith(b"{"):
                break
            for match in self._name.finditer(buffer):
                try:
                    self.members = loads(buffer[: match.start()].rstrip().rstrip(b",") + b"}")
                except ValueError:
                    continue  # within a string or a nested object
                self._offset = match.end()
                return buffer[match.end() :]
            if len(buffer) > _LARGEST_EVENT:
                break
        wanted = self._name.pattern.decode().split('"')[1]
        raise ImportFileError(f"{self.path}: no array {wanted!r} in it; is it a trace? --format names its format")

    def _close(self, buffer: bytes, *, is_end: bool) -> list[Any] | None:
        """Return the last items if the array ends in the buffer, which has no usable boundary; else None."""
        if not is_end:
            # The array may end in the buffer, with members after it: the whole rest is needed.
            return None
        for match in reversed([*_ARRAY_END.finditer(buffer)]):
            try:
                items = _items(buffer[: match.start()])
                rest = buffer[match.start() + 1 :].strip().lstrip(b",")
                members = loads(b"{" + (rest if rest.endswith(b"}") else rest + b"}"))
            except ValueError:
                continue
            self.members = {**self.members, **members}
            return items
        return None

    def _rest(self, buffer: bytes) -> Iterator[list[Any]]:
        """Yield the items of a last part that does not end the array as it should."""
        if (array := self._close(buffer, is_end=True)) is not None:
            yield array
            return
        items, end = _items_one_by_one(buffer)
        if items:
            yield items
        if not self.problem:
            self.problem = f"it ends early or is damaged at byte {self._offset + end:,}"
        else:
            self.problem += f", after byte {self._offset + end:,} of the decompressed file"


def _items(text: bytes) -> list[Any]:
    items = loads(b"[" + text.strip().rstrip(b",") + b"]")
    if not isinstance(items, list):
        raise ValueError
    return items


def _last_boundary(buffer: bytes, boundary: re.Pattern[bytes]) -> tuple[int, list[Any]] | None:
    """Return the position after the last usable boundary between items, and the items before it; None without one.

    Of the last few boundaries, one is usable if what is before it can be parsed.
    """
    end = len(buffer)
    for _ in range(_ATTEMPTS):
        begin = buffer.rfind(b"}", 0, end)
        while begin >= 0 and not (match := boundary.match(buffer, begin)):
            begin = buffer.rfind(b"}", 0, begin)
        if begin < 0 or match is None:
            return None
        try:
            return match.end(), _items(buffer[: begin + 1])
        except ValueError:
            end = begin
    return None


def _scanned_boundary(buffer: bytes) -> tuple[int, list[Any]] | None:
    """Do what `_last_boundary` does by counting brackets."""
    position = 0
    for end in _ends_of_items(buffer):
        match = _BOUNDARY.match(buffer, end - 1)
        if match is None:
            break
        position = match.end()
    try:
        return (position, _items(buffer[:position])) if position else None
    except ValueError:
        return None


def _ends_of_items(buffer: bytes) -> Iterator[int]:
    """Yield the position after each object at the outermost level, until a bracket closes more than was opened."""
    depth = 0
    for token in _TOKENS.finditer(buffer):
        character = token.group()[:1]
        if character in b"[{":
            depth += 1
        elif character in b"]}":
            depth -= 1
            if depth < 0:
                return
            if not depth:
                yield token.end()


def _items_one_by_one(buffer: bytes) -> tuple[list[Any], int]:
    """Return the items up to the first that cannot be parsed, and the position where they end."""
    items: list[Any] = []
    begin = 0
    for end in _ends_of_items(buffer):
        try:
            items.append(loads(buffer[begin:end].lstrip(b", \t\r\n")))
        except ValueError:
            break
        begin = end
    return items, begin
