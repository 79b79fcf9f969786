"""Computation beside communication on devices: exposed communication, and overlap by operation, dimension and purpose.

Times are lengths of unions of spans on a rank's device, never sums: kernels of several streams run at the same time.
Communication is exposed while a rank communicates and no kernel computes. Copies of memory count as neither. The parts
of operations are not additive, because operations overlap each other.

Only imported logs have the times in which devices compute (`commtrace.reading.device_work`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from commtrace.formatting import format_share, is_known
from commtrace.importing.enclosing import union
from commtrace.reading.device_work import Work, read_work, spans_of
from commtrace.reading.labels import ProcessIds
from commtrace.reading.process_reader import Process
from commtrace.reading.record_columns import RecordColumns
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import Clock

from .analysed_run import AnalysedRun
from .fold_engine import NamedTables, RunAnalysis
from .grouping import Array, concatenated_ranges
from .sections import Block, Paragraph, Report, Section, ShownTable, Tables
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, column, count, duration, share, text_of, word_column

ALL: Final = "all"

_PURPOSE: Final = word_column("purpose", "purpose", "Why the calls were made.")
_PARTS: Final = (
    duration("communication_ns", "communication", "Time in which at least one of these calls ran, over the ranks."),
    duration("hidden_ns", "hidden", "Part of it in which a kernel computed on the same rank."),
    duration("exposed_ns", "exposed", "communication_ns - hidden_ns."),
    share("overlap", "overlap", "hidden_ns / communication_ns."),
)  # fmt: skip
EXPOSED_COMMUNICATION: Final = TableSpec("exposed_communication", "Exposed communication by step",
    'A row per step, ascending, and one for all that the log has, "all". Sums over the ranks.', (
    column("", text_of, "step", "step", 'Training step, or "all".', kind="word"),
    count("ranks", "ranks", "Ranks whose devices' work is known."),
    duration("duration_ns", "duration", "Length of the step on the device."),
    duration("computation_ns", "computation", "Part of it in which a kernel computed."),
    *_PARTS,
    duration("idle_ns", "neither", "Part of it without computation or communication: copies of memory, and idle time."),
    share("exposed_share", "exposed share", "exposed_ns / duration_ns."),
))  # fmt: skip
OVERLAP_BY: Final = {
    name: TableSpec(f"overlap_by_{name}", f"Overlap with computation by {noun}",
        f"A row per {noun}, the longest exposed communication first. Rows overlap each other, and do not add up.", (
        key, count("calls", "calls", "Calls with device times."), *_PARTS,
    ))
    for name, noun, key in (
        ("operation", "operation", shared.OP), ("role", "dimension", shared.ROLE), ("purpose", "purpose", _PURPOSE),
    )
}  # fmt: skip
"""Tables of the overlap by their keys, by key."""

_KEYS: Final = {"operation": "op", "role": "role", "purpose": "purpose"}
_FIELDS: Final = ("t_start", "t_end", "kind", "group", "site", "clock")


class _DeviceCalls(NamedTuple):
    """Calls of a process with device times: begins and ends in ns, and labels by column, each of shape (n,)."""

    begin: Array
    end: Array
    labels: Mapping[str, Array]


def overlap_tables(run: AnalysedRun) -> NamedTables:
    """Return the tables `exposed_communication` and `overlap_by_...`."""
    steps: list[dict[str, Any]] = []
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in _KEYS}
    for ids, process in zip(run.labels.processes, run.processes, strict=True):
        if process.device is None:
            continue
        work = read_work(process.device)
        computation, calls = spans_of(work, Work.COMPUTATION), _device_calls(run, process, ids)
        steps += _steps(process, work, computation, union(calls.begin, calls.end))
        for name, key in _KEYS.items():
            parts[name] += _parts(key, calls, computation)
    return {
        EXPOSED_COMMUNICATION.name: _step_table(steps),
        **{OVERLAP_BY[name].name: _part_table(OVERLAP_BY[name], _KEYS[name], rows) for name, rows in parts.items()},
    }


def _device_calls(run: AnalysedRun, process: Process, ids: ProcessIds) -> _DeviceCalls:
    begins, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    texts: dict[str, list[Array]] = {key: [np.zeros(0, object)] for key in _KEYS.values()}
    for segment in process.segments:
        for block in segment.blocks():
            measured = block[(block["clock"] == Clock.DEVICE) & (block["t_start"] > 0)]
            records = RecordColumns.of(_FIELDS, len(measured)).fill(measured, ids)
            begins.append(records["t_start"])
            ends.append(records["t_end"])
            for key, columns in texts.items():
                columns.append(run.labels.text(key, run.labels.ids(key, records)))
    return _DeviceCalls(
        np.concatenate(begins), np.concatenate(ends), {key: np.concatenate(columns) for key, columns in texts.items()}
    )


def _steps(process: Process, work: Array, computation: Array, communication: Array) -> Iterator[dict[str, Any]]:
    """Yield the parts of each step of a process, and of all its work."""
    everything = [spans for spans in (computation, communication, spans_of(work, Work.COPY)) if len(spans)]
    if not everything:
        return
    rows = work[work["kind"] == Work.STEP]
    bounds = [(int(row["step"]), int(row["begin"]), int(row["end"])) for row in rows]
    first, last = min(int(spans[0, 0]) for spans in everything), max(int(spans[:, 1].max()) for spans in everything)
    both = intersection(communication, computation)
    for step, begin, end in (*bounds, (ALL, first, last)):
        computed, communicated, hidden = (
            length_within(spans, begin, end) for spans in (computation, communication, both)
        )
        yield {
            "step": step, "rank": process.rank, "duration_ns": end - begin, "computation_ns": computed,
            "communication_ns": communicated, "hidden_ns": hidden, "exposed_ns": communicated - hidden,
            "idle_ns": end - begin - computed - communicated + hidden,
        }  # fmt: skip


def _step_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    if not rows:
        return pd.DataFrame(columns=EXPOSED_COMMUNICATION.column_names)
    table = pd.DataFrame(rows)
    grouped = table.groupby("step", sort=False)
    sums = grouped.sum(numeric_only=True).drop(columns="rank").assign(ranks=grouped["rank"].nunique()).reset_index()
    sums["overlap"] = sums["hidden_ns"] / sums["communication_ns"].where(sums["communication_ns"] > 0)
    sums["exposed_share"] = sums["exposed_ns"] / sums["duration_ns"].where(sums["duration_ns"] > 0)
    number = sums["step"].map(lambda step: np.inf if step == ALL else step).astype(float)
    ordered = sums.iloc[np.argsort(number.to_numpy(), kind="stable")]
    return ordered.assign(step=ordered["step"].map(str))[EXPOSED_COMMUNICATION.column_names].reset_index(drop=True)


def _parts(key: str, calls: _DeviceCalls, computation: Array) -> Iterator[dict[str, Any]]:
    """Yield the overlap of the calls with each value of a key."""
    labels = calls.labels[key].astype(str)
    for label in np.unique(labels):
        at = labels == label
        spans = union(calls.begin[at], calls.end[at])
        communicated = length(spans)
        hidden = length(intersection(spans, computation))
        yield {
            key: label, "calls": int(at.sum()), "communication_ns": communicated, "hidden_ns": hidden,
            "exposed_ns": communicated - hidden,
        }  # fmt: skip


def _part_table(spec: TableSpec, key: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    if not rows:
        return pd.DataFrame(columns=spec.column_names)
    sums = pd.DataFrame(rows).groupby(key, as_index=False).sum()
    sums["overlap"] = sums["hidden_ns"] / sums["communication_ns"].where(sums["communication_ns"] > 0)
    ordered = sums.sort_values("exposed_ns", ascending=False, kind="stable", ignore_index=True)
    return ordered[spec.column_names]


def length(spans: Array) -> int:
    """Return the length of disjoint spans, shape (n, 2)."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def length_within(spans: Array, begin: int, end: int) -> int:
    """Return the length of disjoint spans, shape (n, 2), within bounds."""
    clipped = np.clip(spans, begin, max(begin, end))
    return length(clipped)


def intersection(spans: Array, others: Array) -> Array:
    """Return the intersection of two unions of spans, each ascending and disjoint, shape (n, 2)."""
    first = np.searchsorted(others[:, 1], spans[:, 0], side="right")
    stop = np.searchsorted(others[:, 0], spans[:, 1], side="left")
    lengths = np.maximum(stop - first, 0)
    own, other = np.repeat(np.arange(len(spans)), lengths), concatenated_ranges(first, lengths)
    begin = np.maximum(spans[own, 0], others[other, 0])
    end = np.minimum(spans[own, 1], others[other, 1])
    return np.stack([begin, end], axis=1)


def _findings(tables: Tables) -> Iterator[str]:
    table = tables[EXPOSED_COMMUNICATION.name]
    steps = table[table["step"] != ALL] if len(table) > 1 else table
    communication, duration_ns = steps["communication_ns"].sum(), steps["duration_ns"].sum()
    if not communication or not duration_ns:
        return
    exposed = steps["exposed_ns"].sum()
    what = "of the steps' time" if len(table) > 1 else "of the traced time"
    yield (
        f"Exposed communication takes {format_share(exposed / duration_ns)} {what}: computation hides "
        f"{format_share(1 - exposed / communication)} of the communication."
    )


def _warnings(run: RecordedRun, tables: Tables) -> Iterator[str]:
    table = tables[EXPOSED_COMMUNICATION.name]
    if len(table) and not table.loc[table["step"] == ALL, "computation_ns"].sum():
        yield "The log has no kernels that compute: all communication counts as exposed."


def _show(report: Report) -> Iterator[Block]:
    steps = report.tables[EXPOSED_COMMUNICATION.name]
    if not len(steps):
        return
    yield ShownTable(EXPOSED_COMMUNICATION, steps.tail(report.max_rows))
    for spec in OVERLAP_BY.values():
        rows = report.tables[spec.name]
        if len(rows) > 1 or spec is OVERLAP_BY["operation"]:
            yield ShownTable(spec, rows.head(report.max_rows))
    if not is_known(steps["overlap"].iloc[-1]):
        yield Paragraph("No call has device times.")


ANALYSIS: Final = RunAnalysis("overlap", overlap_tables)
OVERLAP_SECTION: Final = Section(
    "overlap",
    "Computation beside communication, on the devices",
    (EXPOSED_COMMUNICATION, *OVERLAP_BY.values()),
    (ANALYSIS,),
    blocks=_show,
    look_for="Operations with much exposed time: communication that no computation hides.",
    absent="Only imported traces of devices have the times in which kernels compute.",
    findings=_findings,
    warnings=_warnings,
)
