"""Sums of the waits and transfers of calls (`call_times`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.grouping import Array, group_rows, sum_groups
from commtrace.analyses.host_times import busbw_factors
from commtrace.analyses.record_blocks import RecordBlock, steps_of
from commtrace.analyses.sections import Block, Paragraph, Report, Section, ShownTable, Tables
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.equivalent_ranks import ALIKE
from commtrace.analyses.table_specs.spec import TableSpec, column, count, duration, share, word_column
from commtrace.durations import exact_ends
from commtrace.formatting import format_bandwidth, format_share
from commtrace.operations import OPERATIONS

from .call_times import COLUMNS, CallTimes
from .matching import match_calls

CALLS_AT_ONCE: Final = 4_000_000
"""Calls that are matched at a time; a longer log is read several times."""
SAMPLED_CALLS: Final = 200_000
"""Calls of the sample that the table `waiting` is made from."""
SIGNIFICANT_WAIT: Final = 0.2
"""Share of the time in calls from which waiting is a finding."""

_WAITS_SHOWN: Final = "calls duration_ns wait_ns wait_min_ns wait_max_ns transfer_ns wait_share"
_WAITS: Final = (
    count("calls", "calls", "Calls whose wait is known.", measured=True),
    count("calls_unknown", "not known", "Calls whose wait is not known.", measured=True),
    duration("duration_ns", "in calls", "Time from start to end of these calls, summed."),
    duration("wait_ns", "wait", "Part of it before the last rank that the call depends on arrived: the middle of the "
        "bounds from the hosts' clocks, 0 if the lower bound is 0."),
    duration("wait_min_ns", "wait (min)", "Lower bound of the wait; wait_ns on one host."),
    duration("wait_max_ns", "wait (max)", "Upper bound of the wait; wait_ns on one host."),
    duration("transfer_ns", "transfer", "duration_ns - wait_ns; an upper bound if ends were observed late."),
    share("wait_share", "wait share", "wait_ns / duration_ns."),
)  # fmt: skip
_BUS_BANDWIDTHS: Final = (
    column("GB/s", format_bandwidth, "busbw_gb_per_s", "busbw",
        "Bus bytes / duration of the calls with exact ends; missing for operations without a factor."),
    column("GB/s", format_bandwidth, "transfer_busbw_gb_per_s", "in transfer", "The same over transfer_ns alone."),
)  # fmt: skip
WAITING: Final = TableSpec("waiting", "Waiting for other ranks", "One row, for a sample of the operations.", (
    count("every", "every n-th", "n: the sample is every n-th operation of each group; 1: all."),
    *_WAITS,
))  # fmt: skip
WAITS_BY: Final = {
    name: TableSpec(f"waits_by_{name}", f"Wait and transfer by {noun}",
        f"A row per {noun}, {order}. Only calls of groups of two or more ranks.", (
        key, *_WAITS, *_BUS_BANDWIDTHS,
    ), {"terminal": f"{key.name} {_WAITS_SHOWN} busbw_gb_per_s transfer_busbw_gb_per_s"},
        merge_by="rank" if name == "rank" else "")
    for name, noun, key, order in (
        ("operation", "operation", shared.OP, "the longest wait first"),
        ("role", "dimension", shared.ROLE, "the longest wait first"),
        ("rank", "rank", shared.RANK, "ascending"),
        ("site", "call site", shared.SITE, "the longest wait first"),
        ("step", "step", shared.STEP, "ascending"),
    )
}  # fmt: skip
"""Tables of waits by their keys, by key."""
WAIT_PATTERNS: Final = TableSpec("wait_patterns", "Wait patterns", "A row per pattern, the longest wait first.", (
    word_column("pattern", "pattern",
        "Scalasca's name: \"wait at n x n\", \"wait at barrier\", \"late broadcast\" (and scatter), "
        "\"early reduce\" (and gather), \"late sender\", \"late receiver\"."),
    *_WAITS,
), {"terminal": f"pattern {_WAITS_SHOWN}"})  # fmt: skip

_KEYS: Final = {"operation": "op", "role": "role", "rank": "rank", "site": "site", "step": "step"}
_SUMS: Final = (
    "calls", "calls_unknown", "duration_ns", "wait_ns", "wait_min_ns", "wait_max_ns", "transfer_ns", "bus_bytes",
    "bus_ns", "bus_transfer_ns",
)  # fmt: skip


def wait_tables(run: AnalysedRun) -> NamedTables:
    """Return the tables `waits_by_...` and `wait_patterns`."""
    records = sum(segment.count for process in run.processes for segment in process.segments)
    parts = -(-records // CALLS_AT_ONCE) or 1
    sums = [_sums(run, [*_KEYS], (number, parts)) for number in range(parts)]
    tables = {
        WAITS_BY[name].name: _sum_table(WAITS_BY[name], _KEYS[name], pd.concat([part[name] for part in sums]))
        for name in _KEYS
    }
    pattern_of = {name: operation.wait_state for name, operation in OPERATIONS.items()}
    by_pattern = pd.concat([part["operation"] for part in sums])
    by_pattern = by_pattern.assign(pattern=by_pattern["op"].map(pattern_of)).dropna(subset="pattern")
    return {**tables, "wait_patterns": _sum_table(WAIT_PATTERNS, "pattern", by_pattern.drop(columns="op"))}


def sampled_waiting(run: AnalysedRun) -> NamedTables:
    """Return the table `waiting`: sums over a sample of the operations, cheap to compute."""
    records = sum(segment.count for process in run.processes for segment in process.segments)
    every = _next_prime(-(-records // SAMPLED_CALLS) or 1)
    by_operation = _sums(run, ["operation"], (0, every))["operation"]
    total = by_operation.drop(columns="op").sum().to_frame().T.assign(every=every)
    return {"waiting": _with_shares(total)[WAITING.column_names]}


def _next_prime(every: int) -> int:
    """Return the smallest prime >= `every`: it is unlikely to divide a program's period."""
    while every > 2 and any(every % divisor == 0 for divisor in range(2, int(every**0.5) + 1)):
        every += 1
    return every


def _sums(run: AnalysedRun, names: Sequence[str], part: tuple[int, int]) -> dict[str, pd.DataFrame]:
    """Return sums of the waits of a part of the operations, by each key of `names` (_KEYS)."""
    rank_of = np.array([process.rank for process in run.processes], np.int64)
    derived = {**COLUMNS, "bus_bytes": _bus_bytes}
    if "step" in names:
        derived["step"] = steps_of
    labels = [_KEYS[name] for name in names if name not in ("rank", "step")]
    calls = match_calls(run, labels, derived=derived, part=part)
    times = CallTimes.of(calls, run.clocks)
    counted = np.isin(calls["operation"], _SPLIT_OPERATIONS)
    at = np.flatnonzero(counted)
    bus = np.where(times.known, calls["bus_bytes"], 0.0)
    values = {
        "calls": times.known.astype(np.int64),
        "calls_unknown": (~times.known).astype(np.int64),
        "duration_ns": times.duration, "wait_ns": times.wait, "wait_min_ns": times.shortest,
        "wait_max_ns": times.longest, "transfer_ns": times.transfer,
        "bus_bytes": bus, "bus_ns": np.where(bus > 0, times.duration, 0),
        "bus_transfer_ns": np.where(bus > 0, times.transfer, 0),
    }  # fmt: skip
    tables = {}
    for name in names:
        column = _KEYS[name]
        keys = rank_of[calls["process"]] if name == "rank" else calls[column]
        first, groups = group_rows([keys[at]])
        labels_of = calls.text(column, at[first]) if column in calls.categories else keys[at][first]
        sums = {value: sum_groups(all_values[at], groups, len(first)) for value, all_values in values.items()}
        tables[name] = pd.DataFrame({column: labels_of, **sums})
    return tables


_SPLIT_OPERATIONS: Final = [
    number for number, (_, operation) in enumerate(sorted(OPERATIONS.items())) if operation.wait_state is not None
]
"""Numbers (`operations`) of the operations whose waits are known."""


def _bus_bytes(block: RecordBlock) -> Array:
    """Return the bus bytes of each call whose end is exact, float64, shape (n,); 0 for others."""
    sizes = block.labels.group_sizes(block["group"])
    factors = busbw_factors(block.labels, block["kind"], np.maximum(sizes, 2))
    known = exact_ends(block) & (sizes > 1) & ~np.isnan(factors)
    return block["payload"] * np.where(known, factors, 0.0)


def _sum_table(spec: TableSpec, key: str, sums: pd.DataFrame) -> pd.DataFrame:
    table = _with_shares(sums.groupby(key, as_index=False)[[*_SUMS]].sum())
    numbered = key in ("rank", "step")
    ordered = table.sort_values(key if numbered else "wait_ns", ascending=numbered, kind="stable", ignore_index=True)
    return ordered[spec.column_names]


def _with_shares(table: pd.DataFrame) -> pd.DataFrame:
    duration, bus, transfer = (
        table[name].where(table[name] > 0) for name in ("duration_ns", "bus_ns", "bus_transfer_ns")
    )
    return table.assign(
        wait_share=table["wait_ns"] / duration,
        busbw_gb_per_s=table["bus_bytes"] / bus,
        transfer_busbw_gb_per_s=(table["bus_bytes"] / transfer).where(bus.notna()),
    )


ANALYSIS: Final = RunAnalysis("waits", wait_tables)
SAMPLE: Final = RunAnalysis("waiting", sampled_waiting)


def _show_waits(report: Report) -> Iterator[Block]:
    if report.simulated:
        yield Paragraph("Not available: this is a dry run, which sends nothing.")
        return
    for spec in (WAIT_PATTERNS, *(WAITS_BY[key] for key in ("operation", "role", "rank", "site"))):
        rows = report.rows(spec)
        complete = spec in (WAIT_PATTERNS, WAITS_BY["operation"]) or ALIKE in rows
        if spec is not WAITS_BY["role"] or len(rows) > 1:
            yield ShownTable(spec, rows if complete else rows.head(report.sites or len(rows)))
    yield Paragraph("Wait: the part of a call before the last rank that it depends on arrives. By step: --json.")


def _waiting(tables: Tables) -> Iterator[str]:
    """Yield the share of the time in calls that is certainly waiting, if it is large."""
    waiting = tables["waiting"].iloc[0]
    duration, least = waiting["duration_ns"], waiting["wait_min_ns"]
    if duration and least / duration >= SIGNIFICANT_WAIT:
        most = waiting["wait_max_ns"] / duration
        between = "" if most - least / duration < 0.005 else f" to {format_share(most)}"
        yield (
            f"{format_share(least / duration)}{between} of the time in calls is waiting for ranks that arrive later "
            "(--sections waiting)."
        )


WAITING_SECTION: Final = Section(
    "waiting",
    "Wait and transfer",
    (WAITING, WAIT_PATTERNS, *WAITS_BY.values()),
    (SAMPLE,),
    on_request=(ANALYSIS,),
    blocks=_show_waits,
    default=False,
    findings=_waiting,
)
