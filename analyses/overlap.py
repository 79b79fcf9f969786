"""Computation beside communication: exposed communication, and overlap by operation, dimension and purpose.

Times are lengths of unions of spans on a rank, never sums: several operations are in flight, and kernels of several
streams run, at the same time. Communication is exposed while a rank communicates and does not compute. The parts of
operations are not additive, because operations overlap each other.

    logs of devices   (imported; `commtrace.reading.device_work`) a rank computes while a kernel does, and communicates
                      while kernels of calls run; copies of memory are neither; the whole traced time
    recorded logs     whose ends were observed on the host: a rank computes while no call blocks it (`blocked_time`),
                      and communicates while operations are in flight; the steps that `critical_paths` examines

A device's own computation is not known in a recorded log: there are no tables for runs with ends on devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from .across_ranks.blocked_time import covered_ns
from .analysed_run import AnalysedRun
from .fold_engine import NamedTables, RunAnalysis
from .grouping import Array, concat_tables, concatenated_ranges, group_rows, positions_by_value
from .sections import Block, Paragraph, Report, Section, ShownTable, Tables
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, column, count, duration, share, text_of, word_column

ALL: Final = "all"

_PURPOSE: Final = word_column("purpose", "purpose", "Why the calls were made.")
_PARTS: Final = (
    duration("communication_ns", "communication", "Time in which at least one of these calls ran, over the ranks."),
    duration("hidden_ns", "hidden", "Part of it in which the same rank computed."),
    duration("exposed_ns", "exposed", "communication_ns - hidden_ns."),
    share("overlap", "overlap", "hidden_ns / communication_ns."),
)  # fmt: skip
EXPOSED_COMMUNICATION: Final = TableSpec("exposed_communication", "Exposed communication by step",
    'A row per step, ascending, and one for all that the log has, "all". Sums over the ranks.', (
    column("", text_of, "step", "step", 'Training step, or "all".', kind="word"),
    count("ranks", "ranks", "Ranks whose work is known."),
    duration("duration_ns", "duration", "Length of the step: on the device, or of the job's step on the host."),
    duration("computation_ns", "computation", "Part of it in which a kernel computed, or no call blocked the program."),
    *_PARTS,
    duration("idle_ns", "neither", "Part of it without computation or communication: copies of memory, idle time, and "
        "calls whose operation is not known to be in flight."),
    share("exposed_share", "exposed share", "exposed_ns / duration_ns."),
))  # fmt: skip
OVERLAP_BY: Final = {
    name: TableSpec(f"overlap_by_{name}", f"Overlap with computation by {noun}",
        f"A row per {noun}, the longest exposed communication first. Rows overlap each other, and do not add up.", (
        key, count("calls", "calls", "Calls whose begin and end are known."), *_PARTS,
    ))
    for name, noun, key in (
        ("operation", "operation", shared.OP), ("role", "dimension", shared.ROLE), ("purpose", "purpose", _PURPOSE),
    )
}  # fmt: skip
"""Tables of the overlap by their keys, by key."""

_KEYS: Final = {"operation": "op", "role": "role", "purpose": "purpose"}
_FIELDS: Final = ("t_start", "t_end", "kind", "group", "site", "clock")


class _TimedCalls(NamedTuple):
    """Operations of a process, each of shape (n,).

    Attributes:
        begin: Begins, ns.
        end: Ends, ns.
        labels: Labels by column (values of _KEYS).
        wait: When the program begins to wait for each, or would, if it had not ended, ns; None: not known.
    """

    begin: Array
    end: Array
    labels: Mapping[str, Array]
    wait: Array | None = None


class _RankWork(NamedTuple):
    """What one rank did.

    Attributes:
        rank: The rank.
        computation: Spans in which it computed, ascending and disjoint, shape (n, 2).
        calls: Its operations.
        steps: Number, begin and end of each step.
        whole: Begin and end of all that is known.
    """

    rank: int
    computation: Array
    calls: _TimedCalls
    steps: Sequence[tuple[int, int, int]]
    whole: tuple[int, int]


def device_overlap(run: AnalysedRun) -> NamedTables:
    """Return the tables `exposed_communication` and `overlap_by_...` of devices' work; no rows if none is known."""
    return _tables(_work_of_devices(run))


def host_overlap(run: AnalysedRun) -> NamedTables:
    """Return these tables of the steps of `critical_paths`; {} if they are those of devices' work."""
    return {} if _has_device_work(run) else _tables(_work_of_hosts(run))


def overlap_by_step(run: AnalysedRun) -> pd.DataFrame:
    """Return the overlap of each operation and purpose in each step, sums over the ranks.

    Returns:
        `step`, `op`, `purpose`, `step_ns`, `computation_ns`, `communication_ns`, `hidden_ns`, and `available_ns`: the
        computation between the begin of the operations and the waits for them, which could hide them; on devices, where
        waits are not known, that which does.
    """
    tables = [pd.DataFrame(columns=_OF_STEP)]
    for work in _work_of_devices(run) if _has_device_work(run) else _work_of_hosts(run):
        number, begin, end = np.array(work.steps, np.int64).reshape(-1, 3).T
        computed = covered_ns(work.computation, begin, end)
        for labels, at in _by_labels(("op", "purpose"), work.calls):
            spans = union(work.calls.begin[at], work.calls.end[at])
            hidden = intersection(spans, work.computation)
            until = work.calls.end if work.calls.wait is None else work.calls.wait
            available = intersection(union(work.calls.begin[at], until[at]), work.computation)
            lengths = (covered_ns(each, begin, end) for each in (spans, hidden, available))
            columns = number, *labels, end - begin, computed, *lengths
            tables.append(pd.DataFrame(dict(zip(_OF_STEP, columns, strict=True))))
    return concat_tables(tables).groupby(["step", "op", "purpose"], as_index=False).sum()


_OF_STEP: Final = (
    "step", "op", "purpose", "step_ns", "computation_ns", "communication_ns", "hidden_ns", "available_ns",
)  # fmt: skip


def _has_device_work(run: RecordedRun) -> bool:
    return any(process.device is not None for process in run.processes)


def _work_of_devices(run: AnalysedRun) -> Iterator[_RankWork]:
    for ids, process in zip(run.labels.processes, run.processes, strict=True):
        if process.device is None:
            continue
        work = read_work(process.device)
        computation, calls = spans_of(work, Work.COMPUTATION), _device_calls(run, process, ids)
        spans = np.concatenate([computation, union(calls.begin, calls.end), spans_of(work, Work.COPY)])
        if len(spans):
            rows = work[work["kind"] == Work.STEP]
            steps = [(int(row["step"]), int(row["begin"]), int(row["end"])) for row in rows]
            whole = int(spans[:, 0].min()), int(spans[:, 1].max())
            yield _RankWork(process.rank, computation, calls, steps, whole)


def _device_calls(run: AnalysedRun, process: Process, ids: ProcessIds) -> _TimedCalls:
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
    return _TimedCalls(
        np.concatenate(begins), np.concatenate(ends), {key: np.concatenate(columns) for key, columns in texts.items()}
    )


def _work_of_hosts(run: AnalysedRun) -> Iterator[_RankWork]:
    paths = run.step_paths
    if paths is None:
        return
    moments = paths.ends.max(axis=0)
    whole = int(moments[0]), int(moments[-1])
    steps = [*zip(paths.steps.tolist(), moments[:-1].tolist(), moments[1:].tolist(), strict=True)]
    begin, end = (paths.blocked.times[name] for name in ("arrival", "t_end"))
    in_flight = (begin > 0) & (end > begin) & (end > whole[0]) & (begin < whole[1])
    waits = paths.blocked.wait_begins()
    for process, line in paths.blocked.timelines.items():
        blocked = union(line.begin, line.end)
        bounds = np.concatenate([[whole[0]], np.clip(blocked, *whole).ravel(), [whole[1]]]).reshape(-1, 2)
        own = paths.calls.of_process(process)
        own = own[in_flight[own]]
        labels = {key: paths.calls.text(key, own) for key in _KEYS.values()}
        calls = _TimedCalls(np.clip(begin[own], *whole), np.clip(end[own], *whole), labels, waits[own])
        computation = bounds[bounds[:, 1] > bounds[:, 0]]
        yield _RankWork(run.processes[process].rank, computation, calls, steps, whole)


def _tables(ranks: Iterable[_RankWork]) -> NamedTables:
    steps: list[pd.DataFrame] = []
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in _KEYS}
    for work in ranks:
        steps.append(_steps(work))
        for name, key in _KEYS.items():
            parts[name] += _parts(key, work)
    return {
        EXPOSED_COMMUNICATION.name: _step_table(steps),
        **{OVERLAP_BY[name].name: _part_table(OVERLAP_BY[name], _KEYS[name], rows) for name, rows in parts.items()},
    }


def _steps(work: _RankWork) -> pd.DataFrame:
    """Return the parts of each step of a rank, and of all its work."""
    begin, end = np.array([*(bounds for _, *bounds in work.steps), work.whole], np.int64).T
    communication = union(work.calls.begin, work.calls.end)
    computed, communicated, hidden = (
        covered_ns(spans, begin, end)
        for spans in (work.computation, communication, intersection(communication, work.computation))
    )
    columns = {
        "duration_ns": end - begin, "computation_ns": computed, "communication_ns": communicated, "hidden_ns": hidden,
        "exposed_ns": communicated - hidden, "idle_ns": end - begin - computed - communicated + hidden,
    }  # fmt: skip
    return pd.DataFrame({"step": [*(step for step, *_ in work.steps), ALL], "rank": work.rank, **columns})


def _step_table(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    if not tables:
        return pd.DataFrame(columns=EXPOSED_COMMUNICATION.column_names)
    table = pd.concat(tables, ignore_index=True)
    grouped = table.groupby("step", sort=False)
    sums = grouped.sum(numeric_only=True).drop(columns="rank").assign(ranks=grouped["rank"].nunique()).reset_index()
    sums["overlap"] = sums["hidden_ns"] / sums["communication_ns"].where(sums["communication_ns"] > 0)
    sums["exposed_share"] = sums["exposed_ns"] / sums["duration_ns"].where(sums["duration_ns"] > 0)
    number = sums["step"].map(lambda step: np.inf if step == ALL else step).astype(float)
    ordered = sums.iloc[np.argsort(number.to_numpy(), kind="stable")]
    return ordered.assign(step=ordered["step"].map(str))[EXPOSED_COMMUNICATION.column_names].reset_index(drop=True)


def _parts(key: str, work: _RankWork) -> Iterator[dict[str, Any]]:
    """Yield the overlap of a rank's calls with each value of a key."""
    for (label,), at in _by_labels((key,), work.calls):
        spans = union(work.calls.begin[at], work.calls.end[at])
        communicated, hidden = length(spans), length(intersection(spans, work.computation))
        yield {
            key: label, "calls": len(at), "communication_ns": communicated, "hidden_ns": hidden,
            "exposed_ns": communicated - hidden,
        }  # fmt: skip


def _by_labels(keys: Sequence[str], calls: _TimedCalls) -> Iterator[tuple[tuple[str, ...], Array]]:
    """Yield the indices of the calls with each combination of labels."""
    coded = [pd.factorize(calls.labels[key].astype(str)) for key in keys]
    _, groups = group_rows([codes for codes, _ in coded])
    for at in positions_by_value(groups).values():
        yield tuple(str(values[codes[at[0]]]) for codes, values in coded), at


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
    if _has_device_work(run) and len(table) and not table.loc[table["step"] == ALL, "computation_ns"].sum():
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
        yield Paragraph("No call has a known begin and end.")


ANALYSIS: Final = RunAnalysis("overlap", device_overlap)
OF_HOSTS: Final = RunAnalysis("host_overlap", host_overlap)
OVERLAP_SECTION: Final = Section(
    "overlap",
    "Computation beside communication",
    (EXPOSED_COMMUNICATION, *OVERLAP_BY.values()),
    (ANALYSIS,),
    on_request=(OF_HOSTS,),
    blocks=_show,
    look_for="Operations with much exposed time: communication that no computation hides.",
    absent="It needs imported traces of devices, or ends of calls that were observed on the host in three steps.",
    findings=_findings,
    warnings=_warnings,
)
