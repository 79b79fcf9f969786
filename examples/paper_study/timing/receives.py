"""Receives of a pipeline: kind, duration, and waiting time of each.

`receives`, a row per receive:

    rank, step (-1: before the first), micro_batch, what, payload_bytes
    when               "start" (before the first step), "first" (the first step's first micro-batch), "first step" (its
                       other ones), "later first" (later steps' first micro-batches), "later" (their other ones)
    receive_ns         from the call to its end
    late_ns            its part before the sender began to send (Scalasca's Late Sender)
    sender_computing_ns, sender_in_calls_ns      what the sender did during late_ns
    transfer_ns        the rest: both ranks are in the call

The last four are missing if the sender is on another host. The call site determines the kind of a receive; a
micro-batch has two receives of activations, the hidden states and then the mask.

`forwards`, a row per step: computation of the first stage before it sends its first micro-batch (`before_first_ns`,
since its last call), and in the forward pass of the second (`second_forward_ns`: nothing else is between its calls).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.across_ranks.blocked_time import covered_ns
from commtrace.analyses.grouping import Array

HANDSHAKE, METADATA, HIDDEN_STATES, MASK, GRADIENTS = "handshake", "metadata", "hidden states", "mask", "gradients"
START, FIRST, FIRST_STEP, LATER_FIRST, LATER = "start", "first", "first step", "later first", "later"

_LINES: Final = {
    "__init__": HANDSHAKE,
    "_recv_tensor_meta": METADATA,
    "_exec_recv_activations": HIDDEN_STATES,
    "_exec_recv_grads": GRADIENTS,
}
"""Kinds of receives by the DeepSpeed function that receives (runtime/pipe/engine.py)."""

COLUMNS: Final = [
    "rank", "step", "micro_batch", "what", "when", "payload_bytes", "receive_ns", "late_ns", "sender_computing_ns",
    "sender_in_calls_ns", "transfer_ns",
]  # fmt: skip


def receives(calls: pd.DataFrame) -> pd.DataFrame:
    """Return the receives of a pipeline in all steps, from its calls (`timed_calls` with `site`)."""
    received = calls.loc[calls["op"] == "recv"].copy()
    received["what"] = receive_kinds(received)
    received["when"] = receive_moments(received)
    received["receive_ns"] = received["blocked_until"] - received["t_begin"]
    known = received["release"] > 0
    waited = received[["blocked_until", "release"]].min(axis=1)
    received["late_ns"] = (waited - received["t_begin"]).where(known)
    received["transfer_ns"] = (received["blocked_until"] - waited).where(known)
    received["sender_in_calls_ns"] = _in_calls(calls, received, waited).where(known)
    received["sender_computing_ns"] = received["late_ns"] - received["sender_in_calls_ns"]
    return received.rename(columns={"payload": "payload_bytes"})[COLUMNS].reset_index(drop=True)


def receive_kinds(received: pd.DataFrame) -> pd.Series[str]:
    """Return the kind of each receive, by the receiving function; "other" if it is not DeepSpeed's."""
    what = function(received).map(_LINES).fillna("other")
    among = received.groupby([received["rank"], received["step"], received["micro_batch"], what]).cumcount()
    return what.mask((what == HIDDEN_STATES) & (among > 0), MASK)


def function(calls: pd.DataFrame) -> pd.Series[str]:
    """Return the function of each call site, without its class."""
    named: pd.Series[str] = calls["site"].astype(str).str.extract(r"(\w+)$", expand=False)
    return named


def receive_moments(received: pd.DataFrame) -> pd.Series[str]:
    """Return the moment of each receive: `when` in the module's docstring."""
    first = received["micro_batch"] <= 0
    chosen = [received["step"] < 0, (received["step"] == 0) & first, received["step"] == 0, first]
    return pd.Series(
        np.select(chosen, [START, FIRST, FIRST_STEP, LATER_FIRST], LATER), index=received.index, dtype=object
    )


def _in_calls(calls: pd.DataFrame, received: pd.DataFrame, waited: pd.Series[Any]) -> pd.Series[Any]:
    """Return the ns of [t_begin, waited] in which the sender was in calls of its own."""
    result = pd.Series(0, index=received.index, dtype=np.int64)
    for sender, part in received.groupby("peer"):
        its = _blocked(calls.loc[calls["rank"] == sender])
        result[part.index] = covered_ns(its, part["t_begin"].to_numpy(), waited[part.index].to_numpy())
    return result


def _blocked(calls: pd.DataFrame) -> Array:
    """Return intervals in which calls blocked the program, ns, shape (n, 2); they may overlap."""
    waited = calls.loc[calls["t_wait"] > 0]
    return np.concatenate([calls[["t_begin", "t_return"]].to_numpy(), waited[["t_wait", "t_end"]].to_numpy()])


def forwards(calls: pd.DataFrame) -> pd.DataFrame:
    """Return the forward times of the first stage: the rank that sends activations and receives none."""
    called = function(calls)
    senders, receivers = (
        {*calls.loc[called == name, "rank"]} for name in ("_exec_send_activations", "_exec_recv_activations")
    )
    rows = []
    for rank in sorted(senders - receivers):
        own = calls.loc[calls["rank"] == rank].sort_values("t_begin", ignore_index=True)
        ended = np.maximum.accumulate(own["blocked_until"].to_numpy())
        first = (own["op"] == "send") & (own["step"] >= 0) & (own["micro_batch"] == 0)
        for step, part in own.loc[first].groupby("step"):
            begins, ends = int(part.index[0]), int(part.index[-1])
            if begins == 0 or ends + 1 >= len(own):
                continue
            rows.append(
                {
                    "rank": rank,
                    "step": step,
                    "before_first_ns": own["t_begin"].iloc[begins] - ended[begins - 1],
                    "second_forward_ns": own["t_begin"].iloc[ends + 1] - ended[ends],
                }
            )
    return pd.DataFrame(rows, columns=["rank", "step", "before_first_ns", "second_forward_ns"])


TIMES: Final = ["receive_ns", "late_ns", "sender_computing_ns", "sender_in_calls_ns", "transfer_ns"]
_KINDS: Final = (HANDSHAKE, METADATA, HIDDEN_STATES, MASK, GRADIENTS)
_MOMENTS: Final = (START, FIRST, FIRST_STEP, LATER_FIRST, LATER)


def by_kind(table: pd.DataFrame) -> pd.DataFrame:
    """Summarise the receives of one run, a row per `what`, `payload_bytes` and `when`.

    Other columns: `receives`, and for each of TIMES the mean (means add up), `_median`, `_least` and `_most`.
    """
    keys = ["what", "payload_bytes", "when"]
    groups = table.astype(dict.fromkeys(TIMES, float)).groupby(keys, sort=False)
    statistics = (("", "mean"), ("_median", "median"), ("_least", "min"), ("_most", "max"))
    totals = groups.agg(
        receives=("receive_ns", "size"),
        **{f"{name}{end}": (name, statistic) for name in TIMES for end, statistic in statistics},
    ).reset_index()
    order = totals.assign(
        kind=totals["what"].map(dict(zip(_KINDS, range(len(_KINDS)), strict=True))).fillna(len(_KINDS)),
        moment=totals["when"].map(dict(zip(_MOMENTS, range(len(_MOMENTS)), strict=True))),
    ).sort_values(["kind", "moment"], kind="stable")
    return totals.loc[order.index].reset_index(drop=True)


def transfers_by_size(receives: pd.DataFrame, messages: pd.DataFrame) -> pd.DataFrame:
    """Return cold and warm transfers of a pipeline and of bare messages, a row per `which` and `payload_bytes`.

    `transfer_ns` (median), `transfer_ns_least`, `transfer_ns_most` (quartiles), `transfers`. Masks are left out: they
    directly follow the hidden states, on a connection that is already warm.
    """
    parts = []
    known = receives.loc[receives["what"].isin([HANDSHAKE, METADATA, HIDDEN_STATES]) & receives["transfer_ns"].notna()]
    for name, moments in (("pipeline, first", (START, FIRST)), ("pipeline, later", (LATER_FIRST, LATER))):
        parts.append(known.loc[known["when"].isin(moments)].assign(which=name))
    if len(messages):
        when_used = messages["connections"] == "when used"
        first = messages["what"].str.startswith("first")
        which = "alone, " + messages["what"]
        which = which.mask(first, "alone, first, connections made at once")
        parts.append(messages.assign(which=which.mask(first & when_used, "alone, first, connections made when used")))
    pooled = pd.concat([part[["which", "payload_bytes", "transfer_ns"]] for part in parts], ignore_index=True)
    return (
        pooled.astype({"transfer_ns": float})
        .groupby(["which", "payload_bytes"], as_index=False, sort=False)
        .agg(
            transfers=("transfer_ns", "size"),
            **{
                f"transfer_ns{end}": ("transfer_ns", statistic)
                for end, statistic in (("", "median"), ("_least", _quarter), ("_most", _three_quarters))
            },
        )
    )


BASE: Final = "alone, later"
_CAUSES: Final = {
    "alone, first, connections made at once": "new connection",
    "alone, first, connections made when used": "connection made by its first message",
    "alone, later, into untouched memory": "memory never touched before",
}


def first_message_costs(sizes: pd.DataFrame) -> pd.DataFrame:
    """Return the costs of a first message by cause, at the smallest and the largest size.

    `cause`, `smallest_bytes`, `smallest_ns`, `largest_bytes`, `largest_ns`: the median transfer of later bare messages
    in the first row, the time that each cause adds to it in the others. `sizes`: `transfers_by_size`.
    """
    columns = ["cause", "smallest_bytes", "smallest_ns", "largest_bytes", "largest_ns"]
    table = sizes.pivot_table(index="payload_bytes", columns="which", values="transfer_ns", sort=False).sort_index()
    if BASE not in table:
        return pd.DataFrame(columns=columns)
    times = {"later message": table[BASE]}
    times |= {f"+ {cause}": table[which] - table[BASE] for which, cause in _CAUSES.items() if which in table}
    rows = []
    for cause, values in times.items():
        known = values.dropna()
        rows.append((cause, known.index[0], known.iloc[0], known.index[-1], known.iloc[-1]))
    return pd.DataFrame(rows, columns=columns)


def _quarter(values: pd.Series[Any]) -> float:
    return float(values.quantile(0.25))


def _three_quarters(values: pd.Series[Any]) -> float:
    return float(values.quantile(0.75))
