"""A recorded run as pandas data, without the analyses (`commtrace.run.Run` adds those)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import pandas as pd

from .event_table import EventTable
from .labels import LABEL_COLUMNS, RecordLabels, message_roles_of, roles_of, short_paths
from .log import Log, Process
from .log_notes import Note
from .table_reader import Row

if TYPE_CHECKING:
    pass


class RecordedRun:
    """One run of a program: all that its ranks recorded. Nothing but small tables is read before it is asked for."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __repr__(self) -> str:
        ranks = f"{len(self.ranks)} of {self.world_size or 'unknown'} ranks"
        return f"<Run {self.id}: {ranks}, {len(self.log.processes)} processes, {len(self.notes)} notes>"

    @property
    def id(self) -> str:
        """Identity of the run."""
        return self.log.run

    @property
    def notes(self) -> tuple[Note, ...]:
        """What is damaged or missing in the log, and what follows from it."""
        return self.log.notes

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes by rank; `tables.process` of each holds its facts (host, versions, launcher, settings ...)."""
        return self.log.processes

    @property
    def ranks(self) -> list[int]:
        """Ranks that left a log, ascending."""
        return sorted({process.rank for process in self.log.processes if process.rank >= 0})

    @property
    def world_size(self) -> int | None:
        """Ranks of the run, None where no process says."""
        return self.log.world_size

    @property
    def simulated(self) -> bool:
        """Whether this is a dry run: calls are those of the job, nothing was sent, and there are no times."""
        return any(bool(process.tables.process.get("simulated")) for process in self.log.processes)

    @property
    def stands_for(self) -> dict[int, int]:
        """Of a dry run, by rank: for how many ranks of the job it was run, itself among them."""
        return {process.rank: process.tables.stands_for[1] for process in self.log.processes if process.rank >= 0}

    @property
    def job(self) -> Row | None:
        """What is trained, as captured on the lowest rank that did; None where nothing was captured.

        A process may train several models (`process.tables.jobs`); this is its first.
        """
        return next((job for process in self.log.processes for job in process.tables.jobs.values()), None)

    @cached_property
    def labels(self) -> tuple[RecordLabels, ...]:
        """For each process, what the numbers in its records mean."""
        roles, messages = roles_of(self.log), message_roles_of(self.log)
        files = short_paths({site.file for process in self.log.processes for site in process.tables.sites.values()})
        return tuple(
            RecordLabels(number, process, roles, files, messages) for number, process in enumerate(self.log.processes)
        )

    def blocks(self) -> Iterator[pd.DataFrame]:
        """The events in normal form, a bounded number at a time, process by process; first a frame without rows."""
        form = EventTable(self.labels)
        yield form.empty()
        for labels, process in zip(self.labels, self.log.processes, strict=True):
            for segment in process.segments:
                for records in segment.blocks():
                    yield form.frame(records, labels)

    def events(self) -> pd.DataFrame:
        """All events in normal form: one row per call, the columns of schema.NORMAL_FORM, by rank and t_begin_ns.

        Sizes are bytes, times ns of the host's monotonic clock with 0 for not known. `wire_bytes` and `group_size` are
        missing where the log does not tell. Needs memory for the whole run; `blocks` does not.
        """
        events = pd.concat(self.blocks(), ignore_index=True)
        for column in LABEL_COLUMNS:
            events[column] = events[column].cat.remove_unused_categories()
        return events.sort_values(["rank", "t_begin_ns"], kind="stable", ignore_index=True)
