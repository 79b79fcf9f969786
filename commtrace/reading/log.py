"""Log reader: finds the runs below a directory and reads one. It needs only numpy.

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
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from commtrace.errors import LogError
from commtrace.recording.recovery import Recovery, copy_rings, record_keys, recover_records
from commtrace.recording.ring import RingContent
from commtrace.schema import RECORD
from commtrace.statements import Statement

from .live_processes import with_silences
from .log_notes import Note, error_reason
from .packed_log import PROCESSES, PackedRun
from .process_reader import Process, is_log_file, is_tables_file, rank_of_stem, read_host
from .segment_reader import MemorySegment, Segment
from .table_reader import integer_or_none


@dataclass(frozen=True)
class Log:
    """One run. `notes` describe what is damaged or missing; `other_runs` are the other runs in the directory."""

    path: Path
    run: str
    processes: tuple[Process, ...]
    notes: tuple[Note, ...]
    other_runs: tuple[str, ...]
    packed: Path | None = None
    """The run's folder, if the log is packed."""

    @cached_property
    def world_size(self) -> int | None:
        """Number of ranks of the run; None where no process recorded it."""
        sizes = [integer_or_none(process.tables.process.get("world_size")) for process in self.processes]
        return max((size for size in sizes if size), default=None)


class LogFiles:
    """The files below a log directory, and those that killed or live processes have only in shared memory.

    Attributes:
        rings: Copies of the rings of processes, by the path of their tables.
    """

    def __init__(self, rings: Mapping[Path, RingContent]) -> None:
        self.rings = rings
        self._in_memory: dict[Path, set[str]] = defaultdict(set)
        for tables in rings:
            for path in (tables, *tables.parents[:2]):
                self._in_memory[path.parent].add(path.name)

    def names(self, folder: Path, notes: list[Note]) -> list[str] | None:
        """Return the names in a folder; None if it is not a folder or cannot be read (which adds a note).

        What is neither a file nor a folder, as a pipe, is left out: to open it may take forever.
        """
        in_memory = self._in_memory.get(Path(os.path.realpath(folder)), set()) if self._in_memory else set()
        try:
            with os.scandir(folder) as entries:
                names = {entry.name: entry for entry in entries}
            special = {name for name, entry in names.items() if _is_special(entry)}
            for name in sorted(filter(is_log_file, special)):
                note = Note("foreign", folder / name, "neither a file nor a folder", "it is left out")
                notes += [note] * (note not in notes)
            return [*({*names} - special) | in_memory]
        except (NotADirectoryError, FileNotFoundError):
            return [*in_memory] or None
        except OSError as error:
            notes.append(Note("unreadable", folder, error_reason(error), "its files are left out"))
            return None

    def first_line(self, tables: Path) -> bytes:
        """Return the first line of a process's tables. Raises OSError."""
        ring = self.rings.get(Path(os.path.realpath(tables)))
        if ring is not None and not tables.exists():
            return ring.tables.partition(b"\n")[0]
        with open(tables, "rb") as file:
            return file.readline(1 << 20)


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a pipe, a socket or a device."""
    return not (entry.is_file() or entry.is_dir()) and os.path.exists(entry)


class LogDirectory:
    """A log directory or packed log, with the folders of the runs in it.

    Args:
        path: A log directory, a run's folder in it, a host's folder in that, or a packed log.
        recover: Whether to first recover records of killed processes, which writes to the log.
        most_in_memory: As in `open_log`.

    Attributes:
        path: The directory, absolute.
        recovered: Notes on recovered records.
        notes: Notes on folders that cannot be read.
        folders: The folders of runs.

    Raises:
        LogError: There is no run.
        NewerLogError: A run has a newer format.
    """

    def __init__(self, path: Path, *, recover: bool, most_in_memory: int | None = None) -> None:
        self.path = Path(os.path.abspath(path.expanduser()))
        # Rings are copied before files are read: a record that leaves a ring later is then in the files. They are
        # copied before recovery, too: it removes the rings of processes that end in between.
        rings = with_silences(copy_rings(self.path, most_in_memory))
        recoveries = recover_records(self.path) if recover else ()
        files = LogFiles({tables: ring for tables, ring in rings.items() if ring.path.exists()})
        self.recovered = [recovery_note(self.path, recovery) for recovery in recoveries]
        self.notes: list[Note] = []
        self.folders = [*_find_runs(self.path, files, self.notes)]
        if not self.folders:
            raise LogError(_describe_no_log(self.path, self.notes))

    def read(self, folder: RunFolder | PackedRun) -> tuple[str, list[Process], list[Note]]:
        """Return the run of a folder, the processes of all runs with files in it, and notes on the files.

        Raises:
            LogError: Its files were removed since the folder was found.
        """
        notes = [*self.notes]
        processes = sorted(folder.processes(notes), key=lambda p: (p.rank, p.host, p.pid))
        # Moved files may put several runs into one folder: take the run with the folder's name, else the newest.
        started = {process.run: process.started_ns for process in sorted(processes, key=lambda p: p.started_ns)}
        if not started:
            raise LogError(f"{folder.path}: its files were removed while the log was read; read it again")
        run = folder.name if folder.name in started else max(started, key=lambda run: (started[run], run))
        return run, processes, notes


@dataclass(frozen=True)
class RunFolder:
    """A run's folder in a log, with the folders of its hosts. `PackedRun` has the same interface."""

    path: Path
    hosts: list[Path]
    files: LogFiles

    @property
    def name(self) -> str:
        """Name of the folder in the log."""
        return self.path.name

    @cached_property
    def started_ns(self) -> int:
        """Wall-clock time of the run's start in ns, from a process that recorded it, else from the folder."""
        for host in self.hosts:
            for path in sorted(host / name for name in self.files.names(host, []) or () if is_tables_file(name)):
                with suppress(OSError, KeyError, TypeError, ValueError, RecursionError):
                    started = json.loads(self.files.first_line(path))["unix_ns"]
                    if type(started) is int:
                        return started
        return self.path.stat().st_mtime_ns if self.path.exists() else 0

    def processes(self, notes: list[Note]) -> Iterator[Process]:
        """Yield the processes that have files in the folder. Add notes on the files."""
        for host in self.hosts:
            yield from read_host(host, self.files.names(host, notes) or (), self.files.rings, notes)


def open_log(path: Path, *, recover: bool = False, most_in_memory: int | None = None) -> Log:
    """Read the newest run below a directory, including records in this host's shared memory, of live processes, too.

    Args:
        path: A log directory, a run's folder in it, a host's folder in that, or a packed log.
        recover: Whether to first move records of killed processes from shared memory to the log.
        most_in_memory: Number of records to read from the memory of all live processes: the newest of each, and besides
            those of calls in flight. None: all.

    Raises:
        LogError: There is no run.
        NewerLogError: The run has a newer log format.
    """
    directory = LogDirectory(path, recover=recover, most_in_memory=most_in_memory)
    path, notes, folders = directory.path, directory.recovered, directory.folders
    folder = max(folders, key=lambda folder: (folder.started_ns, folder.name))
    newest, folder_processes, folder_notes = directory.read(folder)
    processes = [process for process in folder_processes if process.run == newest]
    paths = {other.name: other.path for other in folders if other != folder}
    others = sorted({process.run for process in folder_processes} - {newest} | {*paths})
    if others:
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
        text = f"holds {len(others) + 1} runs; this is the newest, {newest}; not in it: {names}"
        hint = f"to see another: commtrace report {paths.get(others[-1], path / others[-1])}"
        notes.insert(0, Note("runs", path, text, hint))
    notes += [*folder_notes, *_process_notes(processes)]
    packed = folder.path if isinstance(folder, PackedRun) else None
    return Log(path, newest, tuple(processes), tuple(notes), tuple(others), packed)


def kept_log(log: Log) -> Log:
    """Return a run with the kept calls of its processes in place of their other records.

    Raises:
        LogError: No process kept calls.
    """
    processes = tuple(replace(p, segments=_kept_segments(p), summary=None, kept=None, dumps=()) for p in log.processes)
    if not any(segment.count for process in processes for segment in process.segments):
        raise LogError(f"{log.path}: no calls were kept besides its records; pass the log without --kept")
    return replace(log, processes=processes)


def _kept_segments(process: Process) -> tuple[Segment, ...]:
    segments = (*process.dumps, *([process.kept] if process.kept else ()), *process.segments * bool(process.summary))
    records = np.concatenate([np.zeros(0, RECORD), *(block for segment in segments for block in segment.blocks())])
    keys = record_keys(records)
    # Segments may repeat a call: its last record is the most complete.
    _, last = np.unique(keys[::-1], return_index=True)
    records = records[np.sort(len(records) - 1 - last)]
    return (MemorySegment(process.path, 0, len(records), records=records),)


def recovery_note(directory: Path, recovery: Recovery) -> Note:
    """Return the note on records of a dead process in a log directory."""
    if recovery.error:
        subject = str(recovery.ring)
        what = Statement("records of a process that ended early could not be moved to the log: {}", recovery.error)
    else:
        subject = f"{recovery.stem} on {recovery.host}"
        what = Statement("{} records of a process that ended early were recovered", recovery.records)
    rank = rank_of_stem(recovery.stem)
    return Note("salvage", directory, what, "", rank if rank >= 0 else None, subject)


def _find_runs(path: Path, files: LogFiles, notes: list[Note]) -> Iterator[RunFolder | PackedRun]:
    """Yield the runs at or below `path`. Add notes on folders that cannot be read."""
    names = files.names(path, [])
    if names is None:
        if path.is_dir():
            raise LogError(f"{path}: cannot be read; ask its owner for read permission")
        what = "not a directory" if os.path.lexists(path) else "no such directory"
        hint = "pass the directory that COMMTRACE was set to, or the folder of a run in it"
        raise LogError(f"{path}: {what}; {hint}; `commtrace doctor` shows which calls create it")
    if PROCESSES in names:
        yield PackedRun(path)
    elif any(map(is_log_file, names)):
        yield RunFolder(path.parent, [path], files)
    else:
        children = {child: files.names(child, notes) or [] for child in sorted(path / name for name in names)}
        if hosts := [child for child, names in children.items() if any(map(is_log_file, names))]:
            yield RunFolder(path, hosts, files)
        for child, names in children.items():
            if PROCESSES in names:
                yield PackedRun(child)
            elif child not in hosts:
                below = sorted(child / name for name in names)
                if run_hosts := [host for host in below if any(map(is_log_file, files.names(host, notes) or ()))]:
                    yield RunFolder(child, run_hosts, files)


def _describe_no_log(path: Path, notes: list[Note]) -> str:
    if notes:
        return f"{path}: no readable log in it ({notes[0].path}: {notes[0].text}); ask its owner for read permission"
    for file in sorted(path.glob("*/*/*/rank*")):
        if is_log_file(file.name):
            return f"{path}: no log in it, but in {file.parent.parent.parent}; give that directory"
    hint = f"run the program with COMMTRACE={path}; its first communication call creates the log"
    return f"{path}: no log in it; {hint}; `commtrace doctor` shows which calls are recorded"


def _process_notes(processes: list[Process]) -> Iterator[Note]:
    for process, after in pairwise(processes):
        if process.rank == after.rank >= 0:
            template = "rank {} has more than one process (process ids {} and {})"
            what = Statement(template, process.rank, process.pid, after.pid)
            yield Note("process", after.path, what, "both are counted", process.rank)
    sizes = {size for process in processes if (size := integer_or_none(process.tables.process.get("world_size")))}
    if len(sizes) > 1:
        text = f"its processes disagree on the number of ranks: {', '.join(map(str, sorted(sizes)))}"
        yield Note("process", processes[0].path.parent.parent, text, "the largest is used")
