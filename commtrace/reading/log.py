"""Read a log from disk: runs, processes, tables and segments. numpy and the standard library only.

    log = open_log(Path("logs/run1"))
    for process in log.processes:                # Process(rank=3, pid=4711, host="node17", ...)
        for segment in process.segments:
            for records in segment.blocks():     # arrays of schema.RECORD; logs may be larger than memory
                ...

What is damaged is left out and named in `log.notes`; everything else is read.
The format: `docs/reference/log-format.md`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from commtrace.errors import LogError
from commtrace.recording.recovery import recover_records

from .log_notes import Note, error_reason
from .segment_reader import Segment, inspect_segment
from .table_reader import ProcessTables, integer_or_none, read_tables


@dataclass(frozen=True)
class Process:
    """One process of a run. `rank` and `pid` are -1 where neither its tables nor its file names tell."""

    path: Path
    """Its tables file, which may be missing."""
    rank: int
    pid: int
    host: str
    tables: ProcessTables
    segments: tuple[Segment, ...]

    @property
    def run(self) -> str:
        """Identity of its run, by its tables or else by the folder that it lies in."""
        return str(self.tables.process.get("run") or self.path.parent.parent.name)

    @property
    def started_ns(self) -> int:
        """Wall-clock time of its first line, 0 where it is not known."""
        return integer_or_none(self.tables.process.get("unix_ns")) or 0


@dataclass(frozen=True)
class Log:
    """One run. `notes` say what is damaged or missing; `other_runs` lie in the same directory and are not in it."""

    path: Path
    run: str
    processes: tuple[Process, ...]
    notes: tuple[Note, ...]
    other_runs: tuple[str, ...]

    @property
    def world_size(self) -> int | None:
        """Ranks of the run, None where no process says."""
        sizes = [integer_or_none(process.tables.process.get("world_size")) for process in self.processes]
        return max((size for size in sizes if size), default=None)


_STEM = r"(?P<stem>rank[^.]*-\d+)"
_TABLES: Final = re.compile(_STEM + r"\.jsonl")
_SEGMENT: Final = re.compile(_STEM + r"\.(?P<part>\d+|salvaged)\.npy(?P<open>\.open)?")


def open_log(path: Path, *, recover: bool = True) -> Log:
    """The newest run below `path`: what COMMTRACE named, a run's folder in it, or a host's folder in that.

    Raises LogError where there is none, NewerLogError where it is of a later format.
    """
    path = Path(os.path.abspath(path.expanduser()))
    notes: list[Note] = []
    salvaged = recover_records(path) if recover else []
    runs = _find_runs(path, notes)
    if not runs:
        raise LogError(_nothing_in(path, notes))
    folder = max(runs, key=lambda folder: (_started(folder, runs[folder]), folder.name))
    processes: list[Process] = []
    for host in runs[folder]:
        processes += _read_host(host, notes)
    newest = _run_of(folder, processes)
    others = sorted(
        {process.run for process in processes} - {newest} | {other.name for other in runs if other != folder}
    )
    processes = sorted((p for p in processes if p.run == newest), key=lambda p: (p.rank, p.host, p.pid))
    notes = _run_notes(path, newest, others) + [Note("salvage", path, what, "") for what in salvaged] + notes
    return Log(path, newest, tuple(processes), (*notes, *_process_notes(processes)), tuple(others))


def _find_runs(path: Path, notes: list[Note]) -> dict[Path, list[Path]]:
    """Run folders at or below `path`, each with its host folders."""
    here = _list(path, [])
    if here is None:
        raise LogError(_unusable(path))
    if any(map(_is_log_file, here)):
        return {path.parent: [path]}
    runs: dict[Path, list[Path]] = {}
    for child in sorted(path / name for name in here):
        names = _list(child, notes)
        if names and any(map(_is_log_file, names)):
            runs.setdefault(path, []).append(child)
        elif names:
            hosts = [
                host
                for host in sorted(child / name for name in names)
                if any(map(_is_log_file, _list(host, notes) or ()))
            ]
            runs.update({child: hosts} if hosts else {})
    return runs


def _list(folder: Path, notes: list[Note]) -> list[str] | None:
    """Names in a folder; None where it is none, or may not be read, which becomes a note."""
    try:
        return os.listdir(folder)
    except (NotADirectoryError, FileNotFoundError):
        return None
    except OSError as error:
        notes.append(Note("unreadable", folder, error_reason(error), "what it holds is left out"))
        return None


def _is_log_file(name: str) -> bool:
    return bool(_TABLES.fullmatch(name) or _SEGMENT.fullmatch(name))


def _unusable(path: Path) -> str:
    if not os.path.lexists(path):
        return f"{path}: no such directory; give the one that COMMTRACE named"
    if not path.is_dir():
        return f"{path}: not a directory; give the one that COMMTRACE named, or the folder of a run in it"
    return f"{path}: may not be read; ask its owner for read permission"


def _nothing_in(path: Path, notes: list[Note]) -> str:
    if notes:
        why = f"{notes[0].path}: {notes[0].what}"
        return f"{path}: no log that may be read in it ({why}); ask its owner for read permission"
    deeper = next(
        (file.parent.parent.parent for file in sorted(path.glob("*/*/*/rank*")) if _is_log_file(file.name)), None
    )
    if deeper is not None:
        return f"{path}: no log in it, but in {deeper}; give that directory"
    return (
        f"{path}: no log in it; run the program with COMMTRACE={path}, a log begins with its first communication call"
    )


def _started(folder: Path, hosts: list[Path]) -> int:
    """When a run began: the wall-clock time of the first of its processes that says, else that of its folder."""
    for host in hosts:
        for name in sorted(filter(_TABLES.fullmatch, _list(host, []) or ())):
            started = _first_moment(host / name)
            if started is not None:
                return started
    return folder.stat().st_mtime_ns


def _first_moment(tables: Path) -> int | None:
    try:
        with open(tables, "rb") as file:
            return integer_or_none(json.loads(file.readline(1 << 20))["unix_ns"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _run_of(folder: Path, processes: list[Process]) -> str:
    """The run that a folder holds. Where files of others were moved into it: its namesake, or the newest."""
    runs = {process.run: process.started_ns for process in sorted(processes, key=lambda process: process.started_ns)}
    return folder.name if folder.name in runs else max(runs, key=lambda run: (runs[run], run))


def _read_host(folder: Path, notes: list[Note]) -> Iterator[Process]:
    stems: dict[str, dict[int, Path]] = {}
    for name in sorted(_list(folder, notes) or ()):
        if match := _TABLES.fullmatch(name):
            stems.setdefault(match["stem"], {})
        elif match := _SEGMENT.fullmatch(name):
            number = -1 if match["part"] == "salvaged" else int(match["part"])
            # Closed sorts before open: where a copy was made twice, the closed file holds the open one's records too.
            stems.setdefault(match["stem"], {}).setdefault(number, folder / name)
        elif name.endswith((".npy", ".npy.open")):
            notes.append(Note("foreign", folder / name, "its name is not that of a segment", "it is left out"))
    for stem, segments in stems.items():
        yield _read_process(folder, stem, segments, notes)


def _read_process(folder: Path, stem: str, files: dict[int, Path], notes: list[Note]) -> Process:
    path = folder / f"{stem}.jsonl"
    tables, found = read_tables(path)
    notes += found
    segments = []
    for _, file in sorted(files.items()):
        segment, found = inspect_segment(file)
        notes += found
        segments += [segment] if segment else []
    notes += _missing_segments(path, tables, sorted(number for number in files if number >= 0))
    match = re.fullmatch(r"rank(\d*).*-(\d+)", stem)
    rank = _first_natural(tables.process.get("rank"), match and match[1])
    pid = _first_natural(tables.process.get("pid"), match and match[2])
    return Process(path, rank, pid, str(tables.process.get("host") or folder.name), tables, tuple(segments))


def _first_natural(value: object, text: str | None) -> int:
    return value if type(value) is int and value >= 0 else int(text) if text else -1


def _missing_segments(path: Path, tables: ProcessTables, numbers: list[int]) -> Iterator[Note]:
    stats = tables.stats or {}
    if not numbers and stats.get("calls"):
        yield Note(
            "missing", path, f"no segments, though {stats['calls']} calls were counted", "nothing is known of its calls"
        )
    if numbers and numbers[0] > 0 and not stats.get("removed"):
        yield Note("missing", path, f"segments 0 to {numbers[0] - 1} are missing", "their records are missing")
    for before, after in pairwise(numbers):
        if after > before + 1:
            yield Note(
                "missing", path, f"segments {before + 1} to {after - 1} are missing", "their records are missing"
            )


def _run_notes(path: Path, run: str, others: list[str]) -> list[Note]:
    if not others:
        return []
    names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if others[3:] else "")
    what = f"holds {len(others) + 1} runs; this is the newest, {run}; not in it: {names}"
    return [Note("runs", path, what, f"to see another: commtrace report {path / others[-1]}")]


def _process_notes(processes: list[Process]) -> Iterator[Note]:
    for process, after in pairwise(processes):
        if process.rank == after.rank >= 0:
            what = f"rank {process.rank} has more than one process (process ids {process.pid} and {after.pid})"
            yield Note("process", after.path, what, "both are counted")
    sizes = {size for process in processes if (size := integer_or_none(process.tables.process.get("world_size")))}
    if len(sizes) > 1:
        what = f"its processes disagree on the number of ranks: {', '.join(map(str, sorted(sizes)))}"
        yield Note("process", processes[0].path.parent.parent, what, "the largest is taken")
