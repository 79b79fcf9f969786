"""A recorded run as pandas data, without the analyses (`commtrace.run.Run` adds those)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.errors import LogError
from commtrace.rank_ranges import rank_ranges, select_steps
from commtrace.schema import COPIED_COLUMNS, EVENT_COLUMNS, Records

from .executors import DEFAULT_EXECUTOR
from .labels import LABEL_COLUMNS, UNKNOWN, Array, ProcessIds, RunLabels
from .log import Log
from .log_notes import Note
from .process_ends import ProcessEnd, last_step, process_ends
from .process_reader import Process
from .record_columns import RecordColumns
from .run_parts import Executor, RunPart
from .segment_reader import Segment
from .table_reader import Row

EVENT_FIELDS: Final[tuple[str, ...]] = (*COPIED_COLUMNS.values(), "local", "phase", "state", "flags")
"""Record fields that the event table needs, besides those in every `RecordColumns`."""
RECORDS_PER_TASK: Final = 1 << 20
"""Minimum number of records in a part of a run, except in the last part."""


class EventTable:
    """Converter of a run's records to the event table. All frames have the same categories."""

    def __init__(self, labels: RunLabels) -> None:
        self._labels = labels
        self.categories = {
            column: pd.Index(sorted({UNKNOWN, "", *labels.categories(column)})) for column in LABEL_COLUMNS
        }
        """Sorted labels of each column of LABEL_COLUMNS."""
        self._positions = {
            column: categories.get_indexer(pd.Index(labels.categories(column).tolist()))
            for column, categories in self.categories.items()
        }

    def columns(self, records: RecordColumns) -> dict[str, Array]:
        """Return the columns by name, each of shape (n,).

        Labels are indices into `categories`; an unknown group_size is 0, an unknown payload -1.
        """
        labels = self._labels
        columns = {name: records[field] for name, field in COPIED_COLUMNS.items()}
        columns["rank"] = records["rank"].astype(np.int32)
        columns["group_size"] = labels.group_sizes(records["group"]).astype(np.int32)
        columns["wire_bytes"] = labels.wire_bytes(records)
        if (unknown := labels.payload_unknown(records["kind"])).any():
            columns["payload_bytes"] = np.where(unknown, -1, columns["payload_bytes"])
        column_of_field = {field: column for column, field in LABEL_COLUMNS.items()}
        ids = {field: labels.ids(column, records) for field, column in column_of_field.items()}
        columns |= {column: self._positions[column][ids[field]] for column, field in LABEL_COLUMNS.items()}
        return {name: columns[name] for name in EVENT_COLUMNS}

    @staticmethod
    def missing(column: str, values: Array) -> Array | None:
        """Return a mask of the missing values of a column, shape (n,); None if there are none."""
        if column == "payload_bytes":
            unknown = values < 0
            return unknown if unknown.any() else None
        return np.isnan(values) if column == "wire_bytes" else values == 0 if column == "group_size" else None

    def frame(self, records: RecordColumns) -> pd.DataFrame:
        """Return one row per record, in the order of the records."""
        columns: dict[str, Any] = self.columns(records)
        sizes = columns["group_size"]
        columns["group_size"] = pd.Series(sizes, dtype="Int32").mask(sizes == 0)
        if (unknown := self.missing("payload_bytes", columns["payload_bytes"])) is not None:
            columns["payload_bytes"] = pd.Series(columns["payload_bytes"], dtype="Int64").mask(unknown)
        for column, categories in self.categories.items():
            columns[column] = pd.Categorical.from_codes(columns[column], categories)
        return pd.DataFrame(columns)


class RecordedRun:
    """One recorded run. Opening it reads small tables only; records are read when they are needed.

    Attributes:
        log: The log of the run.
        executor: Reads the records for analyses.
    """

    def __init__(self, log: Log, executor: Executor = DEFAULT_EXECUTOR) -> None:
        self.log, self.executor = log, executor

    def __repr__(self) -> str:
        ranks = f"{len(self.ranks)} of {self.world_size or 'unknown'} ranks"
        return f"<Run {self.id}: {ranks}, {len(self.log.processes)} processes, {len(self.notes)} notes>"

    @property
    def id(self) -> str:
        """Identity of the run."""
        return self.log.run

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes on what is damaged or missing in the log. Notes on records appear once these are read."""
        record_notes = (note for process in self.log.processes for note in process.record_notes())
        return (*self.log.notes, *record_notes)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Processes, sorted by rank; `tables.process` of each has its host, versions, launcher and settings."""
        return self.log.processes

    @property
    def ranks(self) -> list[int]:
        """Ranks that left a log, ascending."""
        return sorted({process.rank for process in self.log.processes if process.rank >= 0})

    @cached_property
    def ranks_not_selected(self) -> list[int]:
        """Ranks that were not recorded because COMMTRACE_RANKS does not select them, ascending."""
        selected = self._selection("ranks")
        present = {*self.ranks}
        missing = (rank for rank in range(self.world_size or 0) if rank not in present)
        return [rank for rank in missing if selected and not any(rank in ranks for ranks in selected)]

    @property
    def selected_steps(self) -> str:
        """The steps that COMMTRACE_STEPS selects on any rank, such as "0-9,100"; "": all."""
        return ",".join(sorted(self._selections("steps"))) if self.step_ranges else ""

    @cached_property
    def step_ranges(self) -> list[range]:
        """`selected_steps` as ranges; empty: all."""
        return self._selection("steps")

    @cached_property
    def selection_problem(self) -> str | None:
        """Why the steps of this run cannot be compared with others; None if they can."""
        return "COMMTRACE_STEPS is not the same on all ranks" if len(self._selections("steps")) > 1 else None

    def select_steps(self, steps: Array) -> Array:
        """Return whether each step was recorded on some rank, bool, shape (n,); start-up always is."""
        return np.asarray(select_steps(steps, self.step_ranges))

    def _selections(self, setting: str) -> set[str]:
        settings = [process.tables.process.get("settings") for process in self.processes]
        return {str(values.get(setting) or "") if isinstance(values, dict) else "" for values in settings}

    def _selection(self, setting: str) -> list[range]:
        """Return the ranges that a setting selects in all processes; empty if one of them selects all."""
        selections = self._selections(setting)
        with suppress(ValueError):  # a damaged setting
            return [] if "" in selections else [*chain(*map(rank_ranges, selections))]
        return []

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the run; None where no process recorded it."""
        return self.log.world_size

    @property
    def is_summary(self) -> bool:
        """Whether processes have counts and histograms in place of calls: COMMTRACE_MODE=summary, or an import."""
        return any(process.summary for process in self.log.processes)

    def require_events(self, what: str) -> None:
        """Raise LogError if the run is a summary, which does not have `what`."""
        if self.is_summary and self.source:
            raise LogError(
                f"{self.log.path}: imported from files of {self.source}, which do not give {what}; record with "
                "commtrace, or see in `commtrace report` under `log` which setting of that tool records it"
            )
        if self.is_summary:
            raise LogError(f"{self.log.path}: a summary does not have {what}; record with COMMTRACE_MODE=events")

    def require_times(self, what: str) -> None:
        """Raise LogError if the run has no single calls with times, which `what` needs."""
        self.require_events(what)
        if any(process.tables.source.get("times_known") is False for process in self.log.processes):
            raise LogError(
                f"{self.log.path}: imported from files of {self.source}, which have no times; {what} needs a recorded "
                "run or a trace with times"
            )

    @property
    def source(self) -> str:
        """The tool that recorded an imported run, and the format of its files; "" if commtrace recorded it."""
        sources = [process.tables.source for process in self.log.processes if process.tables.source]
        return f"{sources[0].get('tool')} ({sources[0].get('format')})" if sources else ""

    def require_payloads(self) -> None:
        """Raise LogError if the source of an imported run does not state the payload of some calls."""
        kinds = {kind for process in self.processes for kind in process.tables.kinds.values()}
        if unknown := sorted({kind.op for kind in kinds if kind.sizes == "payload"}):
            raise LogError(
                f"{self.log.path}: its calls cannot be compared: the files that it was imported from do not state the "
                f"payload of some calls ({', '.join(unknown)}); record with commtrace, or Kineto traces with "
                "record_shapes=True"
            )

    @property
    def simulated(self) -> bool:
        """Whether this is a dry run: it has the calls of the job, but nothing was sent and there are no times."""
        return any(bool(process.tables.process.get("simulated")) for process in self.log.processes)

    @cached_property
    def ends(self) -> list[ProcessEnd]:
        """How each of `processes` ended."""
        return process_ends(self.processes)

    @cached_property
    def cut_step(self) -> int | None:
        """The first step that a process did not complete, because it ended within it or still runs; None: none."""
        steps = [last_step(process) for process, end in zip(self.processes, self.ends, strict=True) if end.is_cut]
        return min((step for step in steps if step is not None and step >= 0), default=None)

    @property
    def stands_for(self) -> dict[int, int]:
        """Number of ranks of the job that each rank of a dry run represents, itself included."""
        return {process.rank: process.tables.stands_for[1] for process in self.log.processes if process.rank >= 0}

    @property
    def job(self) -> Row | None:
        """Job that the lowest rank with one captured; None where no rank has one.

        A process may train several models (`process.tables.jobs`); this is its first.
        """
        return next((job for process in self.log.processes for job in process.tables.jobs.values()), None)

    @cached_property
    def labels(self) -> RunLabels:
        """Labels of the run's ids, and the mapping from each process's ids to them."""
        return RunLabels(self.log)

    def parts(
        self,
        segments_of: Callable[[Process], Sequence[Segment]] = attrgetter("segments"),
        *,
        whole_ranks: bool = False,
        min_slots: int | None = None,
    ) -> list[RunPart]:
        """Return the segments of the processes, in order, as one or more parts for an executor.

        Args:
            segments_of: Function that returns the segments of a process to read. Default: all.
            whole_ranks: Whether to keep all processes of a rank in one part.
            min_slots: Minimum number of slots in a part, except in the last. Default: RECORDS_PER_TASK.
        """
        parts, slots = [RunPart(0)], 0
        for ids, process in zip(self.labels.processes, self.processes, strict=True):
            for segment in segments_of(process):
                is_full = slots >= (min_slots or RECORDS_PER_TASK)
                if is_full and not (whole_ranks and parts[-1].processes[-1].rank == ids.rank):
                    parts.append(RunPart(len(parts)))
                    slots = 0
                parts[-1].segments.append(segment)
                parts[-1].processes.append(ids)
                slots += segment.count
        return parts

    def blocks(
        self, ranks: Sequence[int] | None = None, steps: Sequence[int] | None = None, ops: Sequence[str] | None = None
    ) -> Iterator[pd.DataFrame]:
        """Yield the event table in bounded pieces, process by process; the first piece has no rows.

        Args:
            ranks: Ranks to include; None: all.
            steps: Steps to include, -1 for calls before the first step; None: all.
            ops: Operations to include; None: all.
        """
        table = EventTable(self.labels)
        yield table.frame(RecordColumns.of(EVENT_FIELDS, 0))
        for records, process in self.records(ranks, steps, ops):
            yield table.frame(RecordColumns.of(EVENT_FIELDS, len(records)).fill(records, process))

    def records(
        self, ranks: Sequence[int] | None = None, steps: Sequence[int] | None = None, ops: Sequence[str] | None = None
    ) -> Iterator[tuple[Records, ProcessIds]]:
        """Yield the records of selected calls (see `blocks`) in bounded pieces, each with the ids of its process."""
        self.require_events("single calls")
        wanted = {name: values for name, values in (("step", steps), ("op", ops)) if values is not None}
        for ids, process in zip(self.labels.processes, self.log.processes, strict=True):
            for segment in process.segments if ranks is None or process.rank in ranks else ():
                for records in segment.blocks(wanted=wanted):
                    keep = np.ones(len(records), bool)
                    if steps is not None:
                        keep &= np.isin(records["step"], steps)
                    if ops is not None:
                        kinds = ids.run_ids("kind", records["kind"])
                        keep &= np.isin(self.labels.text("op", kinds).astype(str), ops)
                    yield records if keep.all() else records[keep], ids

    def events(
        self, ranks: Sequence[int] | None = None, steps: Sequence[int] | None = None, ops: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Return the event table: one row per call, sorted by rank and t_begin_ns.

        It needs memory for all selected calls; `blocks` does not. In a packed log, row groups without
        selected calls are not read.

        Args:
            ranks: Ranks to include; None: all.
            steps: Steps to include, -1 for calls before the first step; None: all.
            ops: Operations to include, such as "all_reduce"; None: all.

        Returns:
            The columns of `schema.EVENT_COLUMNS`. Sizes are bytes, times are ns of the host's monotonic clock, with 0
            for unknown. `wire_bytes` and `group_size` are missing where they cannot be computed, and so is
            `payload_bytes` in imported runs where the source does not state it.
        """
        events = pd.concat(self.blocks(ranks, steps, ops), ignore_index=True)
        for column in LABEL_COLUMNS:
            events[column] = events[column].cat.remove_unused_categories()
        return events.sort_values(["rank", "t_begin_ns"], kind="stable", ignore_index=True)
