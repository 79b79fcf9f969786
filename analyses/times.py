"""How long the calls took, as the host saw it, where it did.

`host_time`, a row per operation and measure:

    in_call          t_return - t_begin: the program is inside the call
    waiting          t_end - t_wait, where the program's own wait saw the end: the program stands still
    to_completion    t_end - t_begin, where anybody saw the end

with `calls_known`, `calls_unknown`, and over the known ones `p50_ns`, `p99_ns` (of a histogram: right within 1 %),
`max_ns` and `sum_ns` (exact; calls that overlap are each counted in full). Calls captured into a device graph and
dry runs have times of something else, so theirs are unknown.

`bandwidth`, a row per operation and `end_seen_by`: over the calls of groups of two or more whose end is known, with a
payload, and not part of a coalesced batch: `calls`, `payload_bytes`, `time_ns`, `algbw_gb_per_s` = sum of payloads / sum
of times, `busbw_gb_per_s` (nccl-tests' factors for each call's own group; missing for operations that have none). 1 GB is
1e9 bytes. Time runs from `t_start` where the device told, else from `t_begin`, to `t_end`. An end that a wait or a poll
saw may have been earlier: those bandwidths are lower bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import pandas as pd

from commtrace.log import Records
from commtrace.run import Run
from commtrace.schema import Clock, Flag
from commtrace.volume import busbw_factor

from .fold import Array, Analysis, Block, Tables_, grouped, merge_by, merge_sums, summed

MEASURES: Final = ("in_call", "waiting", "to_completion")

END_SEEN_BY: Final = {Clock.RETURN: "return", Clock.WAIT: "wait", Clock.FUTURE: "callback", Clock.DEVICE: "device", Clock.TEST: "poll"}

# Bin b holds durations d with _GROWTH**(b - 1) < d <= _GROWTH**b ns, so their mean is at most 1 % off for any of them.
_GROWTH: Final = 1.01
_UNKNOWN, _ZERO = -2, -1


def durations(measure: str, records: Records) -> Array:
    """ns of each record by one of MEASURES, -1 where it is not known."""
    if measure == "in_call":
        begin, end = records["t_begin"], records["t_return"]
    elif measure == "waiting":
        begin, end = np.where(records["clock"] == Clock.WAIT, records["t_wait"], 0), records["t_end"]
    else:
        begin, end = records["t_begin"], records["t_end"]
    return _between(begin, end, records)


def _between(begin: Array, end: Array, records: Records) -> Array:
    real = (records["flags"] & (Flag.CAPTURED | Flag.SIMULATED)) == 0
    return np.where(real & (begin > 0) & (end >= begin), end - begin, -1)


def _partial(block: Block) -> pd.DataFrame:
    return pd.concat([_histogram(measure, block) for measure in MEASURES], ignore_index=True)


def _histogram(measure: str, block: Block) -> pd.DataFrame:
    times = durations(measure, block.records)
    bins = np.where(times < 0, _UNKNOWN, np.where(times == 0, _ZERO, np.ceil(np.log(np.maximum(times, 1)) / np.log(_GROWTH)))).astype(np.int64)
    first, groups = grouped([block.records["kind"], bins])
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, groups, times)
    return pd.DataFrame(
        {
            "op": block.names.name("op", block.records[first]),
            "measure": measure,
            "bin": bins[first],
            "calls": np.bincount(groups, minlength=len(first)),
            "sum_ns": summed(np.maximum(times, 0), groups, len(first)),
            "max_ns": longest,
        }
    )


def _finish(table: pd.DataFrame, run: Run) -> Tables_:
    rows = [_row(str(op), str(measure), part) for (op, measure), part in table.groupby(["op", "measure"])]
    columns = ["op", "measure", "calls_known", "calls_unknown", "p50_ns", "p99_ns", "max_ns", "sum_ns"]
    result = pd.DataFrame(rows, columns=columns)
    for column in columns[4:]:
        result[column] = result[column].astype("Int64")
    order = result["measure"].map({measure: number for number, measure in enumerate(MEASURES)})
    return {"host_time": result.assign(order=order).sort_values(["order", "op"], ignore_index=True).drop(columns="order")}


def _row(op: str, measure: str, part: pd.DataFrame) -> dict[str, object]:
    known = part.loc[part["bin"] != _UNKNOWN].sort_values("bin")
    counts = {"calls_known": int(known["calls"].sum()), "calls_unknown": int(part["calls"].sum() - known["calls"].sum())}
    if not len(known):
        return {"op": op, "measure": measure, **counts, "p50_ns": None, "p99_ns": None, "max_ns": None, "sum_ns": None}
    quantiles = {"p50_ns": _quantile(known, 0.50), "p99_ns": _quantile(known, 0.99)}
    return {"op": op, "measure": measure, **counts, **quantiles, "max_ns": int(known["max_ns"].max()), "sum_ns": int(known["sum_ns"].sum())}


def _quantile(bins: pd.DataFrame, q: float) -> int:
    """Smallest duration that a share q of the calls does not exceed, within 1 %."""
    counts = bins["calls"].to_numpy()
    position = int(np.searchsorted(np.cumsum(counts), np.ceil(q * counts.sum())))
    return round(bins["sum_ns"].iloc[position] / counts[position])


def _merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return merge_by(("op", "measure", "bin"), {"max_ns": "max"}, tables)


ANALYSIS: Final = Analysis("times", _partial, _merge, _finish)


def _bandwidth_partial(block: Block) -> pd.DataFrame:
    block, times = _timed(block)
    first, groups = grouped([block.records["kind"], block.records["clock"]])
    total = partial(summed, groups=groups, size=len(first))
    bus = _bus_bytes(block)
    return pd.DataFrame(
        {
            "op": block.names.name("op", block.records[first]),
            "end_seen_by": [END_SEEN_BY.get(clock, "unknown") for clock in block.records["clock"][first]],
            "calls": np.bincount(groups, minlength=len(first)),
            "payload_bytes": total(block.records["payload"]),
            "time_ns": total(times),
            "bus_bytes": total(bus),
        }
    ).astype({"op": object, "end_seen_by": object})


def _timed(block: Block) -> tuple[Block, Array]:
    """The calls that tell a bandwidth, and their times in ns."""
    records = block.records
    times = _between(np.where(records["t_start"] > 0, records["t_start"], records["t_begin"]), records["t_end"], records)
    alone = (records["batch"] == 0) & ((records["flags"] & Flag.COALESCED) == 0)
    use = (times > 0) & (records["payload"] > 0) & (block.names.group_sizes(records) > 1) & alone
    return Block(records[use], block.names), times[use]


def _bus_bytes(block: Block) -> Array:
    """Payload times the factor of busbw, nan where the operation has none."""
    result = np.full(len(block.records), np.nan)
    for op, where in block.names.by_operation(block.records):
        factor = busbw_factor(op, block.names.group_sizes(block.records[where]).astype(float))
        if factor is not None:
            result[where] = block.records["payload"][where] * factor
    return result


def _bandwidth_finish(table: pd.DataFrame, run: Run) -> Tables_:
    # bytes per ns are GB/s. An operation has a factor for all of its calls or for none.
    factor = table["op"].map(lambda op: busbw_factor(op, 2) is not None).astype(bool)
    algbw, busbw = table["payload_bytes"] / table["time_ns"], table["bus_bytes"] / table["time_ns"]
    result = table.assign(algbw_gb_per_s=algbw, busbw_gb_per_s=busbw.where(factor)).drop(columns="bus_bytes")
    return {"bandwidth": result.sort_values(["payload_bytes"], ascending=False, kind="stable", ignore_index=True)}


BANDWIDTH: Final = Analysis("bandwidth", _bandwidth_partial, merge_sums("op", "end_seen_by"), _bandwidth_finish)
