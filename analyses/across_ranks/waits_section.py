"""Sums of the waits and transfers of calls (`call_times`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import NamedTables, NeededCalls, RunAnalysis
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

from .call_times import CallTimes
from .matching import MatchedCalls

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
    sums = [_sums(run, calls, [*_KEYS]) for calls in run.matched_calls()]
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
    samples = run.matched_calls(sampled=True)
    total = pd.concat([_sums(run, sample, ["rank"])["rank"][[*_SUMS]] for sample in samples]).sum()
    table = total.to_frame().T.assign(every=run.sampled_every)
    return {"waiting": _with_shares(table)[WAITING.column_names]}


def _sums(run: AnalysedRun, calls: MatchedCalls, names: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return sums of the waits of calls, by each key of `names` (_KEYS); a value of a key may have several rows."""
    times = CallTimes.of(calls, run.clocks)
    at = np.flatnonzero(np.isin(calls["operation"], _SPLIT_OPERATIONS))
    # Ranks are summed on their own: there would be nearly as many combinations with them as calls.
    columns = [_KEYS[name] for name in names if name != "rank"]
    tables = {"rank": _sum_by({"process": calls["process"][at]}, times, at)} if "rank" in names else {}
    combined = _sum_by({column: calls[column][at] for column in columns}, times, at) if columns else None
    for name in names:
        if name == "rank":
            rank_of = np.array([process.rank for process in run.processes], np.int64)
            tables[name] = tables[name].assign(rank=rank_of[tables[name]["process"]])
        elif combined is not None:
            column = _KEYS[name]
            sums = combined.groupby(column, as_index=False)[[*_SUMS]].sum()
            labels = calls.categories.get(column)
            tables[name] = sums if labels is None else sums.assign(**{column: labels[sums[column]]})
    return tables


def _sum_by(keys: Mapping[str, Array], times: CallTimes, at: Array) -> pd.DataFrame:
    """Return the sums _SUMS of the calls with indices `at`, a row per combination of their keys, shape (n,)."""
    first, groups = group_rows([*keys.values()])
    sums = {name: sum_groups(values, groups, len(first)) for name, values in _values(times, at)}
    return pd.DataFrame({**{name: key[first] for name, key in keys.items()}, **sums})


def _values(times: CallTimes, at: Array) -> Iterator[tuple[str, Array]]:
    """Yield the values to sum, by name, of the calls with indices `at`."""
    known, duration, wait = times.known[at], times.duration[at], times.wait[at]
    yield "calls", known.astype(np.int64)
    yield "calls_unknown", (~known).astype(np.int64)
    yield "duration_ns", duration
    yield "wait_ns", wait
    yield "wait_min_ns", times.shortest[at]
    yield "wait_max_ns", times.longest[at]
    yield "transfer_ns", duration - wait
    bus = np.where(known, times.calls["bus_bytes"][at] if "bus_bytes" in times.calls.columns else 0.0, 0.0)
    yield "bus_bytes", bus
    yield "bus_ns", np.where(bus > 0, duration, 0)
    yield "bus_transfer_ns", np.where(bus > 0, duration - wait, 0)


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


_CALLS: Final = NeededCalls(("op", "role", "site"), {"step": steps_of, "bus_bytes": _bus_bytes})
ANALYSIS: Final = RunAnalysis("waits", wait_tables, _CALLS)
SAMPLE: Final = RunAnalysis("waiting", sampled_waiting, NeededCalls())


def _show_waits(report: Report) -> Iterator[Block]:
    if report.simulated:
        yield Paragraph("Not available: this is a dry run, which sends nothing.")
        return
    if not report.rows(WAITS_BY["operation"])["calls"].any():
        yield Paragraph("Not available: of no call it is known how long it lasted.")
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
