"""A run that is read while it is recorded, in the time that the new records take.

Totals are folds (`fold_engine`): the merged tables of what was read are kept, and only new records of the files are
added. Records that are still in the memory of the processes are added at each reading, and kept when they have reached
the files. At the end of the run, the totals are therefore those of a report. A reading may leave records to later ones;
then totals are those of the first records of every process, and the reading says of how many. Times of steps, and
hangs, come from the last records alone, by the analyses of a report; the times of all steps that were seen are kept.

Nothing is written, and the traced processes have no work with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses import steps, volume_by_purpose, volume_tables
from commtrace.analyses.across_ranks import stalls
from commtrace.analyses.across_ranks.critical_paths import read_path_runs, step_time_parts, step_times
from commtrace.analyses.across_ranks.endings import FAILURES, find_endings
from commtrace.analyses.across_ranks.step_time_specs import DELAYS, STEP_TIME_PARTS, STEP_TIMES
from commtrace.analyses.across_ranks.stragglers import computation, delays, total_computation
from commtrace.analyses.across_ranks.stuck_calls import find_stuck_calls
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import Analysis, NamedTables, finished_tables, merge_tables, merged_tables
from commtrace.errors import LogError
from commtrace.reading.labels import TEXT_FIELDS, UNKNOWN, RunLabels
from commtrace.reading.log import open_log
from commtrace.reading.process_ends import last_recorded_step
from commtrace.reading.process_reader import Process
from commtrace.reading.segment_reader import MemorySegment, Segment, last_records
from commtrace.recording.kept_records import in_flight

TOTALS: Final[tuple[Analysis, ...]] = (volume_by_purpose.BY_PURPOSE, volume_tables.BY_RANK, steps.ANALYSIS)
"""Analyses of all records."""
LEAST_RECENT: Final = 1 << 17
"""Number of last records, over all processes, that are read for the times of steps: at first, and at most."""
MOST_RECENT: Final = 1 << 20
_MOST_IN_PARTS: Final = 1 << 17
"""Likewise at most, of up to 128 processes, if a reading in parts must not take long."""
MAX_STEPS: Final = 10_000
"""Number of last steps whose times are kept."""
_AT_FIRST: Final = 1 << 21
"""Records that a reading in parts adds to the totals: of those from before the first reading, or after the end."""
_AT_ONCE: Final = 1 << 18
"""Records that it adds while the run goes on."""
_RECORDS_OF_PART: Final = 1 << 17
"""Records that are in memory at a time while they are added."""
_WAITS_NS: Final = 1_000_000_000
"""Time from which on a call in flight may be stuck."""
_SEARCH_EVERY: Final = 10
"""Readings in parts after which stuck calls are searched for even if no process waits."""
_STEPS_WANTED: Final = 6
"""Steps among the last records of a process without which more records are read the next time."""


@dataclass(frozen=True)
class LiveRun:
    """A run as of one reading.

    Attributes:
        run: The run, without records in the memory of processes, which may be many.
        tables: Tables of a report by name: those of the totals, by default `volume_by_purpose`, `ranks`,
            `volume_by_step` and `steady_step`; `step_time_parts` and `delays` of the last steps; `step_times` of all
            steps that were seen; `stuck_calls`, `stuck_ranks`, `stalled_threads`, `endings`, `thread_exceptions`.
        step: The last step of which a call is in the log, -1: before the first.
        read_ns: Wall-clock time of the reading in ns since 1970.
        took_s: Processor time that the reading took, s.
        records: Number of records in the files.
        totalled: Number of those that are in the totals; with all of them, so are those in the memory of the processes,
            at the latest in the next reading.
        begins: Whether there are records that were there at the first reading and are not in the totals.
    """

    run: AnalysedRun
    tables: NamedTables
    step: int
    read_ns: int
    took_s: float
    records: int
    totalled: int
    begins: bool

    @property
    def is_over(self) -> bool:
        """Whether no process of the run is known to run, or may run on another host."""
        return _is_over(self.run)

    @property
    def has_failed(self) -> bool:
        """Whether a process failed, or died for a reason that is not known."""
        return bool(self.tables["endings"]["end"].isin(FAILURES).any())


class FollowedRun:
    """The newest run below a log directory, read again and again.

    Args:
        directory: The directory that COMMTRACE was set to, or a run's directory in it.
        totals: Analyses of all records.
        in_parts: Whether a reading may leave records to later ones, so that none takes long.
    """

    def __init__(self, directory: Path, totals: Sequence[Analysis] = TOTALS, *, in_parts: bool = False) -> None:
        self._directory, self._analyses, self._in_parts = directory, totals, in_parts
        self._forget("")

    def _forget(self, run: str) -> None:
        """Begin with a run."""
        self._run = run
        self._forget_totals()
        self._recent, self._readings = LEAST_RECENT, 0
        self._step_times = pd.DataFrame(columns=STEP_TIMES.column_names)

    def _forget_totals(self) -> None:
        self._read: dict[Path, int] = {}
        """Number of records in the totals, by file."""
        self._last_read: dict[Path, int] = {}
        """The last step in the totals, by process."""
        self._at_first = 0
        """Number of records at the first reading."""
        self._is_behind = True
        """Whether there may be records in files that are not in the totals."""
        self._totals: NamedTables = {}
        self._labels: RunLabels | None = None
        self._rows: dict[str, int] = {}

    def read(self) -> LiveRun:
        """Read what is new.

        Raises:
            LogError: There is no run, or it is packed.
        """
        began, now = time.process_time(), time.time_ns()
        # Totals that lack records of files anyway need none from memory, where fast ranks have many.
        most_in_memory = self._recent if self._in_parts and self._is_behind else None
        run = AnalysedRun(open_log(self._directory, most_in_memory=most_in_memory))
        if run.log.packed is not None:
            raise LogError(f"{run.log.packed}: a packed log does not grow; commtrace report shows it")
        if run.id != self._run or self._has_shrunk(run.processes):
            self._forget(run.id)
        totals = self._all_records(run) if self._analyses else {}
        tables = {**totals, **self._last_steps(run)}
        tables |= self._stuck_calls(run) | find_endings(run) | stalls.find_stalls(run)
        records, unread = (sum(map(count, run.processes)) for count in (_in_files, self._count_unread))
        totalled, self._is_behind = records - unread, unread > 0
        self._at_first = self._at_first or records
        begins = bool(self._analyses) and totalled < self._at_first
        step = max((step for step in map(last_recorded_step, run.processes) if step is not None), default=-1)
        run.log = replace(run.log, processes=(*map(_without_memory, run.processes),))
        return LiveRun(run, tables, step, now, time.process_time() - began, records, totalled, begins)

    # ---- all records -------------------------------------------------------------------------------------------------

    def _all_records(self, run: AnalysedRun) -> NamedTables:
        """Return the tables of TOTALS, and keep the sums of the records in files."""
        rows = _row_counts(run.processes)
        if self._labels is not None and self._are_stale(run.labels, rows):
            self._forget_totals()  # read all again
        kept = [{name: _recoded(table, self._labels, run.labels) for name, table in self._totals.items()}]
        new = self._unread(run)
        self._totals = merge_tables(self._analyses, [*(kept if self._totals else ()), self._merged(run, new)])
        self._labels, self._rows = run.labels, rows
        for process in new:
            steps = (segment.last_step for segment in process.segments)
            self._last_read[process.path] = max(self._last_read.get(process.path, -1), *steps, -1)
        behind = [process for process in run.processes if self._count_unread(process) or process.left_in_memory]
        shown = _part(run, run.processes)
        if behind:
            # A step of which only some calls were read is no complete one.
            cuts = [*(() if run.cut_step is None else (run.cut_step,)), *(self._last_read[own.path] for own in behind)]
            shown.cut_step = min(cuts)
            return finished_tables(self._analyses, self._totals, shown)
        in_memory = [
            replace(process, segments=tuple(part for part in process.segments if isinstance(part, MemorySegment)))
            for process in run.processes
        ]
        now = merge_tables(self._analyses, [self._totals, self._merged(run, in_memory)])
        return finished_tables(self._analyses, now, shown)

    def _are_stale(self, labels: RunLabels, rows: Mapping[str, int]) -> bool:
        """Return whether records that were read have other labels now: a row has changed, or came after its records."""
        before = self._labels
        if before is None or not labels.extend(before):
            return True
        grown = {column for column, count in rows.items() if count > self._rows[column]}
        columns = [(column, table[column]) for table in self._totals.values() for column in grown if column in table]
        return any((before.distinct(column)[codes.to_numpy()] == UNKNOWN).any() for column, codes in columns)

    def _merged(self, run: AnalysedRun, processes: Sequence[Process]) -> NamedTables:
        return merged_tables(_part(run, processes), self._analyses, _RECORDS_OF_PART)

    def _unread(self, run: AnalysedRun) -> list[Process]:
        """Return the processes with the parts of their files to add to the totals now, and note that they are.

        In parts, these are the next records of each process, in proportion to what is unread of it.
        """
        counts = [*map(self._count_unread, run.processes)]
        unread, records = sum(counts), sum(map(_in_files, run.processes))
        is_quick = not self._totals or records - unread < self._at_first or _is_over(run)
        most = (_AT_FIRST if is_quick else _AT_ONCE) if self._in_parts else unread
        share = min(1.0, most / max(1, unread))
        return [
            replace(process, segments=tuple(self._next(process, math.ceil(share * count))), summary=None)
            for process, count in zip(run.processes, counts, strict=True)
        ]

    def _next(self, process: Process, count: int) -> Iterator[Segment]:
        """Yield the next `count` records of a process as parts of its files, and note that they are read."""
        for segment in process.segments:
            if isinstance(segment, MemorySegment):
                continue
            path = _closed_path(segment)
            read = self._read.get(path, 0)
            while (length := min(count, segment.count - read, _RECORDS_OF_PART)) > 0:
                yield segment.part(read, length)
                count, read = count - length, read + length
            self._read[path] = read

    def _count_unread(self, process: Process) -> int:
        """Return the number of records in the files of a process that are not in the totals."""
        return _in_files(process) - sum(self._read.get(_closed_path(segment), 0) for segment in process.segments)

    def _has_shrunk(self, processes: Sequence[Process]) -> bool:
        """Return whether a file has fewer records than were read of it: the log is another one."""
        counts = {_closed_path(segment): segment.count for process in processes for segment in process.segments}
        return any(counts.get(path, read) < read for path, read in self._read.items())

    # ---- the last records --------------------------------------------------------------------------------------------

    def _last_steps(self, run: AnalysedRun) -> NamedTables:
        """Return `step_time_parts`, `delays` and `step_times`."""
        count = self._recent // max(1, len(run.processes))
        last = [replace(process, segments=last_records(process.segments, count)) for process in run.processes]
        recent = _part(run, last)
        path_runs = read_path_runs(recent, recent.clocks, self._recent) if run.processes else []
        most = max(_MOST_IN_PARTS, len(run.processes) << 10) if self._in_parts else MOST_RECENT
        has_more = any(_records(process) > _records(own) for process, own in zip(run.processes, last, strict=True))
        if has_more and self._recent < most and min(map(_count_steps, last)) < _STEPS_WANTED:
            self._recent = min(most, 2 * self._recent)
        if not path_runs:
            names = {spec.name: spec.column_names for spec in (STEP_TIME_PARTS, DELAYS)}
            tables = {name: pd.DataFrame(columns=columns) for name, columns in names.items()}
        else:
            # A report has the last run of consecutive steps; evaluations may have ended others since the last reading.
            for paths in path_runs:
                if paths is path_runs[-1] or paths.steps[-1] > self._last_measured:
                    parts = computation(paths)
                    self._add_times(step_times(recent, paths, total_computation(paths, parts).excess))
            tables = {"step_time_parts": step_time_parts(paths), "delays": delays(recent, paths, parts)}
        return {**tables, "step_times": self._step_times}

    def _stuck_calls(self, run: AnalysedRun) -> NamedTables:
        """Return `stuck_calls` and `stuck_ranks`. In parts, mostly without a search where no process waits."""
        self._readings += 1
        is_due = not self._in_parts or self._readings % _SEARCH_EVERY == 1
        if is_due or any(map(_may_wait, run.processes)):
            return find_stuck_calls(run, most_records=self._recent)
        return find_stuck_calls(_part(run, ()))

    @property
    def _last_measured(self) -> int:
        """The last step whose times are kept; -1: none."""
        return int(self._step_times["step"].max()) if len(self._step_times) else -1

    def _add_times(self, new: pd.DataFrame) -> None:
        """Add the times of steps that were not seen before."""
        later = new.loc[new["step"] > self._last_measured]
        self._step_times = pd.concat([self._step_times, later]) if len(self._step_times) else later
        self._step_times = self._step_times.tail(MAX_STEPS).reset_index(drop=True)


def _part(run: AnalysedRun, processes: Sequence[Process]) -> AnalysedRun:
    """Return a run with parts of some processes."""
    part = AnalysedRun(replace(run.log, processes=(*processes,)))
    part.labels = run.labels  # of the same tables
    return part


def _is_over(run: AnalysedRun) -> bool:
    return all(end.state in ("ended", "stopped", "died") for end in run.ends)


def _without_memory(process: Process) -> Process:
    segments = tuple(segment for segment in process.segments if not isinstance(segment, MemorySegment))
    return replace(process, segments=segments, kept=None)


def _records(process: Process) -> int:
    return sum(segment.count for segment in process.segments)


def _in_files(process: Process) -> int:
    return sum(segment.count for segment in process.segments if not isinstance(segment, MemorySegment))


def _may_wait(process: Process) -> bool:
    """Return whether a process may wait in a call: it does not run on this host, or has been in one for a second."""
    in_memory = [part.records for part in process.segments if isinstance(part, MemorySegment)]
    begins = [part["t_begin"][in_flight(part)] for part in in_memory]
    return not process.live_at_ns or any((process.live_at_ns - own > _WAITS_NS).any() for own in begins)


def _count_steps(process: Process) -> int:
    """Return the number of steps in the records of a process."""
    return len({step for segment in process.segments for part in segment.blocks() for step in np.unique(part["step"])})


def _closed_path(segment: Segment) -> Path:
    """Return the path of a segment's file when it is closed."""
    return segment.path.with_name(segment.path.name.removesuffix(".open"))


def _row_counts(processes: Sequence[Process]) -> dict[str, int]:
    """Return how many rows of all processes' tables the labels of a column come from, by column."""
    tables = [process.tables for process in processes]
    rows = {"op": "kinds", "purpose": "sites", "role": "groups"}
    return {column: sum(len(getattr(own, name)) for own in tables) for column, name in rows.items()}


def _recoded(table: pd.DataFrame, before: RunLabels | None, after: RunLabels) -> pd.DataFrame:
    """Return a merged table in which the numbers of labels are those of a later state of the log."""
    if before is None or before is after:
        return table
    columns = {
        name: np.searchsorted(after.distinct(name), before.distinct(name))[table[name].to_numpy()]
        for name in TEXT_FIELDS
        if name in table
    }
    return table.assign(**columns)
