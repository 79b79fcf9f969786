"""Process reader: reads the processes of a run from the files in a host's folder."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.recording.recovery import are_among, final_counters, split_kept
from commtrace.recording.ring import RingContent, Silence
from commtrace.recording.summary_files import count_calls
from commtrace.schema import WITHOUT_RECORD
from commtrace.statements import Quantity, Statement

from .log_notes import Note
from .segment_reader import MemorySegment, Segment, blocks_from_end, damage_notes, inspect_segment
from .summary_reader import SummaryTables
from .table_reader import ProcessTables, integer_or_none, read_tables

_FILE: Final = re.compile(
    r"(?P<stem>rank[^.]*-\d+)(?:\.jsonl|\.(?P<segment>\d+|salvaged)\.npy(?:\.open)?"
    r"|-kept(?:-(?P<dump>\d+))?\.npy(?:\.open)?|-(?P<summary>cells|steps|times)\.npy|-(?P<device>device)\.npy)"
)
_ALWAYS_VISITED: Final = 1000
"""Number of steps that are always visited, however few records there are."""
_RECOVERED: Final = 1 << 62
"""Segment number of recovered records, which are the newest of a process."""
_LAST: Final = 0
"""Dump number of the records that a process kept last."""
_COMPARED_AT_ONCE: Final = 4096
_MOST_COMPARED: Final = 1 << 20
"""Records of a process's files that are compared with those of its ring, of which one may have an impossible time."""
_WITHOUT_SEGMENT: Final = (*WITHOUT_RECORD, "not_selected", "summarized")
"""Counters of the calls that are in no segment."""
_LARGEST_NUMBER: Final = (1 << 31) - 1
"""Largest rank or process id."""
_SEGMENTS_MISSING: Final = partial(Statement, "segments {} to {} are missing")


def rank_of_stem(stem: str) -> int:
    """Return the rank in the first part of the names of a process's files; -1 if it has none."""
    return _number_in(stem, r"rank(\d+)")


def _number_in(stem: str, pattern: str) -> int:
    match = re.match(pattern, stem)
    return int(match[1]) if match and int(match[1]) <= _LARGEST_NUMBER else -1


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    path: Path
    """Its tables file, which may be missing."""
    tables: ProcessTables
    segments: tuple[Segment, ...]
    live_at_ns: int = 0
    """Monotonic time at which the memory of the live process was read; 0: it was not found running."""
    live_turn_ns: int = 0
    """Monotonic time at which a live process last emptied its ring: long ago if it is stopped, keeps the GIL, or waits
    for storage."""
    live_late_turn_ns: int = 0
    """Monotonic time at which it did so late, for the last time; 0: never."""
    silence: Silence = ""
    """Why a live process has not done so when it was due."""
    live_state: str = ""
    """The kernel's letter for the state of a live process."""
    left_in_memory: int = 0
    """Number of records in the memory of a live process that were not read, for lack of memory here; some may be in the
    files."""
    summary: SummaryTables | None = None
    """Its summary, with COMMTRACE_MODE=summary; segments have the calls that are not in it."""
    dumps: tuple[Segment, ...] = ()
    """The records that it kept earlier, at hangs and on request."""
    device: Path | None = None
    """Its file of other work on the device (`device_work`), if it was imported from a source that has it."""
    kept: Segment | None = None
    """Its last records, including steps that were not recorded; for stuck calls only, as segments may have them too."""

    @property
    def ran_until_ns(self) -> int:
        """Monotonic time until which a live process was not stopped, as far as that is known."""
        return self.live_turn_ns if self.silence in ("late", "stopped", "resumed") else self.live_at_ns

    @cached_property
    def rank(self) -> int:
        """Its rank; -1 where neither its tables nor its file names have it."""
        recorded = self._recorded("rank")
        return rank_of_stem(self.path.stem) if recorded is None else recorded

    @cached_property
    def pid(self) -> int:
        """Its process id; -1 where neither its tables nor its file names have it."""
        recorded = self._recorded("pid")
        return _number_in(self.path.stem, r".*-(\d+)$") if recorded is None else recorded

    def _recorded(self, name: str) -> int | None:
        value = self.tables.process.get(name)
        return value if type(value) is int and 0 <= value <= _LARGEST_NUMBER else None

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
    def losses(self) -> Statement:
        """Losses as text, such as "124 of 152 calls were not recorded, hooks failed 124 times"; "": none."""
        lost, errors = self._unrecorded_calls - self.removed, self.counter("hook_errors")
        calls, damaged = Quantity(self.counter("calls"), "call"), self._damaged_records
        losses = (
            (lost, Statement("{:,} of {} were not recorded", lost, calls)),
            (
                self.removed,
                Statement("the first {:,} of {} were removed to keep the log below its limit", self.removed, calls),
            ),
            (damaged, Statement("{} damaged", Quantity(damaged, "record"))),
            (errors, Statement("hooks failed {}", Quantity(errors, "time"))),
        )
        return Statement.joined(", ", (loss for number, loss in losses if number))

    @property
    def not_selected(self) -> int:
        """Number of calls of steps that COMMTRACE_STEPS does not select."""
        return self.counter("not_selected")

    @property
    def removed(self) -> int:
        """Number of oldest records that were removed to keep the log below its size limit."""
        return self.counter("removed")

    @cached_property
    def _unrecorded_calls(self) -> int:
        return sum(map(self.counter, WITHOUT_RECORD))

    @cached_property
    def _counted_calls(self) -> int:
        """Number of calls with or without a record, in all steps."""
        slots = sum(segment.count for segment in self.segments) + self.left_in_memory
        return slots + self._unrecorded_calls + self.not_selected + self.counter("summarized")

    @property
    def _damaged_records(self) -> int:
        return sum(sum(segment.damaged.values()) for segment in self.segments)

    def counter(self, name: str) -> int:
        """Return a counter of its table `stats`; 0 where it was not written."""
        return integer_or_none((self.tables.stats or {}).get(name)) or 0

    def record_notes(self) -> Iterator[Note]:
        """Yield notes on the records that were read so far."""
        notes = [*damage_notes(self.path, self.segments)]
        if problem := self.steps_problem(max((segment.last_step for segment in self.segments), default=-1)):
            notes.append(Note("process", self.path, problem, "they are not compared with others"))
        yield from _of_rank(self.rank, notes)

    @property
    def summary_problem(self) -> str:
        """Which steps are not compared because the summary has only sums of their calls, and a hint; "": none."""
        spans = None if self.summary is None else self.summary.summed_steps
        if spans is None or not len(spans):
            return ""
        return Statement(
            "some of steps {:,} to {:,} are in the summary as sums only; to compare them, record with "
            "COMMTRACE_MODE=events",
            int(spans[:, 0].min()),
            int(spans[:, 1].max()),
        )

    def steps_problem(self, last_step: int) -> str | None:
        """Return why the steps up to `last_step` are not compared; None if they are.

        Beyond _ALWAYS_VISITED, there must be as many calls as steps, which bounds the work of visiting every step.
        """
        if last_step < _ALWAYS_VISITED or last_step < (calls := self._counted_calls):
            return None
        return Statement(
            "its records go up to step {:,}, but the number of calls is only {:,}: steps have no records, or are "
            "damaged",
            last_step,
            calls,
        )


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
    device: Path | None = None

    def add(self, path: Path, match: re.Match[str]) -> None:
        """Add a file. Of a closed and an open copy, use the closed one, which sorts first: it has all records."""
        self.is_process |= is_log_file(path.name)
        self.is_summary |= match["summary"] is not None
        if match["device"] is not None:
            self.device = path
        elif number := match["segment"]:
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
    tables, own_notes = read_tables(path, b"" if ring is None else ring.tables)
    own_notes += _source_notes(tables)
    if tables.salvage:  # a recovery has moved the ring's content to the log since it was copied
        ring = None
    segments = [*_inspect_segments(files.segments, own_notes).values()]
    own_notes += _missing_segments(path, tables, sorted(files.segments), 0 if ring is None else len(ring.records))
    dumps = _inspect_segments(files.kept, own_notes, "its calls are kept besides the log, and not counted")
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
        own_notes.append(_complete_tables(path, tables, ring, segments, left_out, summarized))
    process = Process(
        path, tables, tuple(segments), summary=summary, dumps=tuple(dumps.values()), kept=kept, device=files.device
    )
    if ring is not None and ring.is_alive:
        process = replace(
            process, live_at_ns=ring.alive_ns, live_turn_ns=ring.turn_ns, live_late_turn_ns=ring.late_turn_ns,
            silence=ring.silence, live_state=ring.process_state, left_in_memory=ring.left_out,
        )  # fmt: skip
        if ring.silence == "storage":
            what = Statement("its recorder has waited {:,} s for the storage of the log", ring.silent_ns // 10**9)
            room = Statement("newer calls are in memory, which has room for {:,}", ring.capacity)
            own_notes.append(Note("process", path, what, room))
    if alive_ns := integer_or_none(tables.source.get("alive_ns")):
        process = replace(process, live_at_ns=alive_ns, live_turn_ns=alive_ns)
    notes += _of_rank(process.rank, own_notes)
    return process


def _source_notes(tables: ProcessTables) -> Iterator[Note]:
    """Yield notes on what is wrong with the files that a process was imported from."""
    for problem in tables.source.get("problems") or ():
        match problem:
            case [str(file), "cut" | "garbled" as kind, str(what), str(consequence)]:
                yield Note(kind, Path(file), what, consequence)


def _of_rank(rank: int, notes: Iterable[Note]) -> Iterator[Note]:
    """Yield notes on a process with its rank."""
    return (replace(note, rank=rank if rank >= 0 else None) for note in notes)


def _complete_tables(
    path: Path, tables: ProcessTables, ring: RingContent, segments: Sequence[Segment], left_out: int, summarized: int
) -> Note:
    """Add the rows to the tables of a killed process that a recovery of its ring would write. Return a note."""
    on_disk = sum(segment.count for segment in segments)
    tables.stats = final_counters(ring, on_disk=on_disk, left_out=left_out, summarized=summarized)
    in_memory, host = segments[-1].count, ring.identity["host"]
    tables.salvage.append({"records": in_memory, "host": host})
    what = Statement("{} records of a process that ended early are only in shared memory", in_memory)
    return Note("salvage", path, what, "`commtrace recover` moves them to the log", subject=f"{path.stem} on {host}")


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
    """Return the records of a ring that are not in its process's files. Those just written are in both.

    A process goes on writing after its ring was copied: whatever follows the copied records began after the oldest one.
    It may be much, and is not kept if it began after the newest one, too.
    """
    written = [ring.records[:0]]
    if len(ring.records):
        oldest, newest, count = ring.records["t_begin"].min(), ring.records["t_begin"].max(), 0
        for block in blocks_from_end(segments, _COMPARED_AT_ONCE):
            count += len(block)
            is_older = count > _MOST_COMPARED or block["t_begin"].max(initial=0) < oldest
            if count > ring.capacity and is_older:
                break
            written.append(block[(block["t_begin"] >= oldest) & (block["t_begin"] <= newest)])
    records = ring.records[~are_among(ring.records, np.concatenate(written))]
    return MemorySegment(path, 0, len(records), records=records)


def _missing_segments(path: Path, tables: ProcessTables, numbers: list[int], in_memory: int) -> Iterator[Note]:
    """Yield a note for each gap in the segment numbers of a process, which may include `_RECOVERED`.

    Args:
        path: The process's tables.
        tables: Their rows.
        numbers: The numbers of its segments, ascending.
        in_memory: Number of its records in shared memory: with a full disk, all of them.
    """
    stats = tables.stats or {}
    counted = [integer_or_none(stats.get(name)) or 0 for name in ("calls", *_WITHOUT_SEGMENT)]
    recorded = 2 * counted[0] - sum(counted)
    if not numbers and recorded > in_memory:
        text = Statement("no segments, though {} calls were counted", recorded)
        yield Note("missing", path, text, "nothing is known of its calls")
    numbers = [number for number in numbers if number != _RECOVERED]
    if numbers and numbers[0] > 0 and not stats.get("removed"):
        yield Note("missing", path, _SEGMENTS_MISSING(0, numbers[0] - 1), "their records are missing")
    for before, after in pairwise(numbers):
        if after > before + 1:
            yield Note("missing", path, _SEGMENTS_MISSING(before + 1, after - 1), "their records are missing")
