"""How long the calls took, beside how long a network should take for them (`commtrace.network`).

`network`, a row per operation, size of group, hosts of the group and payload, longest in all first:

    calls            of all ranks seen
    timed            operations whose transfer time is known, each counted once for its group (of long runs: a sample)
    measured_ns      median of these transfer times
    expected_ns      of one call, and of it `latency_ns`, which a call takes however small it is
    how              "fitted" (this operation, group size and hosts were measured), "extrapolated", "described", "local"
    efficiency       expected / measured
    why_not          why there is no measured time, or no expected one

and `network_used`, one row: `name` and `about`.

A **transfer time** is not what a rank spends in a call: that counts the wait for whoever comes last. It is what the
last one spends, so the shortest of all ranks' times. That holds for operations that nobody can leave before all
have come (all_reduce, all_gather, reduce_scatter, all_to_all, barrier), and needs no common clock. It is known for an
operation when every rank of the group has recorded it, each with an exact end (the call's own, a completion
callback, the device's; a wait's only where the program did not ask for a handle and so waited at once), outside of
coalesced batches and captured graphs, and when no other communication was under way meanwhile on any of the ranks, with
which it would have shared the network. For all others there is an expected time, and no efficiency.

Of a group, the first 512 operations count, and of later ones 256 in every doubling, so that the table stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import numpy as np
import pandas as pd

from commtrace.formatting import parse_ranks
from commtrace.network.networks import Network
from commtrace.reading.run import RecordedRun
from commtrace.schema import Clock, Flag

from .engine import Analysis, Array, Block, NamedTables, grouped, merge_by

TOGETHER: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that no rank can leave before all have come."""

MESSAGES: Final = ("send", "recv", "sendrecv")

_KEYS: Final = ("op", "group", "group_ranks", "ranks", "payload_bytes", "rank", "peer", "seq")
_SAMPLED_BITS: Final = 8
_NO_TIME: Final = np.iinfo(np.int64).max

_EARLY: Final = "a rank may leave it before others come"
_NOT_EXACT: Final = "no operation whose end all ranks saw exactly, with no other under way"
_NOT_MEASURED: Final = "the network's file has nothing of this operation"
_HOSTS: Final = "not all ranks of the group left a log"


def analysis(network: Network) -> Analysis:
    """The question, asked with this network."""
    return Analysis("network", _partial, _merge, partial(_finish, network))


def _partial(block: Block) -> pd.DataFrame:
    return pd.concat([_calls(block), _operations(block)], ignore_index=True)


def _calls(block: Block) -> pd.DataFrame:
    """How many there are of each; of messages, between which ranks."""
    labels, kinds = block.labels, block["kind"]
    message = np.isin(labels.text("op", kinds).astype(str), MESSAGES)
    peers = np.where(message, block["peer"], -1)
    first, groups = grouped([kinds, block["group"], block["payload"], peers])
    return _table(
        block,
        first,
        rank=np.where(message[first], labels.rank, -1),
        peer=peers[first],
        seq=np.full(len(first), -1),
        calls=np.bincount(groups, minlength=len(first)),
        exact=np.ones(len(first), np.int64),
        shortest_ns=np.full(len(first), _NO_TIME),
    )


def _operations(block: Block) -> pd.DataFrame:
    """One row for each operation that may have a transfer time, or that is known to have none on this rank."""
    whole = np.isin(block.labels.text("op", block["kind"]).astype(str), TOGETHER)
    at = np.flatnonzero(whole & sampled(block["seq"]) & (block.labels.group_sizes(block["group"]) > 1))
    begin, end = _span(block)
    exact = exact_ends(block) & (begin > 0) & (end > begin) & ~_overlapped(block, begin, end)
    return _table(
        block,
        at,
        rank=np.full(len(at), -1),
        peer=np.full(len(at), -1),
        seq=block["seq"][at].astype(np.int64),
        calls=np.zeros(len(at), np.int64),
        exact=exact[at].astype(np.int64),
        shortest_ns=np.where(exact, end - begin, _NO_TIME)[at],
    )


def _table(block: Block, at: Array, **columns: Array) -> pd.DataFrame:
    labels, groups, kinds = block.labels, block["group"][at], block["kind"][at]
    return pd.DataFrame(
        {
            "op": labels.text("op", kinds).astype(str),
            "group": labels.text("group", groups).astype(str),
            "group_ranks": labels.text("group_ranks", groups).astype(str),
            "ranks": labels.group_sizes(groups),
            "payload_bytes": block["payload"][at],
            **columns,
            "seen": np.ones(len(at), np.int64),
        }
    )


def sampled(seq: Array) -> Array:
    """Which operations of a group count, by their number: the same on all ranks."""
    number = seq.astype(np.int64)
    octave = np.floor(np.log2(np.maximum(number, 1))).astype(np.int64)
    stride = np.left_shift(np.int64(1), np.maximum(octave - _SAMPLED_BITS, 0))
    return np.asarray(number % stride == 0)


def _span(block: Block) -> tuple[Array, Array]:
    return np.where(block["t_start"] > 0, block["t_start"], block["t_begin"]), block["t_end"]


def exact_ends(block: Block) -> Array:
    """Whether the end that is known is the end: not one that somebody saw late."""
    flags, clock = block["flags"], block["clock"]
    ended = np.isin(clock, (int(Clock.RETURN), int(Clock.FUTURE)))
    ended |= (clock == int(Clock.WAIT)) & ((flags & int(Flag.ASYNC)) == 0)
    ended |= (clock == int(Clock.DEVICE)) & (block["t_start"] > 0)
    strange = int(Flag.CAPTURED | Flag.SIMULATED | Flag.COALESCED | Flag.SPARSE | Flag.UNEVEN | Flag.OBJECT)
    return np.asarray(ended & ((flags & strange) == 0) & (block["batch"] == 0))


def _overlapped(block: Block, begin: Array, end: Array) -> Array:
    """Whether another call of this rank was under way with each. One without a known end lasts for its step."""
    if not len(block):
        return np.zeros(0, bool)
    steps, number = np.unique(block["step"], return_inverse=True)
    last = np.zeros(len(steps), np.int64)
    np.maximum.at(last, number, np.maximum(block["t_return"], block["t_begin"]))
    until = np.where(end > 0, end, last[number])
    order = np.argsort(begin, kind="stable")
    begin, until = begin[order], until[order]
    before = np.concatenate([[0], np.maximum.accumulate(until)[:-1]])
    after = np.append(begin[1:], _NO_TIME)
    result = np.empty(len(block), bool)
    result[order] = (before > begin) | (after < until)
    return result


def _merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return merge_by(_KEYS, {"exact": "min", "shortest_ns": "min"}, tables)


def _finish(network: Network, table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    hosts = {process.rank: str(process.tables.process.get("host")) for process in run.processes}
    table = table.assign(hosts=_hosts(table, hosts))
    known = table.loc[(table["seq"] >= 0) & (table["seen"] == table["ranks"]) & (table["exact"] == 1)]
    times = {key: (len(part), round(part.median())) for key, part in _by(known, "shortest_ns")}
    counts = {key: int(part.sum()) for key, part in _by(table.loc[table["seq"] < 0], "calls")}
    rows = [_row(network, key, calls, *times.get(key, (0, None))) for key, calls in counts.items()]
    found = pd.DataFrame(rows, columns=_COLUMNS)
    for column in ("hosts", "measured_ns", "expected_ns", "latency_ns"):
        found[column] = found[column].astype("Int64")
    order = (found["calls"] * found["expected_ns"].astype(float)).fillna(-1).sort_values(ascending=False, kind="stable")
    used = pd.DataFrame([{"name": network.name, "about": "; ".join(network.about)}])
    return {"network": found.loc[order.index].reset_index(drop=True), "network_used": used}


Key: TypeAlias = tuple[str, int, int, int]
"""Operation, ranks and hosts of the group, payload."""


def _by(table: pd.DataFrame, column: str) -> Iterator[tuple[Key, pd.Series[Any]]]:
    for key, part in table.groupby(["op", "ranks", "hosts", "payload_bytes"])[column]:
        op, ranks, hosts, payload = cast("Key", key)
        yield (str(op), int(ranks), int(hosts), int(payload)), part


_COLUMNS: Final = [
    "op", "ranks", "hosts", "payload_bytes", "calls", "timed", "measured_ns", "expected_ns", "latency_ns", "how",
    "efficiency", "why_not",
]  # fmt: skip


def _hosts(table: pd.DataFrame, hosts: Mapping[int, str]) -> Array:
    """Hosts of the ranks that each row is about, 0 where some left no log."""
    of_group = {text: _spread(_known_ranks(text), hosts) for text in table["group_ranks"].unique()}
    pairs = zip(table["rank"], table["peer"], table["group_ranks"], strict=True)
    return np.array(
        [of_group[group] if rank < 0 else _spread([rank, peer], hosts) for rank, peer, group in pairs], np.int64
    )


def _spread(ranks: Sequence[int], hosts: Mapping[int, str]) -> int:
    return len({hosts[rank] for rank in ranks}) if ranks and all(rank in hosts for rank in ranks) else 0


def _known_ranks(text: str) -> list[int]:
    """Return the ranks of a group, none where they are not known."""
    try:
        return parse_ranks(text)
    except ValueError:
        return []


def _row(network: Network, key: Key, calls: int, timed: int, measured: int | None) -> dict[str, object]:
    op, ranks, hosts, payload = key
    expected = network.expected(op, payload, ranks, hosts) if hosts else None
    total = None if expected is None else round(expected.total_us * 1e3)
    return {
        "op": op,
        "ranks": ranks,
        "hosts": hosts or None,
        "payload_bytes": payload,
        "calls": calls,
        "timed": timed,
        "measured_ns": measured,
        "expected_ns": total,
        "latency_ns": None if expected is None else round(expected.latency_us * 1e3),
        "how": None if expected is None else expected.how,
        "efficiency": total / measured if total and measured else None,
        "why_not": _why_not(op, ranks, hosts, measured is None, expected is None),
    }


def _why_not(op: str, ranks: int, hosts: int, no_time: bool, not_expected: bool) -> str | None:
    reasons = []
    if not_expected:
        reasons.append(_NOT_MEASURED if hosts else _HOSTS)
    if no_time and ranks > 1:
        reasons.append(_HOSTS if not hosts else _NOT_EXACT if op in TOGETHER else _EARLY)
    return "; ".join(dict.fromkeys(reasons)) or None
