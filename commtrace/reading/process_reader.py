"""Process reader: reads the processes of a run from the files in a host's folder."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.formatting import format_plural
from commtrace.recording.recovery import final_counters, record_keys, split_kept
from commtrace.recording.ring import RingContent
from commtrace.recording.summary_files import count_calls
from commtrace.schema import WITHOUT_RECORD

from .log_notes import Note
from .segment_reader import MemorySegment, Segment, damage_notes, inspect_segment, last_records
from .summary_reader import SummaryTables
from .table_reader import ProcessTables, integer_or_none, read_tables

_FILE: Final = re.compile(
    r"(?P<stem>rank[^.]*-\d+)(?:\.jsonl|\.(?P<segment>\d+|salvaged)\.npy(?:\.open)?"
    r"|-kept(?:-(?P<dump>\d+))?\.npy(?:\.open)?|-(?P<summary>cells|steps|times)\.npy)"
)
_ALWAYS_VISITED: Final = 1000
"""Number of steps that are always visited, however few records there are."""
_RECOVERED: Final = 1 << 62
"""Segment number of recovered records, which are the newest of a process."""
_LAST: Final = 0
"""Dump number of the records that a process kept last."""


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    path: Path
    """Its tables file, which may be missing."""
    tables: ProcessTables
    segments: tuple[Segment, ...]
    live_at_ns: int = 0
    """Monotonic time at which the memory of the live process was read; 0: it was not found running."""
    summary: SummaryTables | None = None
    """Its summary, with COMMTRACE_MODE=summary; segments have the calls that are not in it."""
    dumps: tuple[Segment, ...] = ()
    """The records that it kept earlier, at hangs and on request."""
    kept: Segment | None = None
    """Its last records, including steps that were not recorded; for stuck calls only, as segments may have them too."""

    @cached_property
    def rank(self) -> int:
        """Its rank; -1 where neither its tables nor its file names have it."""
        return self._number("rank", r"rank(\d+)")

    @cached_property
    def pid(self) -> int:
        """Its process id; -1 where neither its tables nor its file names have it."""
        return self._number("pid", r".*-(\d+)$")

    def _number(self, name: str, file_name_pattern: str) -> int:
        match = re.match(file_name_pattern, self.path.stem)
        values = (self.tables.process.get(name), int(match[1]) if match else -1)
        return next((value for value in values if type(value) is int and 0 <= value < 1 << 31), -1)

    @property
    def host(self) -> str:
        """Name of its host: from its tables, else from the host's folder."""
        return str(self.tables.process.get("host") or self.path.parent.name)

    @property
    def run(self) -> str:
        """Identity of its run: from its tables, else from the run's folder."""
        return str(self.tables.process.get("run") or self.path.parent.parent.name)

    @property
    def started_ns(self) -> int:
        """Wall-clock time of the first line of its tables in ns since 1970; 0 where not known."""
        return integer_or_none(self.tables.process.get("unix_ns")) or 0

    @property
    def lost_records(self) -> int:
        """Number of calls without a usable record: not recorded, or damaged in what was read."""
        return self._unrecorded_calls + self._damaged_records

    @property
    def losses(self) -> str:
        """Losses as text, such as "124 of 152 calls were not recorded, hooks failed 124 times"; "": none."""
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
        """Number of oldest records that were removed to keep the log below its size limit."""
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
        """Yield notes on the records that were read so far."""
        yield from damage_notes(self.path, self.segments)
        if problem := self.steps_problem(max((segment.last_step for segment in self.segments), default=-1)):
            yield Note("process", self.path, problem, "they are not compared with others")

    @property
    def summary_problem(self) -> str:
        """Which steps are not compared because the summary has only sums of their calls, and a hint; "": none."""
        spans = None if self.summary is None else self.summary.summed_steps
        if spans is None or not len(spans):
            return ""
        steps = f"steps {spans[:, 0].min():,} to {spans[:, 1].max():,}"
        return f"some of {steps} are in the summary as sums only; to compare them, record with COMMTRACE_MODE=events"

    def steps_problem(self, last_step: int) -> str | None:
        """Return why the steps up to `last_step` are not compared; None if they are.

        Beyond _ALWAYS_VISITED, there must be as many calls as steps, which bounds the work of visiting every step.
        """
        calls = self._unrecorded_calls + self.not_selected + sum(segment.count for segment in self.segments)
        calls += self._counter("summarized")
        if last_step < max(calls, _ALWAYS_VISITED):
            return None
        text = f"its records go up to step {last_step:,}, but the number of calls is only {calls:,}"
        return f"{text}: steps have no records, or are damaged"


def is_tables_file(name: str) -> bool:
    """Return whether this is the name of a file with the tables of a process."""
    return name.endswith(".jsonl") and _FILE.fullmatch(name) is not None


def is_log_file(name: str) -> bool:
    """Return whether this is the name of a file with tables or records of a process."""
    match = _FILE.fullmatch(name)
    return is_tables_file(name) or (match is not None and match["segment"] is not None)


@dataclass
class _ProcessFiles:
    """The files of one process by number; `is_process`: there are tables or segments."""

    segments: dict[int, Path] = field(default_factory=dict)
    kept: dict[int, Path] = field(default_factory=dict)
    is_process: bool = False
    is_summary: bool = False

    def add(self, path: Path, match: re.Match[str]) -> None:
        """Add a file. Of a closed and an open copy, use the closed one, which sorts first: it has all records."""
        self.is_process |= is_log_file(path.name)
        self.is_summary |= match["summary"] is not None
        if number := match["segment"]:
            self.segments.setdefault(_RECOVERED if number == "salvaged" else int(number), path)
        elif "-kept" in path.name.removeprefix(match["stem"]):
            self.kept.setdefault(int(match["dump"] or _LAST), path)


def read_host(
    folder: Path, names: Iterable[str], rings: Mapping[Path, RingContent], notes: list[Note]
) -> Iterator[Process]:
    """Yield the processes that have files in the folder of a host. Add notes on the files.

    Args:
        folder: The folder.
        names: The names of the files in it, and of tables that are only in `rings`.
        rings: Rings of processes, by the path of their tables.
        notes: The list to which notes are added.
    """
    by_stem: dict[str, _ProcessFiles] = defaultdict(_ProcessFiles)
    for name in sorted(names):
        if match := _FILE.fullmatch(name):
            by_stem[match["stem"]].add(folder / name, match)
        elif name.endswith((".npy", ".npy.open")):
            notes.append(Note("foreign", folder / name, "not named like a segment", "it is left out"))
    for stem, files in by_stem.items():
        if files.is_process:
            ring = rings.get(Path(os.path.realpath(folder)) / f"{stem}.jsonl") if rings else None
            yield _read_process(folder, stem, files, ring, notes)


def _read_process(
    folder: Path, stem: str, files: _ProcessFiles, ring: RingContent | None, notes: list[Note]
) -> Process:
    path = folder / f"{stem}.jsonl"
    tables, table_notes = read_tables(path, b"" if ring is None else ring.tables)
    notes += table_notes
    if tables.salvage:  # a recovery has moved the ring's content to the log since it was copied
        ring = None
    segments = [*_inspect_segments(files.segments, notes).values()]
    notes += _missing_segments(path, tables, sorted(files.segments))
    dumps = _inspect_segments(files.kept, notes, "its calls are kept besides the log, and not counted")
    kept, snapshot = dumps.pop(_LAST, None), None
    is_summary = files.is_summary or (ring is not None and ring.identity.get("mode") == "summary")
    left_out = 0
    if ring is not None:
        # Without a snapshot, a dead process has written all rows.
        snapshot = ring.snapshot if is_summary and (ring.is_alive or ring.snapshot.calls) else None
        records, kept_records, left_out = split_kept(ring)
        segments.append(_memory_segment(path, segments, ring._replace(records=records)))
        if len(kept_records):
            kept = MemorySegment(path, 0, len(kept_records), records=kept_records)
    summary = SummaryTables(folder, stem, snapshot) if is_summary else None
    if ring is not None and ring.is_alive:
        tables.stats = {**(tables.stats or {}), **ring.counters}
    elif ring is not None:
        summarized = 0 if summary is None else count_calls(summary.table("cells"), summary.table("steps"))
        notes.append(_complete_tables(path, tables, ring, segments, left_out, summarized))
    return Process(
        path, tables, tuple(segments), live_at_ns=ring.alive_ns if ring is not None and ring.is_alive else 0,
        summary=summary, dumps=tuple(dumps.values()), kept=kept,
    )  # fmt: skip


def _complete_tables(
    path: Path, tables: ProcessTables, ring: RingContent, segments: Sequence[Segment], left_out: int, summarized: int
) -> Note:
    """Add the rows to the tables of a killed process that a recovery of its ring would write. Return a note."""
    on_disk = sum(segment.count for segment in segments)
    tables.stats = final_counters(ring, on_disk=on_disk, left_out=left_out, summarized=summarized)
    in_memory, host = segments[-1].count, ring.identity["host"]
    tables.salvage.append({"records": in_memory, "host": host})
    text = f"{path.stem} on {host}: {in_memory} records of a process that ended early are only in shared memory"
    return Note("salvage", path, text, "`commtrace recover` moves them to the log")


def _inspect_segments(files: Mapping[int, Path], notes: list[Note], consequence: str = "") -> dict[int, Segment]:
    """Return the segments in files by number, ascending. Add notes on the files, with `consequence` if it is given."""
    segments = {}
    for number, path in sorted(files.items()):
        segment, file_notes = inspect_segment(path)
        notes += (replace(note, consequence=consequence or note.consequence) for note in file_notes)
        if segment is not None:
            segments[number] = segment
    return segments


def _memory_segment(path: Path, segments: list[Segment], ring: RingContent) -> Segment:
    """Return the records of a ring that are not in its process's files. Those just written are in both."""
    written = [block for segment in last_records(segments, ring.capacity) for block in segment.blocks()]
    on_disk = np.isin(record_keys(ring.records), record_keys(np.concatenate([ring.records[:0], *written])))
    records = ring.records[~on_disk]
    return MemorySegment(path, 0, len(records), records=records)


def _missing_segments(path: Path, tables: ProcessTables, numbers: list[int]) -> Iterator[Note]:
    """Yield a note for each gap in the segment numbers of a process, which may include `_RECOVERED`."""
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
