"""Log reader: finds the runs below a directory, and reads tables and segments of one. numpy and standard library only.

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
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.errors import LogError
from commtrace.formatting import format_plural
from commtrace.recording.recovery import copy_living_rings, record_keys, recover_records, split_kept
from commtrace.recording.ring import RingCopy
from commtrace.schema import RECORD, WITHOUT_RECORD

from .log_notes import Note, error_reason
from .packed_log import PROCESSES, PackedRun
from .segment_reader import MemorySegment, Segment, damage_notes, inspect_segment, last_records
from .summary_reader import SummaryTables
from .table_reader import ProcessTables, integer_or_none, parse_tables, read_tables


@dataclass(frozen=True)
class Process:
    """One process of a run. `rank` and `pid` are -1 where neither its tables nor its file names hold them."""

    path: Path
    """Its tables file, which may be missing."""
    rank: int
    pid: int
    host: str
    tables: ProcessTables
    segments: tuple[Segment, ...]
    seen_alive_ns: int = 0
    """Monotonic time at which the process was running and its memory was read; 0: it was not found running."""
    summary: SummaryTables | None = None
    """Its calls as cells, with COMMTRACE_MODE=summary; segments have the records that are not in there."""
    dumps: tuple[Segment, ...] = ()
    """The records that it kept at earlier moments: at hangs, and when somebody asked for them."""
    kept: Segment | None = None
    """Its last records, also of steps that were not recorded: for stuck calls; others would count records twice."""

    @property
    def run(self) -> str:
        """Identity of its run: from its tables, else the name of the run's folder."""
        return str(self.tables.process.get("run") or self.path.parent.parent.name)

    @property
    def started_ns(self) -> int:
        """Wall-clock time of the first line of its tables in ns since 1970; 0 where not known."""
        return integer_or_none(self.tables.process.get("unix_ns")) or 0

    @property
    def lost_records(self) -> int:
        """Number of calls that have no usable record: counted as lost by the recorder, or damaged in what was read."""
        return self._unrecorded_calls + self._damaged_records

    @property
    def losses(self) -> str:
        """What recording lost, as text: "124 of 152 calls were not recorded, hooks failed 124 times"; "" if nothing."""
        lost, errors = self._unrecorded_calls - self.removed, self._counter("hook_errors")
        counts = (
            (f"{lost:,}", "not recorded"),
            (f"the first {self.removed:,}", "removed to keep the log below its limit"),
        )
        texts = [
            f"{which} of {format_plural(self._counter('calls'), 'call')} were {what}"
            for (which, what), number in zip(counts, (lost, self.removed), strict=True)
            if number
        ]
        damaged = [f"{format_plural(self._damaged_records, 'record')} damaged"] if self._damaged_records else []
        return ", ".join(texts + damaged + [f"hooks failed {format_plural(errors, 'time')}"] * bool(errors))

    @property
    def not_selected(self) -> int:
        """Number of calls of steps that COMMTRACE_STEPS does not select."""
        return self._counter("not_selected")

    @property
    def removed(self) -> int:
        """Number of records that were removed to keep the log below its size limit, the first ones."""
        return self._counter("removed")

    @property
    def _unrecorded_calls(self) -> int:
        return sum(map(self._counter, WITHOUT_RECORD))

    @property
    def _damaged_records(self) -> int:
        return sum(sum(segment.damaged.values()) for segment in self.segments)

    def _counter(self, name: str) -> int:
        return integer_or_none((self.tables.stats or {}).get(name)) or 0

    def record_notes(self) -> Iterator[Note]:
        """Yield notes on the records, as far as they were read."""
        yield from damage_notes(self.path, self.segments)
        if problem := self.steps_problem(max((segment.last_step for segment in self.segments), default=-1)):
            yield Note("process", self.path, problem, "they are not compared with others")

    @property
    def summary_problem(self) -> str:
        """Which steps are not compared because a summary has sums of their calls, and what to do; "": none."""
        spans = None if self.summary is None else self.summary.summed_steps
        if spans is None or not len(spans):
            return ""
        steps = f"steps {spans[:, 0].min():,} to {spans[:, 1].max():,}"
        return f"some of {steps} are in the summary as sums only; to compare them, record with COMMTRACE_MODE=events"

    def steps_problem(self, last_step: int) -> str | None:
        """Return why steps up to this one are not compared; None if there is a call for each of them.

        Work that visits every step, also those without a record, is so bounded by the number of records.
        """
        calls = self._unrecorded_calls + self.not_selected + sum(segment.count for segment in self.segments)
        calls += self._counter("summarized")
        if last_step < max(calls, _ALWAYS_VISITED):
            return None
        return f"its records lead to step {last_step:,}, but are only {calls:,}: steps have no records, or are damaged"


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


_STEM = r"(?P<stem>rank[^.]*-\d+)"
_TABLES: Final = re.compile(_STEM + r"\.jsonl")
_SEGMENT: Final = re.compile(_STEM + r"\.(?P<number>\d+|salvaged)\.npy(?P<open>\.open)?")
_SUMMARY: Final = re.compile(_STEM + r"-(cells|steps|times)\.npy")
_KEPT: Final = re.compile(_STEM + r"-kept(-(?P<number>\d+))?\.npy(\.open)?")
_ALWAYS_VISITED: Final = 1000
"""Steps that are visited however few records there are."""
_RECOVERED: Final = 1 << 62
"""Number of the segment of recovered records among those of a process: they are its newest."""


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
        texts = recover_records(self.path) if recover else ()
        self.recovered = [Note("salvage", self.path, text, "") for text in texts]
        self.notes: list[Note] = []
        self.folders = [RunFolder(*run) for run in _find_runs(self.path, self.notes).items()]
        if not self.folders:
            raise LogError(_describe_no_log(self.path, self.notes))
        # Before the files are looked at: a record that leaves the memory from now on is in them.
        self._living = copy_living_rings(self.path)

    def read(self, folder: RunFolder) -> tuple[str, list[Process], list[Note]]:
        """Return the newest run that has files in a folder, the processes of all runs in it, and notes on the files."""
        notes = [*self.notes]
        processes = sorted(folder.processes(self._living, notes), key=lambda p: (p.rank, p.host, p.pid))
        # A folder may hold files of several runs, where files were moved: take its namesake, or the newest.
        started = {process.run: process.started_ns for process in sorted(processes, key=lambda p: p.started_ns)}
        newest = folder.name if folder.name in started else max(started, key=lambda run: (started[run], run))
        return newest, processes, notes


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. A packed one has no folders of hosts."""

    path: Path
    hosts: list[Path]

    @cached_property
    def _packed(self) -> PackedRun | None:
        return None if self.hosts else PackedRun(self.path)

    @property
    def name(self) -> str:
        """Name of the folder in the log."""
        return self._packed.name if self._packed else self.path.name

    @cached_property
    def started_ns(self) -> int:
        """Wall-clock time when the run began, in ns."""
        return self._packed.started_ns if self._packed else _start_time(self.path, self.hosts)

    @property
    def is_packed(self) -> bool:
        """Whether this is a run of a packed log."""
        return self._packed is not None

    def processes(self, living: Mapping[Path, RingCopy], notes: list[Note]) -> Iterator[Process]:
        """Yield the processes that have files in the folder. Adds notes on the files."""
        for host in self.hosts:
            yield from _read_host(host, living, notes)
        if self._packed:
            notes += self._packed.notes
            for packed in self._packed.processes(notes):
                tables = ProcessTables() if packed.tables is None else parse_tables(packed.path, packed.tables)[0]
                yield _process(packed.path, tables, packed.segments)


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
    packed = folder.path if folder.is_packed else None
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


def _find_runs(path: Path, notes: list[Note]) -> dict[Path, list[Path]]:
    """Return the run folders at or below `path`, each with its host folders; a packed run has none."""
    names = _list_folder(path, [])
    if names is None:
        if path.is_dir():
            raise LogError(f"{path}: may not be read; ask its owner for read permission")
        what = "not a directory" if os.path.lexists(path) else "no such directory"
        hint = "pass the directory that COMMTRACE was set to, or the folder of a run in it"
        raise LogError(f"{path}: {what}; {hint}; `commtrace doctor` shows which calls create it")
    if PROCESSES in names:
        return {path: []}
    if any(map(_is_log_file, names)):
        return {path.parent: [path]}
    runs: dict[Path, list[Path]] = {}
    for child in sorted(path / name for name in names):
        names = _list_folder(child, notes) or []
        if PROCESSES in names:
            runs[child] = []
            continue
        if any(map(_is_log_file, names)):
            runs.setdefault(path, []).append(child)
            continue
        for host in sorted(child / name for name in names):
            if any(map(_is_log_file, _list_folder(host, notes) or ())):
                runs.setdefault(child, []).append(host)
    return runs


def _list_folder(folder: Path, notes: list[Note]) -> list[str] | None:
    """Return the names in a folder; None where it is no folder, or cannot be read, which adds a note."""
    try:
        return os.listdir(folder)
    except (NotADirectoryError, FileNotFoundError):
        return None
    except OSError as error:
        notes.append(Note("unreadable", folder, error_reason(error), "its files are left out"))
        return None


def _is_log_file(name: str) -> bool:
    return bool(_TABLES.fullmatch(name) or _SEGMENT.fullmatch(name))


def _describe_no_log(path: Path, notes: list[Note]) -> str:
    if notes:
        return f"{path}: no readable log in it ({notes[0].path}: {notes[0].what}); ask its owner for read permission"
    for file in sorted(path.glob("*/*/*/rank*")):
        if _is_log_file(file.name):
            return f"{path}: no log in it, but in {file.parent.parent.parent}; give that directory"
    hint = f"run the program with COMMTRACE={path}; its first communication call creates the log"
    return f"{path}: no log in it; {hint}; `commtrace doctor` shows which calls are recorded"


def _start_time(folder: Path, hosts: list[Path]) -> int:
    """Return the wall-clock time when a run began, in ns: of the first process that recorded it, else of the folder."""
    for host in hosts:
        for name in sorted(filter(_TABLES.fullmatch, _list_folder(host, []) or ())):
            with suppress(OSError, KeyError, TypeError, ValueError, RecursionError), open(host / name, "rb") as file:
                started = json.loads(file.readline(1 << 20))["unix_ns"]
                if type(started) is int:
                    return started
    return folder.stat().st_mtime_ns


def _read_host(folder: Path, living: Mapping[Path, RingCopy], notes: list[Note]) -> Iterator[Process]:
    stems: dict[str, dict[int, Path]] = {}
    kept: dict[str, dict[str, Path]] = defaultdict(dict)
    summaries: set[str] = set()
    for name in sorted(_list_folder(folder, notes) or ()):
        if match := _TABLES.fullmatch(name):
            stems.setdefault(match["stem"], {})
        elif match := _SEGMENT.fullmatch(name):
            number = _RECOVERED if match["number"] == "salvaged" else int(match["number"])
            # Closed sorts before open: where a copy was made twice, the closed file holds the open one's records too.
            stems.setdefault(match["stem"], {}).setdefault(number, folder / name)
        elif match := _KEPT.fullmatch(name):
            kept[match["stem"]].setdefault(match["number"] or "", folder / name)
        elif match := _SUMMARY.fullmatch(name):
            summaries.add(match["stem"])
        elif name.endswith((".npy", ".npy.open")):
            notes.append(Note("foreign", folder / name, "its name is not that of a segment", "it is left out"))
    for stem, segments in stems.items():
        copy = living.get(Path(os.path.realpath(folder)) / f"{stem}.jsonl") if living else None
        last = kept[stem].pop("", None)
        process = _read_process(folder, stem, segments, last, copy, notes)
        dumps = [_inspect_kept(path) for path in kept[stem].values()]
        notes += (note for _, of_dump in dumps for note in of_dump)
        process = replace(process, dumps=tuple(segment for segment, _ in dumps if segment))
        snapshot = None if copy is None or copy.identity.get("mode") != "summary" else copy.snapshot
        is_summary = stem in summaries or snapshot is not None
        yield replace(process, summary=SummaryTables(folder, stem, snapshot)) if is_summary else process


def _read_process(
    folder: Path, stem: str, files: dict[int, Path], kept: Path | None, living: RingCopy | None, notes: list[Note]
) -> Process:
    path = folder / f"{stem}.jsonl"
    tables, table_notes = read_tables(path, b"" if living is None else living.tables)
    notes += table_notes
    segments: list[Segment] = []
    for _, file in sorted(files.items()):
        segment, segment_notes = inspect_segment(file)
        notes += segment_notes
        segments += [segment] if segment else []
    notes += _missing_segments(path, tables, sorted(files))
    kept_segment, kept_notes = (None, []) if kept is None else _inspect_kept(kept)
    notes += kept_notes
    if living is not None:
        records, kept_records, _ = split_kept(living, living.snapshot)
        segments.append(_in_memory(path, segments, living._replace(records=records)))
        if len(kept_records):
            kept_segment = MemorySegment(path, 0, len(kept_records), records=kept_records)
        tables.stats = {**(tables.stats or {}), **living.counters}
    return replace(_process(path, tables, segments, 0 if living is None else living.seen_ns), kept=kept_segment)


def _inspect_kept(path: Path) -> tuple[Segment | None, list[Note]]:
    segment, notes = inspect_segment(path)
    consequence = "its calls are kept besides the log, and not counted"
    return segment, [replace(note, consequence=consequence) for note in notes]


def _process(path: Path, tables: ProcessTables, segments: Sequence[Segment], seen_ns: int = 0) -> Process:
    match = re.fullmatch(r"rank(\d*).*-(\d+)", path.stem)
    rank = _first_natural(tables.process.get("rank"), match and match[1])
    pid = _first_natural(tables.process.get("pid"), match and match[2])
    host = str(tables.process.get("host") or path.parent.name)
    return Process(path, rank, pid, host, tables, tuple(segments), seen_ns)


def _in_memory(path: Path, segments: list[Segment], living: RingCopy) -> Segment:
    """Return the records of a living process that are not in its files; those just written are in both."""
    written = [block for part in last_records(segments, living.capacity) for block in part.blocks()]
    on_disk = np.isin(record_keys(living.records), record_keys(np.concatenate([living.records[:0], *written])))
    records = living.records[~on_disk]
    return MemorySegment(path, 0, len(records), records=records)


def _first_natural(value: object, text: str | None) -> int:
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    return int(text) if text and int(text) < 1 << 31 else -1


def _missing_segments(path: Path, tables: ProcessTables, numbers: list[int]) -> Iterator[Note]:
    """Yield a note for each gap in the numbers of a process's segments, `_RECOVERED` among them."""
    stats = tables.stats or {}
    counted = [integer_or_none(stats.get(name)) or 0 for name in ("calls", "not_selected", "summarized")]
    if not numbers and 2 * counted[0] > sum(counted):
        text = f"no segments, though {2 * counted[0] - sum(counted)} calls were counted"
        yield Note("missing", path, text, "nothing is known of its calls")
    numbers = [number for number in numbers if number != _RECOVERED]
    if numbers and numbers[0] > 0 and not stats.get("removed"):
        yield Note("missing", path, f"segments 0 to {numbers[0] - 1} are missing", "their records are missing")
    for before, after in pairwise(numbers):
        if after > before + 1:
            text = f"segments {before + 1} to {after - 1} are missing"
            yield Note("missing", path, text, "their records are missing")


def _process_notes(processes: list[Process]) -> Iterator[Note]:
    for process, after in pairwise(processes):
        if process.rank == after.rank >= 0:
            text = f"rank {process.rank} has more than one process (process ids {process.pid} and {after.pid})"
            yield Note("process", after.path, text, "both are counted")
    sizes = {size for process in processes if (size := integer_or_none(process.tables.process.get("world_size")))}
    if len(sizes) > 1:
        text = f"its processes disagree on the number of ranks: {', '.join(map(str, sorted(sizes)))}"
        yield Note("process", processes[0].path.parent.parent, text, "the largest is taken")
