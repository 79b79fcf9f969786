"""How long the calls took, as the host saw it, where it did.

`host_time`, a row per operation and measure:

    in_call          t_return - t_begin: the program is inside the call
    waiting          t_end - t_wait, where the program waited and the end is known on the host: the program stands still
                     (0 where a completion callback saw that the end was before the wait)
    to_completion    t_end - t_begin, where anybody saw the end

with `calls_known`, `calls_unknown`, and over the known ones `p50_ns`, `p99_ns` (of a histogram: right within 1 %),
`max_ns` and `sum_ns` (exact; calls that overlap are each counted in full). Calls captured into a device graph and
dry runs have times of something else, so theirs are unknown.

`bandwidth`, a row per operation and `end_seen_by`: over the calls of groups of two or more whose end is known, with a
payload, and not part of a coalesced batch: `calls`, `payload_bytes`, `time_ns`, `algbw_gb_per_s` = sum of payloads /
sum of times, `busbw_gb_per_s` (nccl-tests' factors for each call's own group; missing for operations that have none).
1 GB is 1e9 bytes. Time runs from `t_start` where the device told, else from `t_begin`, to `t_end`. An end that a wait
or a poll saw may have been earlier: those bandwidths are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.labels import RecordLabels
from commtrace.reading.run import RecordedRun
from commtrace.schema import Clock, Flag
from commtrace.volume import busbw_factor

from .engine import Analysis, Array, Block, NamedTables, grouped, merge_by, merge_sums, summed

MEASURES: Final = ("in_call", "waiting", "to_completion")

END_SEEN_BY: Final = {
    Clock.RETURN: "return",
    Clock.WAIT: "wait",
    Clock.FUTURE: "callback",
    Clock.DEVICE: "device",
    Clock.TEST: "poll",
    Clock.DEVICE_WAIT: "device wait",
}

_HOST_CLOCKS: Final = (int(Clock.WAIT), int(Clock.FUTURE))

# Durations share a bin whose exponent and first seven bits of the fraction are the same as floating-point numbers: they
# differ by a 128th at most, so their mean is at most 1 % off for any of them.
_DROPPED_BITS: Final = 52 - 7
_UNKNOWN, _ZERO = -2, -1


def durations(measure: str, block: Block) -> Array:
    """Ns of each record by one of MEASURES, -1 where it is not known."""
    if measure == "in_call":
        return _between(block["t_begin"], block["t_return"], block)
    if measure == "waiting":
        on_host = np.logical_or.reduce([block["clock"] == clock for clock in _HOST_CLOCKS])
        waited = np.where(on_host, block["t_wait"], 0)
        return _between(waited, np.maximum(block["t_end"], waited), block)
    return _between(block["t_begin"], block["t_end"], block)


def _between(begin: Array, end: Array, block: Block) -> Array:
    real = (block["flags"] & int(Flag.CAPTURED | Flag.SIMULATED)) == 0
    return np.where(real & (begin > 0) & (end >= begin), end - begin, -1)


def _partial(block: Block) -> pd.DataFrame:
    return pd.concat([_histogram(measure, block) for measure in MEASURES], ignore_index=True)


def _histogram(measure: str, block: Block) -> pd.DataFrame:
    times = durations(measure, block)
    bins = times.astype(np.float64).view(np.int64) >> _DROPPED_BITS
    bins[times == 0] = _ZERO
    bins[times < 0] = _UNKNOWN
    first, groups = grouped([block["kind"], bins])
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, groups, times)
    return pd.DataFrame(
        {
            "op": block.labels.text("op", block["kind"][first]),
            "measure": measure,
            "bin": bins[first],
            "calls": np.bincount(groups, minlength=len(first)),
            "sum_ns": summed(np.maximum(times, 0), groups, len(first)),
            "max_ns": longest,
        }
    )


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    rows = [_row(str(op), str(measure), part) for (op, measure), part in table.groupby(["op", "measure"])]
    columns = ["op", "measure", "calls_known", "calls_unknown", "p50_ns", "p99_ns", "max_ns", "sum_ns"]
    result = pd.DataFrame(rows, columns=columns)
    for column in columns[4:]:
        result[column] = result[column].astype("Int64")
    order = result["measure"].map({measure: number for number, measure in enumerate(MEASURES)})
    return {
        "host_time": result.assign(order=order).sort_values(["order", "op"], ignore_index=True).drop(columns="order")
    }


def _row(op: str, measure: str, part: pd.DataFrame) -> dict[str, object]:
    known = part.loc[part["bin"] != _UNKNOWN].sort_values("bin")
    counts = {
        "calls_known": int(known["calls"].sum()),
        "calls_unknown": int(part["calls"].sum() - known["calls"].sum()),
    }
    if not len(known):
        return {"op": op, "measure": measure, **counts, "p50_ns": None, "p99_ns": None, "max_ns": None, "sum_ns": None}
    quantiles = {"p50_ns": _quantile(known, 0.50), "p99_ns": _quantile(known, 0.99)}
    return {
        "op": op,
        "measure": measure,
        **counts,
        **quantiles,
        "max_ns": int(known["max_ns"].max()),
        "sum_ns": int(known["sum_ns"].sum()),
    }


def _quantile(bins: pd.DataFrame, q: float) -> int:
    """Smallest duration that a share q of the calls does not exceed, within 1 %."""
    counts = bins["calls"].to_numpy()
    position = int(np.searchsorted(np.cumsum(counts), np.ceil(q * counts.sum())))
    return round(int(bins["sum_ns"].iloc[position]) / int(counts[position]))


def _merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return merge_by(("op", "measure", "bin"), {"max_ns": "max"}, tables)


ANALYSIS: Final = Analysis("times", _partial, _merge, _finish)


def _bandwidth_partial(block: Block) -> pd.DataFrame:
    times = _between(np.where(block["t_start"] > 0, block["t_start"], block["t_begin"]), block["t_end"], block)
    sizes = block.labels.group_sizes(block["group"])
    alone = (block["batch"] == 0) & ((block["flags"] & int(Flag.COALESCED)) == 0)
    use = np.flatnonzero((times > 0) & (block["payload"] > 0) & (sizes > 1) & alone)
    kinds, clocks, payload = (block[name][use] for name in ("kind", "clock", "payload"))
    first, groups = grouped([kinds, clocks])
    total = partial(summed, groups=groups, size=len(first))
    columns = {
        "op": block.labels.text("op", kinds[first]),
        "end_seen_by": np.array([END_SEEN_BY.get(clock, "unknown") for clock in clocks[first]], object),
        "calls": np.bincount(groups, minlength=len(first)),
        "payload_bytes": total(payload),
        "time_ns": total(times[use]),
        "bus_bytes": total(payload * _busbw_factors(block.labels, kinds, sizes[use])),
    }
    return pd.DataFrame(columns)


def _busbw_factors(labels: RecordLabels, kinds: Array, sizes: Array) -> Array:
    """What makes busbw of algbw for each call, nan where the operation has no such factor."""
    result = np.full(len(kinds), np.nan)
    for op, at in labels.by_operation(kinds):
        factor = busbw_factor(op, sizes[at].astype(float))
        if factor is not None:
            result[at] = factor
    return result


def _bandwidth_finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    # bytes per ns are GB/s. An operation has a factor for all of its calls or for none.
    factor = table["op"].map(lambda op: busbw_factor(op, 2) is not None).astype(bool)
    algbw, busbw = table["payload_bytes"] / table["time_ns"], table["bus_bytes"] / table["time_ns"]
    result = table.assign(algbw_gb_per_s=algbw, busbw_gb_per_s=busbw.where(factor)).drop(columns="bus_bytes")
    return {"bandwidth": result.sort_values(["payload_bytes"], ascending=False, kind="stable", ignore_index=True)}


BANDWIDTH: Final = Analysis("bandwidth", _bandwidth_partial, merge_sums("op", "end_seen_by"), _bandwidth_finish)
