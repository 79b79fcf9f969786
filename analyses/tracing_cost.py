"""Cost of tracing each process of a run.

The recording kernels of the hooks measure a sample of their calls, and `recording/counters.py` sums them for the table
`stats` of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.formatting import format_duration, format_small_share
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.table_reader import integer_or_none

from .fold_engine import Analysis, NamedTables
from .grouping import group_rows, merge_sums
from .record_blocks import RecordBlock
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, column, count, duration

TRACING_COST: Final = TableSpec("tracing_cost", "Tracing cost", "A row per process that wrote its counters.", (
    shared.RANK,
    column("", str, "pid", "pid", "Process identifier."),
    count("calls", "calls", "Calls that were recorded or counted."),
    duration("mean_ns", "mean",
        "Time of recording one call in commtrace's code, mean of samples of this run. The way there, and what it "
        "displaces from caches, are not in it: after computation, up to as much again."),
    duration("p99_ns", "p99", "Its 99th percentile."),
    count("first_calls", "first calls", "Calls that looked up a call site, operator or group for the first time."),
    duration("first_mean_ns", "first mean",
        "Mean cost of recording one of them; missing if there are none, or in logs of an older commtrace."),
    duration("steady_mean_ns", "steady mean",
        "Mean cost of recording one of the other calls, from samples; missing likewise."),
    duration("calls_ns", "all calls", "mean_ns times calls."),
    duration("drain_ns", "writing", "Processor time of the thread that writes the log."),
    duration("span_ns", "run", "Time from the process's first line in the log to its last."),
    column("fraction", format_small_share, "share", "share",
        "(calls_ns + drain_ns) / span_ns. Hooks between calls are not in it: with them, a step of torch's trainings "
        "became longer by up to six times that."),
), merge_by="rank")  # fmt: skip
NOT_MEASURED: Final = (
    "not measured: the way to the recorder and back, with which a call of torch takes about 1.4 times that, and hooks "
    "between calls, with which a step takes up to six times that (by benchmarks of the native recorder)"
)


def _partial(block: RecordBlock) -> pd.DataFrame:
    example, process = group_rows([block["process"]])
    first, last = np.full(len(example), np.iinfo(np.int64).max), np.zeros(len(example), np.int64)
    for name in ("t_begin", "t_return", "t_wait", "t_end"):
        known = np.flatnonzero(block[name] > 0)
        np.minimum.at(first, process[known], block[name][known])
        np.maximum.at(last, process[known], block[name][known])
    spans = pd.DataFrame({"process": block["process"][example], "first_ns": first, "last_ns": last})
    return spans.loc[last > 0]


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    call_times = {number: (first, last) for number, first, last in table.itertuples(index=False)}
    rows = [
        _row(process, call_times.get(number, ()))
        for number, process in enumerate(run.processes)
        if process.tables.stats
    ]
    columns = TRACING_COST.column_names
    types = dict.fromkeys(columns, "Int64") | {"rank": "int64", "pid": "int64", "share": "float64"}
    return {"tracing_cost": pd.DataFrame(rows, columns=columns).astype(types)}


def _row(process: Process, call_times: Sequence[int]) -> dict[str, object]:
    stats = process.tables.stats or {}
    calls, samples, total = (integer_or_none(stats.get(name)) for name in ("calls", "cost_samples", "cost_ns"))
    mean = total / samples if samples and total is not None else None
    calls_ns = round(mean * calls) if mean is not None and calls is not None else None
    drain = integer_or_none(stats.get("drain_cpu_ns"))
    table_rows = (process.tables.process, stats, process.tables.end or {})
    times = [*call_times, *filter(None, (integer_or_none(row.get("mono_ns")) for row in table_rows))]
    span = max(times) - min(times) if times else None
    return {
        "rank": process.rank,
        "pid": process.pid,
        "calls": calls,
        "mean_ns": None if mean is None else round(mean),
        "p99_ns": integer_or_none(stats.get("cost_p99_ns")) if samples else None,
        "first_calls": integer_or_none(stats.get("first_calls")),
        "first_mean_ns": _mean(stats, "first_ns", "first_calls"),
        "steady_mean_ns": _mean(stats, "steady_ns", "steady_samples"),
        "calls_ns": calls_ns,
        "drain_ns": drain,
        "span_ns": span,
        "share": None if calls_ns is None or drain is None or not span else (calls_ns + drain) / span,
    }


def _mean(stats: Mapping[str, object], total: str, count: str) -> int | None:
    total_ns, calls = integer_or_none(stats.get(total)), integer_or_none(stats.get(count))
    return round(total_ns / calls) if calls and total_ns is not None else None


ANALYSIS: Final = Analysis("cost", _partial, merge_sums("process", first_ns="min", last_ns="max"), _finish)


def cost_per_call(cost: pd.DataFrame) -> str:
    """Return the cost of recording a call as text, separately for steady and first calls if the log has both."""
    split = cost.dropna(subset=["first_mean_ns", "steady_mean_ns"])
    first_calls, steady_calls = split["first_calls"], split["calls"] - split["first_calls"]
    if not steady_calls.sum():
        calls = cost["calls"].sum()
        return f"{format_duration(cost['calls_ns'].sum() / calls if calls else None)} a call"
    steady = (split["steady_mean_ns"] * steady_calls).sum() / steady_calls.sum()
    first = (split["first_mean_ns"] * first_calls).sum() / first_calls.sum()
    return f"{format_duration(steady)} a call (first call of a call site: {format_duration(first)})"


def describe_cost(cost: pd.DataFrame, processes: int) -> str:
    """Return the tracing cost of a run of so many processes as text, from the table `tracing_cost`."""
    known = cost.dropna(subset=["share"])
    if not len(known):
        return "not known"
    text = f"{cost_per_call(known)}, p99 {format_duration(known['p99_ns'].max())}; with writing to disk "
    text += f"{format_small_share(known['share'].mean())} of the run's time"
    if len(known) < processes:
        text = f"on {len(known):,} of {processes:,} processes: {text}"
    if len(known) > 1:
        worst = known.iloc[int(known["share"].to_numpy().argmax())]
        text += f", at most {format_small_share(worst['share'])} (rank {int(worst['rank'])})"
    return f"{text}; {NOT_MEASURED}"
