"""Log reader: finds the runs below a directory, and reads one. numpy and standard library only.

    log = open_log(Path("logs/run1"))
    for process in log.processes:                # Process(rank=3, pid=4711, host="node17", ...)
        for segment in process.segments:
            for records in segment.blocks():     # arrays of schema.RECORD; logs may be larger than memory
                ...

Damaged parts are left out and named in `log.notes`; everything else is read. `docs/reference/log-format.md` describes
the format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from commtrace.errors import LogError
from commtrace.recording.recovery import copy_living_rings, record_keys, recover_records
from commtrace.recording.ring import RingContent
from commtrace.schema import RECORD

from .log_notes import Note, error_reason
from .packed_log import PROCESSES, PackedRun
from .process_reader import Process, is_log_file, is_tables_file, read_host
from .segment_reader import MemorySegment, Segment
from .table_reader import integer_or_none


@dataclass(frozen=True)
class Log:
    """One run. `notes` name what is damaged or missing; `other_runs` are further runs in the same directory."""

    path: Path
    run: str
    processes: tuple[Process, ...]
    notes: tuple[Note, ...]
    other_runs: tuple[str, ...]
    packed: Path | None = None
    """Its folder in a packed log."""

    @cached_property
    def world_size(self) -> int | None:
        """Number of ranks of the run; None where no process recorded it."""
        sizes = [integer_or_none(process.tables.process.get("world_size")) for process in self.processes]
        return max((size for size in sizes if size), default=None)


class LogDirectory:
    """A directory with runs: the folders of the runs in it, of a log or of a packed log.

    Args:
        path: What COMMTRACE named, the folder of a run in it, or the folder of a host in that; or a packed log.
        recover: Whether to first recover records of killed processes, which writes to the log.

    Attributes:
        path: The directory, absolute.
        recovered: Notes on records that were recovered.
        notes: Notes on folders.
        folders: The folders of runs.

    Raises:
        LogError: There is no run.
        NewerLogError: A run has a newer format.
    """

    def __init__(self, path: Path, *, recover: bool) -> None:
        self.path = Path(os.path.abspath(path.expanduser()))
        # Before the files are looked at: a record that leaves the memory from now on is in them. And before recovery: a
        # process that ends in between is recovered, and its ring removed.
        living = copy_living_rings(self.path)
        texts = recover_records(self.path) if recover else ()
        self._living = {tables: copy for tables, copy in living.items() if copy.path.exists()}
        self.recovered = [Note("salvage", self.path, text, "") for text in texts]
        self.notes: list[Note] = []
        self.folders = [*_find_runs(self.path, self.notes)]
        if not self.folders:
            raise LogError(_describe_no_log(self.path, self.notes))

    def read(self, folder: RunFolder | PackedRun) -> tuple[str, list[Process], list[Note]]:
        """Return the newest run that has files in a folder, the processes of all runs in it, and notes on the files."""
        notes = [*self.notes]
        processes = sorted(folder.processes(self._living, notes), key=lambda p: (p.rank, p.host, p.pid))
        # A folder may hold files of several runs, where files were moved: take its namesake, or the newest.
        started = {process.run: process.started_ns for process in sorted(processes, key=lambda p: p.started_ns)}
        newest = folder.name if folder.name in started else max(started, key=lambda run: (started[run], run))
        return newest, processes, notes


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run in a log, with folders of hosts. A `PackedRun` is used in the same way."""

    path: Path
    hosts: list[Path]

    @property
    def name(self) -> str:
        """Name of the folder in the log."""
        return self.path.name

    @cached_property
    def started_ns(self) -> int:
        """Wall-clock time when the run began, in ns: of the first process that recorded it, else of the folder."""
        for host in self.hosts:
            for path in sorted(host / name for name in _list_folder(host, []) or () if is_tables_file(name)):
                with suppress(OSError, KeyError, TypeError, ValueError, RecursionError), open(path, "rb") as file:
                    started = json.loads(file.readline(1 << 20))["unix_ns"]
                    if type(started) is int:
                        return started
        return self.path.stat().st_mtime_ns

    def processes(self, living: Mapping[Path, RingContent], notes: list[Note]) -> Iterator[Process]:
        """Yield the processes that have files in the folder. Adds notes on the files."""
        for host in self.hosts:
            yield from read_host(host, _list_folder(host, notes) or (), living, notes)


def open_log(path: Path, *, recover: bool = True) -> Log:
    """Read the newest run below a directory, and what its living processes on this host have in memory.

    Args:
        path: What COMMTRACE named, the folder of a run in it, or the folder of a host in that; or a packed log.
        recover: Whether to first recover records of killed processes, which writes to the log.

    Raises:
        LogError: There is no run.
        NewerLogError: The run has a newer log format.
    """
    directory = LogDirectory(path, recover=recover)
    path, notes, folders = directory.path, directory.recovered, directory.folders
    folder = max(folders, key=lambda folder: (folder.started_ns, folder.name))
    newest, found, folder_notes = directory.read(folder)
    processes = [process for process in found if process.run == newest]
    paths = {other.name: other.path for other in folders if other != folder}
    others = sorted({process.run for process in found} - {newest} | {*paths})
    if others:
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        text = f"holds {len(others) + 1} runs; this is the newest, {newest}; not in it: {names}"
        hint = f"to see another: commtrace report {paths.get(others[-1], path / others[-1])}"
        notes.insert(0, Note("runs", path, text, hint))
    notes += [*folder_notes, *_process_notes(processes)]
    packed = folder.path if isinstance(folder, PackedRun) else None
    return Log(path, newest, tuple(processes), tuple(notes), tuple(others), packed)


def kept_log(log: Log) -> Log:
    """Return a run with the records that its processes kept, in place of all that they wrote.

    Raises:
        LogError: They kept none.
    """
    processes = tuple(replace(p, segments=_kept_segments(p), summary=None, kept=None, dumps=()) for p in log.processes)
    if not any(segment.count for process in processes for segment in process.segments):
        raise LogError(f"{log.path}: no calls were kept besides its records; pass the log without --kept")
    return replace(log, processes=processes)


def _kept_segments(process: Process) -> tuple[Segment, ...]:
    segments = (*process.dumps, *([process.kept] if process.kept else ()), *process.segments * bool(process.summary))
    records = np.concatenate([np.zeros(0, RECORD), *(block for segment in segments for block in segment.blocks())])
    keys = record_keys(records)
    # Of a call that is in several, the last one knows most.
    _, last = np.unique(keys[::-1], return_index=True)
    records = records[np.sort(len(records) - 1 - last)]
    return (MemorySegment(process.path, 0, len(records), records=records),)


def _find_runs(path: Path, notes: list[Note]) -> Iterator[RunFolder | PackedRun]:
    """Yield the runs at or below `path`. Adds notes on folders."""
    names = _list_folder(path, [])
    if names is None:
        if path.is_dir():
            raise LogError(f"{path}: may not be read; ask its owner for read permission")
        what = "not a directory" if os.path.lexists(path) else "no such directory"
        hint = "pass the directory that COMMTRACE was set to, or the folder of a run in it"
        raise LogError(f"{path}: {what}; {hint}; `commtrace doctor` shows which calls create it")
    if PROCESSES in names:
        yield PackedRun(path)
    elif any(map(is_log_file, names)):
        yield RunFolder(path.parent, [path])
    else:
        children = {child: _list_folder(child, notes) or [] for child in sorted(path / name for name in names)}
        if hosts := [child for child, names in children.items() if any(map(is_log_file, names))]:
            yield RunFolder(path, hosts)
        for child, names in children.items():
            if PROCESSES in names:
                yield PackedRun(child)
            elif child not in hosts:
                below = sorted(child / name for name in names)
                if of_run := [host for host in below if any(map(is_log_file, _list_folder(host, notes) or ()))]:
                    yield RunFolder(child, of_run)


def _list_folder(folder: Path, notes: list[Note]) -> list[str] | None:
    """Return the names in a folder; None where it is no folder, or cannot be read, which adds a note."""
    try:
        return os.listdir(folder)
    except (NotADirectoryError, FileNotFoundError):
        return None
    except OSError as error:
        notes.append(Note("unreadable", folder, error_reason(error), "its files are left out"))
        return None


def _describe_no_log(path: Path, notes: list[Note]) -> str:
    if notes:
        return f"{path}: no readable log in it ({notes[0].path}: {notes[0].what}); ask its owner for read permission"
    for file in sorted(path.glob("*/*/*/rank*")):
        if is_log_file(file.name):
            return f"{path}: no log in it, but in {file.parent.parent.parent}; give that directory"
    hint = f"run the program with COMMTRACE={path}; its first communication call creates the log"
    return f"{path}: no log in it; {hint}; `commtrace doctor` shows which calls are recorded"


def _process_notes(processes: list[Process]) -> Iterator[Note]:
    for process, after in pairwise(processes):
        if process.rank == after.rank >= 0:
            text = f"rank {process.rank} has more than one process (process ids {process.pid} and {after.pid})"
            yield Note("process", after.path, text, "both are counted")
    sizes = {size for process in processes if (size := integer_or_none(process.tables.process.get("world_size")))}
    if len(sizes) > 1:
        text = f"its processes disagree on the number of ranks: {', '.join(map(str, sorted(sizes)))}"
        yield Note("process", processes[0].path.parent.parent, text, "the largest is taken")
