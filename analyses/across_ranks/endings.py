"""Ends of processes: how each one ended, and which one ended first.

A process ends when its main thread leaves the program, or when the kernel ends it. The first moment is recorded
exactly. The second one is known within bounds: the process was last seen alive before it, and another process of its
host, which still ran, saw that it had ended after it. A process ended first only if the bounds prove it. Times of
several hosts are compared by bounds on their clocks that follow from the last calls (`clock_alignment`); without
such bounds, the order is not known.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, column, duration, text_column, text_of, word_column
from commtrace.formatting import format_moment
from commtrace.reading.labels import short_paths
from commtrace.reading.process_ends import ProcessEnd, last_step
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import last_records
from commtrace.reading.table_reader import Row, Site

from .clock_alignment import align_clocks
from .clocks import wall_clock_offsets
from .matching import host_numbers

ENDINGS: Final = TableSpec("endings", "How the processes ended",
    "A row per process. No rows if all of them ended regularly, or still run.", (
    shared.RANK,
    word_column("end", "end",
        '"exception": an exception that the program did not catch, or for which it aborted its MPI job; "abort": it '
        'aborted its MPI job; "signal": of the kernel or another process; '
        '"status": an exit status other than 0; "exit": its program ended; "died": it did not close its log, the '
        'reason is not known; "stopped": `commtrace.stop()`; "runs": it ran when the report was made; "unknown": it '
        "runs or died, on another host."),
    text_column("reason", "reason",
        'Type of the exception, name of the signal, exit status, or "MPI_Abort(7)"; "" if not known.'),
    replace(shared.SITE, meaning="Innermost line of the program that the exception passed; missing without one."),
    text_column("message", "message", "Message of the exception, without data.", optional=True),
    text_column("raised_at", "raised at", "Line that raised the exception, if it is in a library.", optional=True),
    column("", text_of, "step", "step", "Step in which it ended; -1: before the first step; missing if not known."),
    word_column("order", "order", '"first": it ended before all others, except those that ended likewise; "later"; '
        'missing if that is not known.'),
    duration("after_ns", "after", "Lower bound of the time from the first end to this one; missing if not known."),
    column("ns", format_moment, "ended_ns", "ended", "When it had ended, since 1970-01-01 UTC; missing if not known.",
        optional=True),
), merge_by="rank")  # fmt: skip
THREAD_EXCEPTIONS: Final = TableSpec("thread_exceptions", "Exceptions that ended threads",
    "A row per process and exception that ended a thread other than the main one.", (
    shared.RANK,
    text_column("reason", "exception", "Type of the exception."),
    replace(shared.SITE, meaning="Innermost line of the program that the exception passed."),
    text_column("message", "message", "Its message, without data.", optional=True),
    column("", text_of, "step", "step", "Step of the process at that time; -1: before the first step."),
), merge_by="rank")  # fmt: skip

FAILURES: Final = ("exception", "abort", "signal", "status", "died")
"""Values of `end` in `endings` that are no regular ends."""
_UNKNOWN_LOW, _UNKNOWN_HIGH = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2
_LAST: Final = 4096
"""Last records of each process from which bounds on clocks are derived."""
_DRIFT: Final = 1e-4
"""Largest rate at which two clocks diverge after the last calls that bound them."""


class _Order(NamedTuple):
    """Order of the ends of processes.

    Attributes:
        bounds: Earliest and latest time of each end on one clock, int64, shape (2, processes).
        first: The processes that ended first; empty if that is not known.
    """

    bounds: np.ndarray[Any, np.dtype[np.int64]]
    first: frozenset[int]


def find_endings(run: RecordedRun) -> NamedTables:
    """Return the tables `endings` and `thread_exceptions` of a run."""
    files = _short_names(run)
    threads = [*_thread_rows(run, files)]
    ends = [] if run.simulated else run.ends
    rows: list[dict[str, object]] = []
    if any(end.is_failure or end.state == "died" for end in ends):
        described = [_described(process, end, files) for process, end in zip(run.processes, ends, strict=True)]
        rows = _with_order(run, described, ends)
    table = pd.DataFrame(rows, columns=ENDINGS.column_names)
    thread_table = pd.DataFrame(threads, columns=THREAD_EXCEPTIONS.column_names)
    return {
        "endings": table.astype(dict.fromkeys(("step", "after_ns", "ended_ns"), "Int64")),
        "thread_exceptions": thread_table.astype({"step": "Int64"}),
    }


def _short_names(run: RecordedRun) -> Mapping[str, str]:
    """Return the displayed names of the files in call sites and in lines of exceptions."""
    leaving = (process.tables.leaving for process in run.processes)
    rows = [*filter(None, leaving), *(row for process in run.processes for row in process.tables.thread_exceptions)]
    exceptions = [row["exception"] for row in rows if row["exception"] is not None]
    lines = [line for exception in exceptions for line in exception["lines"]]
    lines += [worker[1] for exception in exceptions if (worker := exception["worker"]) is not None and worker[1]]
    return short_paths({*run.labels.files, *(line.file for line in lines)})


def _thread_rows(run: RecordedRun, files: Mapping[str, str]) -> Iterator[dict[str, object]]:
    for process in run.processes:
        for row in process.tables.thread_exceptions:
            if row["exception"] is not None:
                step = row.get("step")
                facts = _exception(row["exception"], files)
                facts.pop("raised_at")
                yield {"rank": process.rank, **facts, "step": step if type(step) is int else None}


def _exception(exception: Row, files: Mapping[str, str]) -> dict[str, object]:
    """Return the columns that describe an exception."""
    lines: Sequence[Site] = exception["lines"]
    own = lines[exception["at"]] if exception["at"] < len(lines) else None
    raised = lines[0] if lines and own is not lines[0] else None
    reason = exception["type"]
    if exception["worker"] is not None:
        kind, line = exception["worker"]
        reason, raised = f"{kind} in a data-loader worker", own if line is not None else raised
        own = line or own
    if exception["signal"] is not None:
        reason += f" raised by its handler of {_signal_name(exception['signal'])}"
    return {
        "reason": reason,
        "site": own.label(files) if own else None,
        "message": exception["message"],
        "raised_at": raised.label(files) if raised else None,
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _described(process: Process, end: ProcessEnd, files: Mapping[str, str]) -> dict[str, object]:
    """Return the row of a process, without its order."""
    row: dict[str, object] = {"rank": process.rank, "reason": "", "step": last_step(process)}
    if end.exception is not None:
        return {**row, "end": "exception", **_exception(end.exception, files)}
    if (process.tables.leaving or {}).get("aborts") is True:
        return {**row, "end": "abort", "reason": f"MPI_Abort({end.status})"}
    if end.signal is not None:
        memory = " for lack of memory (its control group counted one at that time)"
        reason = _signal_name(end.signal) + memory * (end.out_of_memory_ns is not None)
        return {**row, "end": "signal", "reason": reason}
    if end.status:
        return {**row, "end": "status", "reason": f"exit status {end.status}"}
    if end.state == "ended" or (end.state == "died" and process.tables.leaving is not None):
        return {**row, "end": "exit", "reason": "exit status 0" if end.status == 0 else ""}
    return {**row, "end": end.state}


def _with_order(
    run: RecordedRun, rows: Sequence[dict[str, object]], ends: Sequence[ProcessEnd]
) -> list[dict[str, object]]:
    """Return the rows with their order and times."""
    order = _order(run, rows, ends)
    offsets = wall_clock_offsets(run)
    first_by = max((int(order.bounds[1, number]) for number in order.first), default=None)
    result = []
    for number, (row, end) in enumerate(zip(rows, ends, strict=True)):
        earliest, offset = int(order.bounds[0, number]), offsets.get(number)
        is_known = end.latest_ns is not None and offset is not None
        after = None if first_by is None or earliest < first_by else earliest - first_by
        result.append(
            {
                **row,
                "order": None if not order.first else "first" if number in order.first else "later",
                "after_ns": 0 if number in order.first else after,
                "ended_ns": end.latest_ns + offset if is_known and end.latest_ns and offset else None,
            }
        )
    return result


def _order(run: RecordedRun, rows: Sequence[dict[str, object]], ends: Sequence[ProcessEnd]) -> _Order:
    earliest = np.array([end.earliest_ns for end in ends], np.int64)
    latest = np.array([_UNKNOWN_HIGH if end.latest_ns is None else end.latest_ns for end in ends], np.int64)
    bounds = _on_one_clock(run, earliest, latest)
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        alike[row["end"], row["reason"], row.get("site"), row["step"]].append(number)
    earliest_end = int(np.argmin(bounds[1]))
    row = rows[earliest_end]
    for first in (alike[row["end"], row["reason"], row.get("site"), row["step"]], [earliest_end]):
        others = np.delete(bounds[0], first)
        if bounds[1, first].max() < _UNKNOWN_HIGH and (not len(others) or bounds[1, first].max() <= others.min()):
            return _Order(bounds, frozenset(first))
    return _Order(bounds, frozenset())


def _on_one_clock(
    run: RecordedRun, earliest: np.ndarray[Any, Any], latest: np.ndarray[Any, Any]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return bounds on the ends of processes on one clock, given those on the clocks of their hosts."""
    hosts, host_of_process = host_numbers(run)
    bounds = np.stack([earliest, latest])
    if len(hosts) < 2:
        return bounds
    tail = tuple(replace(process, segments=last_records(process.segments, _LAST)) for process in run.processes)
    clocks = align_clocks(RecordedRun(replace(run.log, processes=tail)))
    for number, clock in enumerate(clocks.aligned):
        at = np.flatnonzero(host_of_process == number)
        if clock is None:
            bounds[0, at], bounds[1, at] = _UNKNOWN_LOW, _UNKNOWN_HIGH
            continue
        known = bounds[1, at] < _UNKNOWN_HIGH
        low, high = clock.to_reference(earliest[at])[0], clock.to_reference(latest[at])[1]
        widened = [np.maximum(0, times - clock.used_at[1]) * _DRIFT for times in (low, high)]
        bounds[0, at] = low - widened[0].astype(np.int64)
        bounds[1, at] = np.where(known, high + widened[1].astype(np.int64), _UNKNOWN_HIGH)
    return bounds


ANALYSIS: Final = RunAnalysis("endings", find_endings)
