"""Measured times of calls, and the times that a network should take for them.

A **transfer time** is the time that the last rank spends in an operation, and so the shortest of all ranks' times: the
other ranks also wait for the last one. This holds for operations that no rank can leave before all ranks have entered
(SYNCHRONIZING), and needs no common clock. The transfer time is known if every rank of the group recorded an exact end
(`durations.exact_ends`), and if no other call of these ranks overlapped the operation and shared the network with it.
Other operations have an expected time, but no efficiency.

To keep the table small, only the first 512 operations of each group count, and 256 for every later doubling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.durations import arrivals, exact_ends
from commtrace.formatting import is_known
from commtrace.network.networks import Network
from commtrace.operations import MESSAGES, operations_where
from commtrace.rank_ranges import parse_ranks
from commtrace.reading.recorded_run import RecordedRun

from .fold_engine import Analysis, NamedTables
from .grouping import Array, group_rows, merge_sums, rows_of
from .record_blocks import RecordBlock
from .sections import Block, Listing, Paragraph, Report, Section, ShownTable
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, bytes_column, count, duration, share, text_column, word_column

NETWORK: Final = TableSpec("network", "Against a network",
    "A row per operation, numbers of ranks and hosts, and payload; the longest total expected time first.", (
    shared.OP,
    count("ranks", "ranks", "Ranks of the group."),
    count("hosts", "hosts", "Hosts of the group; missing if not all of its ranks left a log."),
    bytes_column("payload_bytes", "payload", "Payload of one call."),
    count("calls", "calls", "Calls of all recorded ranks."),
    count("timed", "timed",
        "Operations whose transfer time is known, each counted once for its group; a sample in long runs.",
        optional=True),
    duration("measured_ns", "measured", "Median transfer time: what the last rank spends in the operation."),
    duration("expected_ns", "expected", "Time that the network should take for one call."),
    duration("latency_ns", "latency", "Part of expected_ns that does not depend on the size."),
    word_column("how", "how",
        'Source of expected_ns: "fitted" to this operation and group, "extrapolated", "described" or "local".',
        optional=True),
    share("efficiency", "efficiency", "expected_ns / measured_ns."),
    text_column("why_not", "why not", "Why there is no measured or no expected time; missing if both are known."),
), {
    "terminal": "op ranks payload_bytes calls timed measured_ns expected_ns efficiency how",
    "page": "op ranks hosts payload_bytes calls timed measured_ns expected_ns latency_ns efficiency how why_not",
})  # fmt: skip
NETWORK_USED: Final = TableSpec("network_used", "The network", "One row.", (
    word_column("name", "name", "Its name, or the path of its file."),
    text_column("about", "about", "Where its numbers come from."),
))  # fmt: skip

SYNCHRONIZING: Final = operations_where(lambda operation: operation.is_synchronizing)
"""Operations that no rank can leave before all ranks have entered."""

_LEGEND: Final = (
    "Measured: the median transfer time of the timed operations, which is the time that the last rank to arrive spends "
    "in the operation. Efficiency: expected / measured."
)

_KEYS: Final = ("op", "group", "group_ranks", "ranks", "payload_bytes", "rank", "peer", "seq")
_CALL: Final = ["op", "ranks", "hosts", "payload_bytes"]
_NO_TIME: Final = np.iinfo(np.int64).max

_NOT_SYNCHRONIZING: Final = "a rank may leave it before others enter"
_NOT_EXACT: Final = "no operation whose exact end all ranks observed, without other calls in flight"
_NOT_DESCRIBED: Final = "the network's file does not describe this operation"
_NO_LOG: Final = "not all ranks of the group left a log"


def network_analysis(network: Network) -> Analysis:
    """Return the analysis that compares calls with the expected times of a network."""
    return Analysis("network", _partial, merge_sums(*_KEYS, exact="min", shortest_ns="min"), partial(_finish, network))


def _partial(block: RecordBlock) -> pd.DataFrame:
    return pd.concat([_calls(block), _operations(block)], ignore_index=True)


def _calls(block: RecordBlock) -> pd.DataFrame:
    """Count the calls of known payload by operation, group and payload, and messages also by their two ranks."""
    block = block.rows(np.flatnonzero(~block.labels.payload_unknown(block["kind"])))
    labels, kinds = block.labels, block["kind"]
    is_point_to_point = np.isin(labels.text("op", kinds).astype(str), MESSAGES)
    peers = np.where(is_point_to_point, block["peer"], -1)
    first, groups = group_rows([kinds, block["group"], block["payload"], peers])
    return _table(
        block,
        first,
        rank=np.where(is_point_to_point[first], block["rank"][first], -1),
        peer=peers[first],
        calls=np.bincount(groups, minlength=len(first)),
    )


def _operations(block: RecordBlock) -> pd.DataFrame:
    """Return a row per sampled operation that may have a transfer time, and whether this rank observed it exactly."""
    synchronizing = np.isin(block.labels.text("op", block["kind"]).astype(str), SYNCHRONIZING)
    several = block.labels.group_sizes(block["group"]) > 1
    known = several & ~block.labels.payload_unknown(block["kind"])
    at = np.flatnonzero(synchronizing & is_sampled(block["seq"]) & known)
    begin, end = arrivals(block), block["t_end"]
    exact = exact_ends(block) & (begin > 0) & (end > begin) & ~_overlapped(block, begin, end)
    return _table(
        block,
        at,
        seq=block["seq"][at].astype(np.int64),
        exact=exact[at].astype(np.int64),
        shortest_ns=np.where(exact, end - begin, _NO_TIME)[at],
    )


def _table(block: RecordBlock, at: Array, **columns: Array) -> pd.DataFrame:
    labels, groups, kinds = block.labels, block["group"][at], block["kind"][at]
    defaults = {"rank": -1, "peer": -1, "seq": -1, "calls": 0, "exact": 1, "shortest_ns": _NO_TIME}
    return pd.DataFrame(
        {
            "op": labels.codes("op", kinds),
            "group": labels.codes("group", groups),
            "group_ranks": labels.codes("group_ranks", groups),
            "ranks": labels.group_sizes(groups),
            "payload_bytes": block["payload"][at],
            **defaults,
            **columns,
            "seen": 1,
        }
    )


def is_sampled(seq: Array) -> Array:
    """Return which operations of a group count, given their sequence numbers, which are equal on all ranks."""
    number = seq.astype(np.int64)
    octave = np.floor(np.log2(np.maximum(number, 1))).astype(np.int64)
    stride = np.left_shift(np.int64(1), np.maximum(octave - 8, 0))
    return np.asarray(number % stride == 0)


def _overlapped(block: RecordBlock, begin: Array, end: Array) -> Array:
    """Return whether each call overlaps another of its rank. A call without a known end lasts until its step ends."""
    first, number = group_rows([block["process"], block["step"]])
    last = np.zeros(len(first), np.int64)
    np.maximum.at(last, number, np.maximum(block["t_return"], block["t_begin"]))
    until = np.where(end > 0, end, last[number])
    result = np.empty(len(block), bool)
    for process in np.unique(block["process"]):
        rows = np.flatnonzero(block["process"] == process)
        rows = rows[np.argsort(begin[rows], kind="stable")]
        before = np.concatenate([[0], np.maximum.accumulate(until[rows])[:-1]])
        after = np.append(begin[rows][1:], _NO_TIME)
        result[rows] = (before > begin[rows]) | (after < until[rows])
    return result


def _finish(network: Network, table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    hosts = {process.rank: str(process.tables.process.get("host")) for process in run.processes}
    table = table.assign(hosts=_host_counts(table, hosts))
    timed = table.loc[(table["seq"] >= 0) & (table["seen"] == table["ranks"]) & (table["exact"] == 1)]
    times = timed.groupby(_CALL)["shortest_ns"].agg(timed="size", measured_ns="median")
    calls = table.loc[table["seq"] < 0].groupby(_CALL)["calls"].sum().to_frame().join(times).reset_index()
    rows = [_row(network, row) for row in rows_of(calls)]
    types = dict.fromkeys(("hosts", "measured_ns", "expected_ns", "latency_ns"), "Int64")
    result = pd.DataFrame(rows, columns=NETWORK.column_names).astype(types)
    order = (result["calls"] * result["expected_ns"].astype(float)).fillna(-1)
    result = result.loc[order.sort_values(ascending=False, kind="stable").index].reset_index(drop=True)
    return {
        "network": result,
        "network_used": pd.DataFrame([{"name": network.name, "about": "; ".join(network.about)}]),
    }


def _host_counts(table: pd.DataFrame, hosts: Mapping[int, str]) -> Array:
    """Return the number of hosts of each row's ranks; 0 if a rank left no log or is not known."""

    def count(text: str) -> int:
        try:
            ranks = parse_ranks(text)
        except ValueError:  # a group that is not in the log's tables, or a message without a known peer
            return 0
        return len({hosts[rank] for rank in ranks}) if ranks and hosts.keys() >= {*ranks} else 0

    of_message = table["rank"].astype(str) + "," + table["peer"].astype(str)
    members = table["group_ranks"].where(table["rank"] < 0, of_message)
    return members.map({text: count(text) for text in members.unique()}).to_numpy(np.int64)


def _row(network: Network, row: Any) -> dict[str, object]:
    expected = network.expected(row.op, row.payload_bytes, row.ranks, row.hosts) if row.hosts else None
    total = None if expected is None else round(expected.total_us * 1e3)
    measured = round(row.measured_ns) if is_known(row.measured_ns) else None
    return {
        **row._asdict(),
        "hosts": row.hosts or None,
        "timed": 0 if measured is None else int(row.timed),
        "measured_ns": measured,
        "expected_ns": total,
        "latency_ns": None if expected is None else round(expected.latency_us * 1e3),
        "how": None if expected is None else expected.source,
        "efficiency": total / measured if total and measured else None,
        "why_not": _why_not(row.op, row.ranks, row.hosts, measured is None, expected is None),
    }


def _why_not(op: str, ranks: int, hosts: int, no_time: bool, not_expected: bool) -> str | None:
    reasons = []
    if not_expected:
        reasons.append(_NOT_DESCRIBED if hosts else _NO_LOG)
    if no_time and ranks > 1:
        reasons.append(_NO_LOG if not hosts else _NOT_EXACT if op in SYNCHRONIZING else _NOT_SYNCHRONIZING)
    return "; ".join(dict.fromkeys(reasons)) or None


def _show_network(report: Report) -> Iterator[Block]:
    used, table = report.tables["network_used"], report.tables["network"]
    text = f"{used['about'].iloc[0]}."
    extrapolated = int((table["how"] == "extrapolated").sum())
    if extrapolated:
        text += f" {extrapolated:,} of {len(table):,} expected times are extrapolated from other groups or payloads."
    yield Paragraph(text, f"Compared with the network {used['name'].iloc[0]}")
    shown = table.head(report.max_rows)
    yield ShownTable(NETWORK, shown)
    if len(shown) < len(table):
        yield Paragraph(f"The top {len(shown)} of {len(table):,} rows by total expected time.")
    yield Paragraph(_LEGEND)
    reasons = shown.dropna(subset="why_not").groupby("why_not", sort=False)
    if len(reasons):
        yield Listing([f"{', '.join(rows['op'].unique())}: {reason}." for reason, rows in reasons])


NETWORK_SECTION: Final = Section(
    "network",
    "Compared with a network",
    (NETWORK, NETWORK_USED),
    option="--network",
    blocks=_show_network,
)
