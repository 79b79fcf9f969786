"""Times of calls observed on the host, and bandwidths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd

from commtrace.durations import MEASURES, durations, flight_times
from commtrace.formatting import format_bandwidth
from commtrace.reading.labels import RunLabels
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import Clock, Flag
from commtrace.summary_format import IN_FLIGHT, UNKNOWN_BUCKET
from commtrace.volume import busbw_factor

from .fold_engine import Analysis, NamedTables
from .grouping import Array, group_rows, merge_sums, sum_groups
from .record_blocks import HistogramBlock, RecordBlock, sums_by
from .sections import Block, Paragraph, Report, Section, ShownTable
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, column, count, duration, word_column

HOST_TIME: Final = TableSpec("host_time", "Times of calls, observed on the host", "A row per operation and measure.", (
    shared.OP,
    word_column("measure", "measure",
        '"in_call": inside the call; "waiting": from the start of a wait to the end, if the program waited and '
        'the host observed the end; "to_completion": from the call to its end, if it was observed.'),
    count("calls_known", "known", "Calls whose time is known."),
    count("calls_unknown", "not known",
        "Calls whose time is not known, including all calls of dry runs and graph captures."),
    duration("p50_ns", "p50", "Median of the known times, within 1 %."),
    duration("p99_ns", "p99", "99th percentile of the known times, within 1 %."),
    duration("max_ns", "max", "Longest of the known times."),
    duration("sum_ns", "sum", "Sum of the known times; calls that overlap are each counted in full."),
), {"terminal": "op calls_known calls_unknown p50_ns p99_ns max_ns sum_ns"})  # fmt: skip
HOST_BANDWIDTH: Final = TableSpec("bandwidth", "Bandwidth",
    "A row per operation and kind of end, over calls that have a payload and an observed end, in groups of two or "
    "more ranks, outside coalesced batches.", (
    shared.OP,
    word_column("end_seen_by", "completion seen by",
        'What observed the end. With "wait" or "poll" it may have been earlier: bandwidths are lower bounds.'),
    shared.CALLS, shared.PAYLOAD,
    duration("time_ns", "time", "Sum of times from the start on the device, else from the call, to the end."),
    column("GB/s", format_bandwidth, "algbw_gb_per_s", "algbw", "Payload / time; 1 GB is 1e9 bytes."),
    column("GB/s", format_bandwidth, "busbw_gb_per_s", "busbw",
        "algbw times nccl-tests' factor of each call's group; missing for operations without a factor."),
))  # fmt: skip

END_SEEN_BY: Final = {
    Clock.RETURN: "return",
    Clock.WAIT: "wait",
    Clock.FUTURE: "callback",
    Clock.DEVICE: "device",
    Clock.TEST: "poll",
    Clock.DEVICE_WAIT: "device wait",
}

_ENDS: Final = sorted({*END_SEEN_BY.values(), "unknown"})
_END_OF_CLOCK: Final = np.array([_ENDS.index(END_SEEN_BY.get(clock, "unknown")) for clock in Clock])
"""Position in _ENDS of each value of `Clock`."""

# Durations share a histogram bin if, as floating-point numbers, they have the same exponent and the same first seven
# bits of the fraction. They differ by at most 1/128, so their mean is within 1 % of each.
_DROPPED_BITS: Final = 52 - 7
_UNKNOWN_BIN, _ZERO_BIN = -2, -1


def _partial(block: RecordBlock) -> pd.DataFrame:
    return pd.concat([_histogram(measure, block) for measure in MEASURES], ignore_index=True)


def _partial_of_histograms(block: HistogramBlock) -> pd.DataFrame:
    """Return the table of `_partial`, with the calls of a bucket in the bin of their mean."""
    selected = block.rows["measure"] != IN_FLIGHT
    rows = {name: column[selected] for name, column in block.rows.items()}
    is_unknown = rows["bucket"] == UNKNOWN_BUCKET
    return pd.DataFrame(
        {
            "op": block.labels.codes("op", rows["kind"]),
            "measure": rows["measure"].astype(np.int64),
            "bin": _bins(np.where(is_unknown, -1, rows["ns"] / np.maximum(rows["calls"], 1))),
            "calls": rows["calls"].astype(np.int64),
            "sum_ns": rows["ns"],
            "max_ns": np.where(is_unknown, -1, rows["max_ns"]),
        }
    )


def _bins(times: Array) -> Array:
    bins = np.ascontiguousarray(times, np.float64).view(np.int64) >> _DROPPED_BITS
    bins[times == 0] = _ZERO_BIN
    bins[times < 0] = _UNKNOWN_BIN
    return bins


def _histogram(measure: str, block: RecordBlock) -> pd.DataFrame:
    times = durations(measure, block)
    bins = _bins(times)
    first, groups = group_rows([block["kind"], bins])
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, groups, times)
    return pd.DataFrame(
        {
            "op": block.labels.codes("op", block["kind"][first]),
            "measure": MEASURES.index(measure),
            "bin": bins[first],
            "calls": np.bincount(groups, minlength=len(first)),
            "sum_ns": sum_groups(np.maximum(times, 0), groups, len(first)),
            "max_ns": longest,
        }
    )


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    groups = table.assign(measure=np.array(MEASURES, object)[table["measure"]]).groupby(["op", "measure"])
    rows = [{"op": op, "measure": measure, **_summary(bins)} for (op, measure), bins in groups]
    columns = HOST_TIME.column_names
    result = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[4:], "Int64"))
    order = result["measure"].map(MEASURES.index)
    return {"host_time": result.iloc[np.lexsort((result["op"], order))].reset_index(drop=True)}


def _summary(bins: pd.DataFrame) -> dict[str, int | None]:
    """Return the columns of `host_time` for the histogram of one operation and measure."""
    known = bins.loc[bins["bin"] != _UNKNOWN_BIN].sort_values("bin")
    calls = int(known["calls"].sum())
    return {
        "calls_known": calls,
        "calls_unknown": int(bins["calls"].sum()) - calls,
        "p50_ns": _quantile(known, 0.50) if calls else None,
        "p99_ns": _quantile(known, 0.99) if calls else None,
        "max_ns": int(known["max_ns"].max()) if calls else None,
        "sum_ns": int(known["sum_ns"].sum()) if calls else None,
    }


def _quantile(bins: pd.DataFrame, q: float) -> int:
    """Return the smallest duration that a share q of the calls does not exceed, within 1 %."""
    counts = bins["calls"].to_numpy()
    position = int(np.searchsorted(np.cumsum(counts), np.ceil(q * counts.sum())))
    return round(int(bins["sum_ns"].iloc[position]) / int(counts[position]))


_MERGE: Final = merge_sums("op", "measure", "bin", max_ns="max")
ANALYSIS: Final = Analysis("times", _partial, _MERGE, _finish, times_partial=_partial_of_histograms)


def _bandwidth_partial(block: RecordBlock) -> pd.DataFrame:
    times = flight_times(block)
    not_batched = (block["batch"] == 0) & ((block["flags"] & int(Flag.COALESCED)) == 0)
    used = (times > 0) & (block["payload"] > 0) & not_batched
    fields = {name: block[name] for name in ("kind", "group", "clock", "payload")}
    return _bandwidth_sums(block.labels, {**fields, "calls": block.calls, "ns": times}, used)


def _bandwidth_of_histograms(block: HistogramBlock) -> pd.DataFrame:
    return _bandwidth_sums(block.labels, block.rows, block.rows["measure"] == IN_FLIGHT)


def _bandwidth_sums(labels: RunLabels, columns: Mapping[str, Array], used: Array) -> pd.DataFrame:
    """Sum the `used` rows of `summary_format.TIMES` that are of groups of two or more ranks."""
    sizes = labels.group_sizes(columns["group"])
    at = np.flatnonzero(used & (sizes > 1))
    rows = {name: column[at] for name, column in columns.items()}
    values = {
        "calls": rows["calls"].astype(np.int64),
        "payload_bytes": rows["payload"],
        "time_ns": rows["ns"],
        "bus_bytes": rows["payload"] * busbw_factors(labels, rows["kind"], sizes[at]),
    }
    return sums_by(labels, {"op": rows["kind"], "end_seen_by": _END_OF_CLOCK[rows["clock"]]}, values)


def busbw_factors(labels: RunLabels, kinds: Array, sizes: Array) -> Array:
    """Return busbw / algbw of each call, NaN for operations without such a factor."""
    result = np.full(len(kinds), np.nan)
    for op, at in labels.by_operation(kinds):
        factor = busbw_factor(op, sizes[at].astype(float))
        if factor is not None:
            result[at] = factor
    return result


def _bandwidth_finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    # Bytes per ns are GB/s. An operation has a factor for all of its calls or for none.
    table = table.assign(end_seen_by=np.array(_ENDS, object)[table["end_seen_by"]])
    has_factor = table["op"].map(lambda op: busbw_factor(op, 2) is not None).astype(bool)
    algbw, busbw = table["payload_bytes"] / table["time_ns"], table["bus_bytes"] / table["time_ns"]
    result = table.assign(algbw_gb_per_s=algbw, busbw_gb_per_s=busbw.where(has_factor)).drop(columns="bus_bytes")
    return {"bandwidth": result.sort_values(["payload_bytes"], ascending=False, kind="stable", ignore_index=True)}


BANDWIDTH: Final = Analysis(
    "bandwidth",
    _bandwidth_partial,
    merge_sums("op", "end_seen_by"),
    _bandwidth_finish,
    times_partial=_bandwidth_of_histograms,
)


_MEASURE_TITLES: Final = {
    "in_call": "Time inside the call, observed on the host",
    "waiting": "Time waiting for the end, where the program waited and the host observed the end",
    "to_completion": "Time from the call to its end, where the end is known",
}


def _show_times(report: Report) -> Iterator[Block]:
    if report.simulated:
        yield Paragraph("Not available: this is a dry run, which sends nothing.")
        return
    table = report.tables["host_time"]
    for measure, title in _MEASURE_TITLES.items():
        rows = table.loc[table["measure"] == measure]
        if rows["calls_known"].sum():
            yield ShownTable(HOST_TIME, rows, title)
        else:
            yield Paragraph("Not known for any call.", title)


def _show_bandwidth(report: Report) -> Iterator[Block]:
    if report.simulated:
        return
    table = report.tables["bandwidth"]
    yield ShownTable(HOST_BANDWIDTH, table) if len(table) else Paragraph("Not known for any call.")
    if table["end_seen_by"].isin(["wait", "poll"]).any():
        yield Paragraph("Waits and polls may detect completion late, so these bandwidths are lower bounds.")


TIMES_SECTION: Final = Section("times", "Times", (HOST_TIME,), (ANALYSIS,), blocks=_show_times, default=False)
BANDWIDTH_SECTION: Final = Section(
    "bandwidth",
    "Bandwidth, GB/s (1e9 bytes), over calls with a known end",
    (HOST_BANDWIDTH,),
    (BANDWIDTH,),
    blocks=_show_bandwidth,
)
