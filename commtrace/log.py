"""Read a log from disk: runs, processes, tables and segments. numpy and the standard library only.

    log = open_log(Path("logs/run1"))
    for process in log.processes:                # Process(rank=3, pid=4711, host="node17", ...)
        for segment in process.segments:
            for records in segment.blocks():     # arrays of schema.RECORD; logs may be larger than memory
                ...

What is damaged is left out and named in `log.notes`; everything else is read. `docs/log-format.md` is the format.
"""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from commtrace.errors import LogError, NewerLogError
from commtrace.salvage import salvage
from commtrace.schema import FORMAT, RECORD, VERSION, State

Records: TypeAlias = npt.NDArray[np.void]
Row: TypeAlias = dict[str, Any]

BLOCK: Final = 1 << 18
"""Records read at once: 24 MiB."""

NoteKind = Literal["runs", "version", "cut", "foreign", "unreadable", "garbled", "missing", "process", "salvage"]


@dataclass(frozen=True)
class Note:
    """Something about the log that the user should know: what was found at `path`, and what follows from it."""

    kind: NoteKind
    path: Path
    what: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; {self.consequence}" if self.consequence else "")


# --- segments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """One file of records, as it was when the log was opened. A live process may add to it; that is not read."""

    path: Path
    offset: int
    """Bytes of the header."""
    count: int
    """Whole records in the file, empty ones included."""

    def blocks(self, size: int = BLOCK) -> Iterator[Records]:
        """The records, at most `size` at a time. Slots that were never filled are left out.

        Files are read and not mapped: a mapped page of a vanished file would kill this process. What cannot be read
        any more (a live process removes its oldest segment) is missing from the sum, where coverage finds it.
        """
        try:
            with self._open() as file:
                file.seek(self.offset)
                for begin in range(0, self.count, size):
                    data = file.read(min(size, self.count - begin) * RECORD.itemsize)
                    records = np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
                    yield records[records["state"] != State.FREE]
        except OSError:
            return

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except FileNotFoundError:  # closed, and thereby renamed, since the log was opened; the header keeps its size
            return open(self.path.with_suffix(""), "rb")


class _CutError(ValueError):
    """The header of a segment does not end."""


def _inspect_segment(path: Path) -> tuple[Segment | None, list[Note]]:
    """Where the records of a file lie. Reads the header only."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            promised = _read_header(file)
            offset = file.tell()
    except OSError as error:
        return None, [Note("unreadable", path, _reason(error), "its records are left out")]
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


# --- tables -------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A row of the kinds table: what a call is."""

    op: str
    variant: str
    api: str
    dtype: str
    reduce_op: str


@dataclass(frozen=True)
class Group:
    """A group, known in the whole run by these three: its ranks in ascending order, its name, and its index."""

    ranks: tuple[int, ...]
    name: str
    index: int


class Site(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


@dataclass
class Tables:
    """The tables of one process; the last row of an id counts."""

    process: Row = field(default_factory=dict)
    kinds: dict[int, Kind] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    sites: dict[int, Site] = field(default_factory=dict)
    jobs: dict[int, Row] = field(default_factory=dict)
    clock: list[Row] = field(default_factory=list)
    stats: Row | None = None
    end: Row | None = None
    salvage: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Take a row in. Raises KeyError, TypeError or ValueError where it lacks what it needs."""
        name = row.pop("table")
        if name in ("clock", "salvage"):
            getattr(self, name).append(row)
        elif name in ("process", "stats", "end"):
            setattr(self, name, row)
        elif name == "job":
            self.jobs[_natural(row.get("id", 0))] = row
        elif name in _ROWS:
            key, read = _ROWS[name]
            getattr(self, name)[_natural(row[key])] = read(row)


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ValueError(value)
    return value


def _group(row: Row) -> Group:
    return Group(
        tuple(sorted(_natural(rank) for rank in row["ranks"])), str(row.get("name") or ""), int(row.get("index") or 0)
    )


# Tables of numbered rows: the key that holds the number, and how a row is read.
_ROWS: Final[dict[str, tuple[str, Callable[[Row], object]]]] = {
    "kinds": ("id", lambda row: Kind(str(row["op"]), *(str(row.get(name) or "") for name in Kind._fields[1:]))),
    "groups": ("id", _group),
    "roles": ("group", lambda row: str(row["role"])),
    "sites": ("id", lambda row: Site(str(row["file"]), int(row.get("line") or 0), str(row.get("function") or ""))),
}


def _read_tables(path: Path) -> tuple[Tables, list[Note]]:
    """Tables of one process. Lines that cannot be read are counted and left out."""
    tables = Tables()
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return tables, [Note("missing", path, "missing", "operations, groups and sites of its records are unknown")]
    except OSError as error:
        return tables, [
            Note("unreadable", path, _reason(error), "operations, groups and sites of its records are unknown")
        ]
    broken = [number for number, line in enumerate(lines, 1) if line.strip() and not _read_line(tables, line, path)]
    if not broken:
        return tables, []
    if broken == [len(lines)]:
        return tables, [Note("cut", path, "its last line is cut", "that line is left out")]
    what = (
        f"{len(broken)} lines cannot be read, the first is line {broken[0]}"
        if broken[1:]
        else f"line {broken[0]} cannot be read"
    )
    return tables, [
        Note("garbled", path, what, "what they described is unknown" if broken[1:] else "what it described is unknown")
    ]


def _read_line(tables: Tables, line: bytes, path: Path) -> bool:
    try:
        row = json.loads(line)
        if row["table"] == "process":
            _check_process(row, path)
        tables.add(row)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return False
    return True


def _check_process(row: Row, path: Path) -> None:
    if row["format"] != FORMAT:
        raise ValueError(row["format"])
    if _natural(row["version"]) > VERSION:
        raise NewerLogError(
            f"{path}: its format is version {row['version']}, this commtrace reads up to {VERSION}; upgrade commtrace"
        )


# --- processes and runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """One process of a run. `rank` and `pid` are -1 where neither its tables nor its file names tell."""

    path: Path
    """Its tables file, which may be missing."""
    rank: int
    pid: int
    host: str
    tables: Tables
    segments: tuple[Segment, ...]

    @property
    def run(self) -> str:
        """Identity of its run, by its tables or else by the folder that it lies in."""
        return str(self.tables.process.get("run") or self.path.parent.parent.name)

    @property
    def started_ns(self) -> int:
        """Wall-clock time of its first line, 0 where it is not known."""
        return whole(self.tables.process.get("unix_ns")) or 0


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
        sizes = [whole(process.tables.process.get("world_size")) for process in self.processes]
        return max((size for size in sizes if size), default=None)


def whole(value: object) -> int | None:
    """The value if it is a whole number, else None: a garbled table may hold anything."""
    return value if type(value) is int else None


_STEM = r"(?P<stem>rank[^.]*-\d+)"
_TABLES: Final = re.compile(_STEM + r"\.jsonl")
_SEGMENT: Final = re.compile(_STEM + r"\.(?P<part>\d+|salvaged)\.npy(?P<open>\.open)?")


def open_log(path: Path) -> Log:
    """The newest run below `path`: what COMMTRACE named, a run's folder in it, or a host's folder in that.

    Raises LogError where there is none, NewerLogError where it is of a later format.
    """
    path = Path(os.path.abspath(path.expanduser()))
    notes: list[Note] = []
    salvaged = salvage(path)
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
        notes.append(Note("unreadable", folder, _reason(error), "what it holds is left out"))
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
            return whole(json.loads(file.readline(1 << 20))["unix_ns"])
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
    tables, found = _read_tables(path)
    notes += found
    segments = []
    for _, file in sorted(files.items()):
        segment, found = _inspect_segment(file)
        notes += found
        segments += [segment] if segment else []
    notes += _missing_segments(path, tables, sorted(number for number in files if number >= 0))
    match = re.fullmatch(r"rank(\d*).*-(\d+)", stem)
    rank = _first_natural(tables.process.get("rank"), match and match[1])
    pid = _first_natural(tables.process.get("pid"), match and match[2])
    return Process(path, rank, pid, str(tables.process.get("host") or folder.name), tables, tuple(segments))


def _first_natural(value: object, text: str | None) -> int:
    return value if type(value) is int and value >= 0 else int(text) if text else -1


def _missing_segments(path: Path, tables: Tables, numbers: list[int]) -> Iterator[Note]:
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
    sizes = {size for process in processes if (size := whole(process.tables.process.get("world_size")))}
    if len(sizes) > 1:
        what = f"its processes disagree on the number of ranks: {', '.join(map(str, sorted(sizes)))}"
        yield Note("process", processes[0].path.parent.parent, what, "the largest is taken")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error) or type(error).__name__).lower()
