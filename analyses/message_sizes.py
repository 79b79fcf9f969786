"""Message sizes of each operation: exact, by powers of two, and over time.

`sizes_over_time` has at most MAX_SPANS time spans of equal length. A span is 2**shift ns long and begins at a multiple
of that, so two neighbours merge into one span of twice the length. Blocks can thus be binned before the length of the
run is known, and still merge into the same spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.formatting import format_count
from commtrace.reading.recorded_run import RecordedRun
from commtrace.volume import size_bins

from .fold_engine import Analysis, NamedTables
from .grouping import Array, concat_tables, group_rows, merge_sums
from .record_blocks import RecordBlock, sums_by, table_by
from .sections import Block, Report, Section, ShownTable, first_of
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, column

MAX_SPANS: Final = 160
MAX_SIZES: Final = 10
"""Exact sizes that reports show."""

MESSAGE_SIZES: Final = TableSpec("message_sizes", "Exact message sizes",
    "A row per operation and payload, ascending.", (
    shared.OP,
    column("bytes", format_count, "payload_bytes", "bytes of a call", "Payload of one call."),
    shared.CALLS, shared.SUM,
))  # fmt: skip
MESSAGE_SIZE_BINS: Final = TableSpec("message_size_bins", "Message sizes by powers of two",
    "A row per operation and bin, ascending.", (
    shared.OP, shared.FROM, shared.BELOW, shared.CALLS, shared.SUM,
))  # fmt: skip
SIZES_OVER_TIME: Final = TableSpec("sizes_over_time", "Message sizes over time",
    "A row per span of time, operation and bin of sizes. Calls of processes without a wall clock are left out.", (
    column("s", str, "from_s", "from", "Begin of the span, since the run's first call."),
    column("s", str, "below_s", "below", "End of the span."),
    shared.OP, shared.FROM, shared.BELOW, shared.CALLS, shared.SUM,
))  # fmt: skip

_BIN: Final = ["op", "from_bytes", "below_bytes"]


def _partial(block: RecordBlock) -> pd.DataFrame:
    calls = block.distinct_calls
    known = np.flatnonzero(~calls.labels.payload_unknown(calls["kind"]))
    return table_by(calls.rows(known), ("op", "payload_bytes", "exact"), {})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    sizes = table.assign(sum_bytes=table["payload_bytes"] * table["calls"])
    from_bytes, below_bytes = size_bins(sizes["payload_bytes"].to_numpy())
    binned = sizes.assign(from_bytes=from_bytes, below_bytes=below_bytes)
    bins = binned.groupby(_BIN, as_index=False)[["calls", "sum_bytes"]].sum()
    # In a summary, some sizes may be known by powers of two only.
    return {"message_sizes": sizes.loc[sizes["exact"] > 0].drop(columns="exact"), "message_size_bins": bins}


ANALYSIS: Final = Analysis("sizes", _partial, merge_sums("op", "payload_bytes", "exact"), _finish, reads_cells=True)


def _partial_over_time(block: RecordBlock) -> pd.DataFrame:
    example, process = group_rows([block["process"]])
    offsets = [block.labels.clock_offsets[number] for number in block["process"][example].tolist()]
    has_offset = np.array([offset is not None for offset in offsets], bool)
    known = ~block.labels.payload_unknown(block["kind"])
    used = np.flatnonzero((block["t_begin"] > 0) & has_offset[process] & known)
    times = block["t_begin"][used] + np.array([offset or 0 for offset in offsets], np.int64)[process[used]]
    shift = _shift(times)
    payload = block["payload"][used]
    from_bytes, below_bytes = size_bins(payload)
    keys = {
        "shift": np.full(len(used), shift, np.int64),
        "span": times >> shift,
        "op": block["kind"][used],
        "from_bytes": from_bytes,
        "below_bytes": below_bytes,
    }
    return sums_by(block.labels, keys, {"calls": block.calls[used], "sum_bytes": payload})


def _shift(times: Array) -> int:
    """Return the binary logarithm of the shortest span with which MAX_SPANS spans cover all times."""
    shift = 0
    while len(times) and (int(times.max()) >> shift) - (int(times.min()) >> shift) >= MAX_SPANS:
        shift += 1
    return shift


def _merge_over_time(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    table = concat_tables(tables)
    if len(table):
        shift = int(table["shift"].max())
        spans = table["span"].to_numpy() >> (shift - table["shift"].to_numpy())
        longer = _shift(spans)
        table = table.assign(shift=shift + longer, span=spans >> longer)
    return merge_sums("shift", "span", *_BIN)([table])


def _finish_over_time(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    length_ns = 1 << int(table["shift"].max()) if len(table) else 1
    begin = (table["span"] - (table["span"].min() if len(table) else 0)) * length_ns / 1e9
    result = table.assign(from_s=begin, below_s=begin + length_ns / 1e9)
    result = result[["from_s", "below_s", *_BIN, "calls", "sum_bytes"]]
    return {"sizes_over_time": result.sort_values(["from_s", "op", "from_bytes"], ignore_index=True)}


OVER_TIME: Final = Analysis("sizes_over_time", _partial_over_time, _merge_over_time, _finish_over_time)


def _show(report: Report) -> Iterator[Block]:
    bins = report.tables["message_size_bins"]
    yield ShownTable(MESSAGE_SIZE_BINS, bins, "Message sizes, by the payload of a call", bars="calls")
    sizes = report.tables["message_sizes"].sort_values("sum_bytes", ascending=False, kind="stable")
    shown = sizes.head(MAX_SIZES)
    by = " by total payload" if len(shown) < len(sizes) else ""
    yield ShownTable(MESSAGE_SIZES, shown, f"Exact sizes{first_of(len(shown), len(sizes), 'the top')}{by}")


SIZES_SECTION: Final = Section(
    "sizes",
    "Message sizes",
    (MESSAGE_SIZES, MESSAGE_SIZE_BINS),
    (ANALYSIS,),
    details=((SIZES_OVER_TIME, OVER_TIME),),
    blocks=_show,
    default=False,
)
