"""Process reader: the processes of a run, from the files in the folder of a host."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.formatting import format_plural
from commtrace.recording.recovery import record_keys, split_kept
from commtrace.recording.ring import RingContent
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
"""Steps that are visited however few records there are."""
_RECOVERED: Final = 1 << 62
"""Number of the segment of recovered records among those of a process: they are its newest."""
_LAST: Final = 0
"""Number of the last records that were kept, among the dumps of a process."""


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    path: Path
    """Its tables file, which may be missing."""
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

    @cached_property
    def rank(self) -> int:
        """Its rank; -1 where neither its tables nor its file names hold it."""
        return self._number("rank", r"rank(\d+)")

    @cached_property
    def pid(self) -> int:
        """Its process id; -1 where neither its tables nor its file names hold it."""
        return self._number("pid", r".*-(\d+)$")

    def _number(self, name: str, in_file_name: str) -> int:
        match = re.match(in_file_name, self.path.stem)
        values = (self.tables.process.get(name), int(match[1]) if match else -1)
        return next((value for value in values if type(value) is int and 0 <= value < 1 << 31), -1)

    @property
    def host(self) -> str:
        """Name of its host: from its tables, else of the host's folder."""
        return str(self.tables.process.get("host") or self.path.parent.name)

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


def is_tables_file(name: str) -> bool:
    """Return whether a file has this name because it holds tables of a process."""
    return name.endswith(".jsonl") and _FILE.fullmatch(name) is not None


def is_log_file(name: str) -> bool:
    """Return whether a file has this name because it holds tables or records of a process."""
    match = _FILE.fullmatch(name)
    return is_tables_file(name) or (match is not None and match["segment"] is not None)


@dataclass
class _ProcessFiles:
    """The files of one process by number; none of a process with neither tables nor segments."""

    segments: dict[int, Path] = field(default_factory=dict)
    kept: dict[int, Path] = field(default_factory=dict)
    is_process: bool = False
    is_summary: bool = False

    def add(self, path: Path, match: re.Match[str]) -> None:
        """Add a file. Closed sorts before open: where a copy was made twice, the closed one has all records."""
        self.is_process |= is_log_file(path.name)
        self.is_summary |= match["summary"] is not None
        if number := match["segment"]:
            self.segments.setdefault(_RECOVERED if number == "salvaged" else int(number), path)
        elif "-kept" in path.name.removeprefix(match["stem"]):
            self.kept.setdefault(int(match["dump"] or _LAST), path)


def read_host(
    folder: Path, names: Iterable[str], living: Mapping[Path, RingContent], notes: list[Note]
) -> Iterator[Process]:
    """Yield the processes that have files in the folder of a host. Adds notes on the files.

    Args:
        folder: The folder.
        names: The names of the files in it.
        living: What living processes have in memory, by the path of their tables.
        notes: Are added to.
    """
    by_stem: dict[str, _ProcessFiles] = defaultdict(_ProcessFiles)
    for name in sorted(names):
        if match := _FILE.fullmatch(name):
            by_stem[match["stem"]].add(folder / name, match)
        elif name.endswith((".npy", ".npy.open")):
            notes.append(Note("foreign", folder / name, "its name is not that of a segment", "it is left out"))
    for stem, files in by_stem.items():
        if files.is_process:
            in_memory = living.get(Path(os.path.realpath(folder)) / f"{stem}.jsonl") if living else None
            yield _read_process(folder, stem, files, in_memory, notes)


def _read_process(
    folder: Path, stem: str, files: _ProcessFiles, living: RingContent | None, notes: list[Note]
) -> Process:
    path = folder / f"{stem}.jsonl"
    tables, table_notes = read_tables(path, b"" if living is None else living.tables)
    notes += table_notes
    segments = [*_inspected(files.segments, notes).values()]
    notes += _missing_segments(path, tables, sorted(files.segments))
    dumps = _inspected(files.kept, notes, "its calls are kept besides the log, and not counted")
    kept, snapshot = dumps.pop(_LAST, None), None
    if living is not None:
        snapshot = living.snapshot if living.identity.get("mode") == "summary" else None
        records, kept_records, _ = split_kept(living)
        segments.append(_in_memory(path, segments, living._replace(records=records)))
        if len(kept_records):
            kept = MemorySegment(path, 0, len(kept_records), records=kept_records)
        tables.stats = {**(tables.stats or {}), **living.counters}
    is_summary = files.is_summary or snapshot is not None
    return Process(
        path, tables, tuple(segments), seen_alive_ns=0 if living is None else living.alive_ns,
        summary=SummaryTables(folder, stem, snapshot) if is_summary else None, dumps=tuple(dumps.values()), kept=kept,
    )  # fmt: skip


def _inspected(files: Mapping[int, Path], notes: list[Note], consequence: str = "") -> dict[int, Segment]:
    """Return the segments in files by number, ascending. Adds notes on the files, with a consequence if it is given."""
    segments = {}
    for number, path in sorted(files.items()):
        segment, of_file = inspect_segment(path)
        notes += (replace(note, consequence=consequence or note.consequence) for note in of_file)
        if segment is not None:
            segments[number] = segment
    return segments


def _in_memory(path: Path, segments: list[Segment], living: RingContent) -> Segment:
    """Return the records of a living process that are not in its files; those just written are in both."""
    written = [block for part in last_records(segments, living.capacity) for block in part.blocks()]
    on_disk = np.isin(record_keys(living.records), record_keys(np.concatenate([living.records[:0], *written])))
    records = living.records[~on_disk]
    return MemorySegment(path, 0, len(records), records=records)


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
