"""Wait and transfer: the time of each call before the last rank that it waits for arrived, and the rest.

    wait        from the call's begin until the last of the calls that it waits for has begun (`dependencies`)
    transfer    from then to its end; wait + transfer is exactly the call's duration

A call that waits for no other (a send, the root of a broadcast) has no wait, except a send that
lasts until its receive begins. Within one host, the wait is exact. Between hosts, it lies in an
interval, from the bounds of their clocks: `wait` is its middle, or 0 if the interval begins at 0.
Calls without a bounded interval, without a known end, or of operations that are not in the log of
all ranks are left out. Where ranks may have no bytes for each other (uneven all_to_alls), the
interval begins at 0. If an end is observed late, the delay counts as transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.call_times import busbw_factors, exact_ends
from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.grouping import Array, group_rows, positions_by_value, sum_groups
from commtrace.analyses.record_blocks import RecordBlock, steps_of
from commtrace.analyses.table_specs import TABLES
from commtrace.durations import has_own_times
from commtrace.operations import OPERATIONS
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import State

from .clocks import Clocks, clocks_of
from .dependencies import SOURCE, TARGET, UNCERTAIN, agree, arrivals, dependencies, operations
from .matching import Derived, MatchedCalls, match_calls

CALLS_AT_ONCE: Final = 4_000_000
"""Calls that are matched at a time; a longer log is read several times."""
SAMPLED_CALLS: Final = 200_000
"""Calls of the sample that the table `waiting` is made from."""

_KEYS: Final = {"operation": "op", "role": "role", "rank": "rank", "site": "site", "step": "step"}
_NEVER, _ALWAYS = np.iinfo(np.int64).max, np.iinfo(np.int64).min
_SUMS: Final = (
    "calls", "calls_unknown", "duration_ns", "wait_ns", "wait_min_ns", "wait_max_ns", "transfer_ns", "bus_bytes",
    "bus_ns", "bus_transfer_ns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Waits:
    """Waits of calls, each of shape (calls,), in the order of `MatchedCalls`; ns.

    Attributes:
        known: Whether anything is known about the wait, bool; the other values are 0 where not.
        duration: From begin (on a device: start) to end.
        wait: The wait.
        shortest: Lower bound of the wait.
        longest: Upper bound.
    """

    known: Array
    duration: Array
    wait: Array
    shortest: Array
    longest: Array

    @property
    def transfer(self) -> Array:
        """The rest of the duration."""
        return np.asarray(self.duration - self.wait)


def ends(block: RecordBlock) -> Array:
    """Return the observed end of each call in ns, shape (n,), 0 where it was not observed."""
    return np.where((block["state"] == State.COMPLETE) & has_own_times(block), block["t_end"], 0)


COLUMNS: Final[dict[str, Derived]] = {
    "arrival": arrivals, "end": ends, "depends": dependencies, "operation": operations,
}  # fmt: skip
"""Derived columns (`match_calls`) that `waits_of` needs."""


def waits_of(calls: MatchedCalls, clocks: Clocks) -> Waits:
    """Split the durations of calls into wait and transfer.

    Args:
        calls: Matched calls with the columns COLUMNS.
        clocks: The clocks of their hosts.
    """
    arrival, end, depends, instance = (calls[name] for name in ("arrival", "end", "depends", "instance"))
    sources = (depends & (SOURCE | UNCERTAIN)) > 0
    is_message = np.array([channel.source >= 0 for channel in calls.channels], bool)[calls.channel]
    of_message = (instance >= 0) & is_message[instance] if len(is_message) else np.zeros(len(calls), bool)
    usable = (instance >= 0) & (arrival > 0) & (end >= arrival)
    if len(calls.channel):
        usable &= (calls.complete & agree(calls) & (calls.expected > 1))[instance]
    usable &= (depends & (SOURCE | TARGET | UNCERTAIN)) > 0
    first, last = last_arrivals(calls, sources, clocks)
    sends = of_message & sources
    if sends.any():
        receive_first, receive_last = last_arrivals(calls, of_message & ~sources, clocks)
        # A buffered send has ended before its receive begins: it does not wait.
        first = np.where(sends, np.where(receive_first <= end, receive_first, 0), first)
        last = np.where(sends, np.where(receive_first <= end, receive_last, 0), last)
    waiting = ((depends & (TARGET | UNCERTAIN)) > 0) | sends
    duration = np.where(usable, end - arrival, 0)
    shortest, longest = (
        np.where(usable & waiting, np.clip(moment, arrival, np.maximum(end, arrival)) - arrival, 0)
        for moment in (first, last)
    )
    if len(calls.channel):
        shortest[(calls.largest(depends & UNCERTAIN) > 0)[instance]] = 0
    known = usable & ~((shortest == 0) & (longest == duration) & (longest > 0))
    wait = np.where(shortest > 0, shortest + (longest - shortest) // 2, 0)
    return Waits(known, *(np.where(known, values, 0) for values in (duration, wait, shortest, longest)))


def last_arrivals(calls: MatchedCalls, sources: Array, clocks: Clocks) -> tuple[Array, Array]:
    """Return bounds on the last arrival of a source of each call's instance, on its host's clock.

    Args:
        calls: Matched calls with the column "arrival".
        sources: Whether each call counts, bool, shape (calls,).
        clocks: The clocks of their hosts.

    Returns:
        Lower and upper bounds in ns, int64, shape (calls,); meaningless for calls without an
        instance.
    """
    hosts = {
        host: calls.matched[at]
        for host, at in positions_by_value(clocks.host_of_process[calls["process"][calls.matched]]).items()
    }
    own = np.full(len(calls), _ALWAYS)
    lower, upper = np.zeros((2, len(calls)), np.int64)
    earliest, latest, second, on_host = np.full((4, len(calls.channel)), _ALWAYS)
    latest_host = np.full(len(calls.channel), -1)
    for host, rows in hosts.items():
        here = calls["instance"][rows[sources[rows]]]
        np.maximum.at(on_host, here, calls["arrival"][rows[sources[rows]]])
        own[rows], arrived = on_host[calls["instance"][rows]], on_host[here]
        on_host[here] = _ALWAYS
        clock = clocks.aligned[host]
        if len(hosts) == 1:
            continue
        if clock is None:
            bounds = np.full(len(here), _ALWAYS), np.full(len(here), _NEVER)
        else:
            bounds = clock.to_reference(arrived)
        # An instance with several calls on the host occurs several times, with the same values.
        earliest[here] = np.maximum(earliest[here], bounds[0])
        is_last = bounds[1] > latest[here]
        second[here] = np.where(is_last, latest[here], np.maximum(second[here], bounds[1]))
        latest[here[is_last]], latest_host[here[is_last]] = bounds[1][is_last], host
    for host, rows in hosts.items():
        clock, instance = clocks.aligned[host], calls["instance"][rows]
        elsewhere = np.where(latest_host[instance] == host, second[instance], latest[instance])
        first, last = np.full((2, len(rows)), _ALWAYS)
        known = (elsewhere != _ALWAYS) & (elsewhere != _NEVER)
        last[elsewhere == _NEVER] = _NEVER
        if clock is None:
            last[known] = _NEVER
        elif known.any():
            from_others = np.where(earliest[instance[known]] == _ALWAYS, elsewhere[known], earliest[instance[known]])
            first[known], last[known] = clock.from_reference(from_others, elsewhere[known])
            first[known] = np.where(earliest[instance[known]] == _ALWAYS, _ALWAYS, first[known])
        lower[rows], upper[rows] = np.maximum(own[rows], first), np.maximum(own[rows], last)
    return lower, upper


def wait_tables(run: RecordedRun) -> NamedTables:
    """Return the tables `waits_by_...` and `wait_patterns`."""
    records = sum(segment.count for process in run.processes for segment in process.segments)
    parts = -(-records // CALLS_AT_ONCE) or 1
    sums = [_sums(run, [*_KEYS], (number, parts)) for number in range(parts)]
    tables = {
        f"waits_by_{name}": _sum_table(f"waits_by_{name}", _KEYS[name], pd.concat([part[name] for part in sums]))
        for name in _KEYS
    }
    pattern_of = {name: operation.wait_state for name, operation in OPERATIONS.items()}
    by_pattern = pd.concat([part["operation"] for part in sums])
    by_pattern = by_pattern.assign(pattern=by_pattern["op"].map(pattern_of)).dropna(subset="pattern")
    return {**tables, "wait_patterns": _sum_table("wait_patterns", "pattern", by_pattern.drop(columns="op"))}


def sampled_waiting(run: RecordedRun) -> NamedTables:
    """Return the table `waiting`: sums over a sample of the operations, cheap to compute."""
    records = sum(segment.count for process in run.processes for segment in process.segments)
    every = _next_prime(-(-records // SAMPLED_CALLS) or 1)
    by_operation = _sums(run, ["operation"], (0, every))["operation"]
    total = by_operation.drop(columns="op").sum().to_frame().T.assign(every=every)
    return {"waiting": _with_shares(total)[TABLES["waiting"].column_names]}


def _next_prime(every: int) -> int:
    """Return the smallest prime >= `every`: it is unlikely to divide a program's period."""
    while every > 2 and any(every % divisor == 0 for divisor in range(2, int(every**0.5) + 1)):
        every += 1
    return every


def _sums(run: RecordedRun, names: Sequence[str], part: tuple[int, int]) -> dict[str, pd.DataFrame]:
    """Return sums of the waits of a part of the operations, by each key of `names` (_KEYS)."""
    rank_of = np.array([process.rank for process in run.processes], np.int64)
    derived = {**COLUMNS, "bus_bytes": _bus_bytes}
    if "step" in names:
        derived["step"] = steps_of
    labels = [_KEYS[name] for name in names if name not in ("rank", "step")]
    calls = match_calls(run, labels, derived=derived, part=part)
    waits = waits_of(calls, clocks_of(run))
    counted = np.isin(calls["operation"], _SPLIT_OPERATIONS)
    at = np.flatnonzero(counted)
    bus = np.where(waits.known, calls["bus_bytes"], 0.0)
    values = {
        "calls": waits.known.astype(np.int64),
        "calls_unknown": (~waits.known).astype(np.int64),
        "duration_ns": waits.duration, "wait_ns": waits.wait, "wait_min_ns": waits.shortest,
        "wait_max_ns": waits.longest, "transfer_ns": waits.transfer,
        "bus_bytes": bus, "bus_ns": np.where(bus > 0, waits.duration, 0),
        "bus_transfer_ns": np.where(bus > 0, waits.transfer, 0),
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


def _sum_table(name: str, key: str, sums: pd.DataFrame) -> pd.DataFrame:
    table = _with_shares(sums.groupby(key, as_index=False)[[*_SUMS]].sum())
    numbered = key in ("rank", "step")
    ordered = table.sort_values(key if numbered else "wait_ns", ascending=numbered, kind="stable", ignore_index=True)
    return ordered[TABLES[name].column_names]


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
