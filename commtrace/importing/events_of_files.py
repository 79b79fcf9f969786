"""Events of the files of a run, which worker processes read where there are many bytes.

Reading a trace takes much longer than writing its calls to a log. So each worker reads one file at a time and writes
its events to a temporary file, from which this process takes them in the order of the files.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from commtrace.reading.executors import worker_pool

from .events import Event

EventReader: TypeAlias = Callable[[Path], Iterator[Event]]
"""Yields the events of a file. Raises ImportFileError."""

MIN_PARALLEL_BYTES: Final = 16 << 20
"""Size of all files from which worker processes read them: half a second."""
_CHUNK: Final = 4096


def events_of_files(files: Sequence[tuple[Path, EventReader]], folder: Path) -> Iterator[tuple[Path, Iterator[Event]]]:
    """Yield each file with its events, which are to be consumed before the next file.

    Args:
        files: The files, and what reads each.
        folder: Directory for temporary files.

    Raises:
        ImportFileError: A file cannot be imported.
        CommtraceError: A worker process was killed.
    """
    is_large = sum(path.stat().st_size for path, _ in files) >= MIN_PARALLEL_BYTES
    with worker_pool(len(files) if is_large else 0, (path for path, _ in files)) as pool:
        if pool is None:
            yield from ((path, reader(path)) for path, reader in files)
            return
        with tempfile.TemporaryDirectory(prefix=".events-", dir=folder) as temporary:
            outs = [Path(temporary) / str(number) for number in range(len(files))]
            results = pool.map(_write_events, files, outs)
            for (path, _), out, _ in zip(files, outs, results, strict=True):
                yield path, _read_events(out)
                out.unlink()


def _write_events(file: tuple[Path, EventReader], out: Path) -> None:
    path, reader = file
    events = reader(path)
    with open(out, "wb") as stream:
        while chunk := [*itertools.islice(events, _CHUNK)]:
            pickle.dump(chunk, stream, pickle.HIGHEST_PROTOCOL)


def _read_events(path: Path) -> Iterator[Event]:
    with open(path, "rb") as stream:
        while stream.peek(1):
            yield from pickle.load(stream)
