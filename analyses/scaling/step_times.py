"""How long each rank's training steps took, and how long it stood in communication meanwhile.

A step of a rank lasts from its first call of the step to its first call of the next one. Within it,

    blocked     some thread of the rank is inside a call, or waits for one: the union of [t_begin, t_return] and of
                [t_wait, t_end] where the end is known on the host
    late        the part of `blocked` in which another rank of the call has not come yet: until the last rank begins a
                collective, until the sender begins a message. Known for calls between ranks of one host, whose clock
                they share
    in_flight   some call is under way: the union of [t_start or t_begin, t_end]

The rest of a step, after `blocked`, is computation and whatever else the program does. Where the device's clock saw the
ends of calls, the host need not stand still while data moves: `blocked` then says nothing of the device's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.call_times import exact_ends
from commtrace.analyses.engine import Array, RecordBlock
from commtrace.errors import LogError
from commtrace.reading.labels import RecordLabels
from commtrace.reading.log import Process
from commtrace.reading.run import RecordedRun
from commtrace.schema import Clock, Flag

MOST: Final = 200
"""Steps that are measured, the last ones: enough for any mean, and a bound for memory."""

_DEVICE: Final = (int(Clock.DEVICE), int(Clock.DEVICE_WAIT))
_WAITED: Final = (int(Clock.WAIT), int(Clock.FUTURE))
_ONE_SIDED: Final = ("put", "get", "accumulate")


@dataclass(frozen=True)
class StepTimes:
    """What was measured of one run.

    `steps`: a row per `rank` and `step` with `step_ns`, `blocked_ns`, `late_ns`, `in_flight_ns`, `calls`,
    `payload_bytes`, `wire_bytes` (a message counts where it is sent; missing where it does not follow).
    `messages`: a row per call whose transfer was seen whole (all ranks there, its end exact): `op`, `ranks`, `bytes`
    (wire bytes of the rank), `transfer_ns` from the moment when the last rank was there to the end.
    """

    steps: pd.DataFrame
    messages: pd.DataFrame
    marked: bool
    """The program has steps; else all of it counts as one."""
    on_device: bool
    """Some ends were seen by the device's clock."""
    late_known: float
    """Share of the blocked time in calls of which all ranks are on one host and in the log."""


def step_times(run: RecordedRun) -> StepTimes:
    """Measure a run. Raises LogError where its times mean nothing, or where no step is whole."""
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; give a run that happened")
    spans = [_spans(process, labels) for process, labels in zip(run.processes, run.labels, strict=True)]
    if not spans or any(not len(one) for one in spans):
        raise LogError(f"{run.log.path}: a rank recorded no call, so nothing is known of its times")
    chosen, marked = _chosen(spans)
    if not len(chosen):
        raise LogError(
            f"{run.log.path}: no training step is over on every rank; let the program run for three steps or more"
        )
    whole = calls_of(run, chosen)
    steps = pd.concat(
        [_of_process(part, run.labels[int(number)], spans[int(number)], chosen) for number, part in by_process(whole)],
        ignore_index=True,
    )
    blocked = (whole["until"] - whole["t_begin"]).clip(lower=0)
    total = float(blocked.sum())
    known = float(blocked[whole["last_begin"] > 0].sum())
    on_device = bool(whole["clock"].isin(_DEVICE).any())
    return StepTimes(steps, _messages(whole), marked, on_device, known / total if total else 1.0)


def calls_of(run: RecordedRun, steps: Array | None = None, words: Sequence[str] = ()) -> pd.DataFrame:
    """The calls of these steps, of all where unsaid, whose times are known: a row per call, by process and time.

    Beside fields of the record (times in ns of the host's clock, 0: not known): `process` (position in the log),
    `rank`, `op`, `members` (the group), `ranks` (its size), `wire_bytes`, `words` (columns of the normal form), and

        t_wait         when the program began to wait, where it stood still
        until          until when the call held a thread of the program, as far as the host knows
        exact          whether t_end is the end of the call, and not when somebody saw it
        last_begin     when the last rank of the call was there, on the clock of its host; 0: not known
    """
    parts = [_calls(process, labels, steps, words) for process, labels in zip(run.processes, run.labels, strict=True)]
    return _with_late(pd.concat(parts, ignore_index=True), run)


def by_process(table: pd.DataFrame) -> Iterator[tuple[Any, pd.DataFrame]]:
    """Its rows by the position of their process in the log."""
    return iter(table.groupby("process", sort=True))


def _blocks(process: Process, labels: RecordLabels) -> Iterator[RecordBlock]:
    for segment in process.segments:
        for records in segment.blocks():
            yield RecordBlock(records, labels)


def _spans(process: Process, labels: RecordLabels) -> pd.DataFrame:
    """First begin and last end of each step that the process has calls of; `step` is the index."""
    parts = []
    for block in _blocks(process, labels):
        use = block["t_begin"] > 0
        end = np.maximum(np.maximum(block["t_return"], block["t_end"]), block["t_begin"])
        table = pd.DataFrame({"step": block["step"][use], "begin": block["t_begin"][use], "end": end[use]})
        parts.append(table.groupby("step").agg(begin=("begin", "min"), end=("end", "max")))
    if not parts:
        return pd.DataFrame({"begin": [], "end": []}, dtype="int64")
    return pd.concat(parts).groupby(level=0).agg(begin=("begin", "min"), end=("end", "max"))


def _chosen(spans: Sequence[pd.DataFrame]) -> tuple[Array, bool]:
    """Steps that are over on every rank, the first one left out where there are others; else all as one (-1)."""
    common: set[int] = set.intersection(*({int(step) for step in one.index if step >= 0} for one in spans))
    over = sorted(step for step in common if step + 1 in common)
    if over:
        return np.array((over[1:] or over)[-MOST:], np.int64), True
    if any(step >= 0 for one in spans for step in one.index):
        return np.zeros(0, np.int64), True
    return np.array([-1], np.int64), False


def _calls(process: Process, labels: RecordLabels, chosen: Array | None, words: Sequence[str]) -> pd.DataFrame:
    """The calls of the chosen steps, with what tells the ranks of one call apart from those of another."""
    parts = []
    for block in _blocks(process, labels):
        wanted = np.ones(len(block), bool) if chosen is None else np.isin(block["step"], chosen)
        use = np.flatnonzero(wanted & (block["t_begin"] > 0))
        real = (block["flags"][use] & int(Flag.CAPTURED | Flag.SIMULATED)) == 0
        use = use[real]
        on_host = np.isin(block["clock"][use], _WAITED)
        t_wait = np.where(on_host & (block["t_end"][use] > block["t_wait"][use]), block["t_wait"][use], 0)
        parts.append(
            pd.DataFrame(
                {
                    "process": np.full(len(use), labels.number, np.int64),
                    "rank": np.full(len(use), labels.rank, np.int64),
                    "op": block.labels.text("op", block["kind"][use]),
                    "members": block.labels.text("group", block["group"][use]),
                    "ranks": block.labels.group_sizes(block["group"][use]),
                    "wire_bytes": labels.wire_bytes(block)[use],
                    "exact": exact_ends(block)[use],
                    **{word: block.labels.text(word, block.labels.ids(word, block)[use]) for word in words},
                    **{
                        name: block[name][use].astype(np.int64)
                        for name in (
                            "step", "micro_batch", "t_begin", "t_return", "t_start", "t_end", "payload", "seq", "peer",
                            "tag", "clock", "batch",
                        )
                    },
                    "t_wait": t_wait,
                }
            )
        )  # fmt: skip
    table = pd.concat(parts, ignore_index=True).sort_values("t_begin", kind="stable", ignore_index=True)
    # Until when this call holds a thread of the program, as far as the host knows.
    return table.assign(until=np.maximum(table["t_return"], np.where(table["t_wait"] > 0, table["t_end"], 0)))


def _with_late(calls: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    """With `last_begin`."""
    boots = [(process.host, str(process.tables.process.get("boot_id"))) for process in run.processes]
    host = pd.factorize(pd.Series(boots))[0][calls["process"]]
    message = calls["op"].isin(["send", "recv"])
    sender = np.where(calls["op"] == "send", calls["rank"], np.where(message, calls["peer"], -1))
    receiver = np.where(calls["op"] == "recv", calls["rank"], np.where(message, calls["peer"], -1))
    keys = pd.DataFrame(
        {
            "host": host, "op": calls["op"].where(~message, "message"), "members": calls["members"],
            "sender": sender, "receiver": receiver, "tag": calls["tag"], "seq": calls["seq"],
        }
    )  # fmt: skip
    call = keys.groupby([*keys.columns], sort=False).ngroup()
    there = calls.groupby(call)["rank"].transform("nunique")
    last = calls.groupby(call)["t_begin"].transform("max")
    # A send that is buffered does not wait for its receiver; what a receive waits for is that the send has begun.
    began = calls["t_begin"].where(calls["op"] == "send").groupby(call).transform("max")
    last = last.where(~message, began)
    # Nobody waits for anybody in a one-sided call.
    whole = (there == np.where(message, 2, calls["ranks"])) & ~calls["op"].isin(_ONE_SIDED)
    return calls.assign(last_begin=last.where(whole, 0).fillna(0).astype(np.int64))


def _of_process(calls: pd.DataFrame, labels: RecordLabels, span: pd.DataFrame, chosen: Array) -> pd.DataFrame:
    """Its rows of `StepTimes.steps`."""
    begin = span.loc[chosen, "begin"].to_numpy()
    end = span.loc[chosen + 1, "begin"].to_numpy() if chosen[0] >= 0 else span.loc[chosen, "end"].to_numpy()
    known = calls.loc[calls["last_begin"] > 0]
    held_back = np.minimum(known["until"], known["last_begin"])
    late = _pairs(known["t_begin"], np.minimum(held_back, known["t_return"]))
    late_wait = _pairs(known["t_wait"].where(known["t_wait"] > 0, held_back), held_back)
    started = calls["t_start"].where(calls["t_start"] > 0, calls["t_begin"])
    under_way = _pairs(started, np.maximum(calls["t_end"], calls["t_return"]))
    of_step = calls.groupby("step")
    sent = calls["wire_bytes"].groupby(calls["step"]).agg(lambda values: values.sum(skipna=False))
    moved = calls["payload"].where(calls["op"] != "recv", 0).groupby(calls["step"]).sum()
    return pd.DataFrame(
        {
            "rank": np.full(len(chosen), labels.rank),
            "step": chosen,
            "step_ns": end - begin,
            "blocked_ns": covered(held(calls), begin, end),
            "late_ns": covered(np.concatenate([late, late_wait]), begin, end),
            "in_flight_ns": covered(under_way, begin, end),
            "calls": of_step.size().reindex(chosen, fill_value=0).to_numpy(),
            "payload_bytes": moved.reindex(chosen, fill_value=0).to_numpy(),
            "wire_bytes": sent.reindex(chosen, fill_value=0.0).to_numpy(),
        }
    )


def held(calls: pd.DataFrame) -> Array:
    """When the program stood in these calls: intervals in ns, shape (n, 2)."""
    inside = _pairs(calls["t_begin"], calls["t_return"])
    waiting = _pairs(calls["t_wait"].where(calls["t_wait"] > 0, calls["t_end"]), calls["t_end"])
    return np.concatenate([inside, waiting])


def _pairs(begin: Any, end: Any) -> Array:
    """Intervals, shape (n, 2); those that are empty or the wrong way round are left out."""
    pairs = np.stack([np.asarray(begin), np.asarray(end)], axis=1)
    return pairs[pairs[:, 1] > pairs[:, 0]]


def covered(intervals: Array, begin: Array, end: Array) -> Array:
    """Ns between `begin` and `end` (both (n,)) that at least one of the intervals (m, 2) covers."""
    if not len(intervals):
        return np.zeros(len(begin), np.int64)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.concatenate([[True], intervals[1:, 0] > reach[:-1]]))
    starts, ends = intervals[first, 0], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]
    before = np.concatenate([[0], np.cumsum(ends - starts)])

    def until(moments: Array) -> Array:
        at = np.searchsorted(starts, moments, side="right")
        open_ = np.where(at > 0, np.minimum(moments, ends[at - 1]) - starts[at - 1], 0)
        return np.where(at > 0, before[np.maximum(at - 1, 0)] + open_, 0)

    total: Array = until(end) - until(begin)
    return total


def _messages(calls: pd.DataFrame) -> pd.DataFrame:
    """See `StepTimes`. A message is looked at where it is received, as a send may return before its bytes are gone.

    Of a call that goes on behind the program's back its return tells nothing: DDP's take a tenth of a millisecond to
    start, whatever their size.
    """
    seen = calls.loc[
        (calls["last_begin"] > 0)
        & (calls["ranks"] > 1)
        & (calls["batch"] == 0)
        & calls["exact"]
        & ~calls["clock"].isin(_DEVICE)
        & (calls["op"] != "send")
        & calls["wire_bytes"].notna()
    ]
    transfer = seen["t_end"] - np.maximum(seen["last_begin"], seen["t_begin"])
    size = np.where(seen["op"] == "recv", seen["payload"], seen["wire_bytes"])
    table = pd.DataFrame({"op": seen["op"], "ranks": seen["ranks"], "bytes": size, "transfer_ns": transfer})
    return table.loc[transfer > 0].reset_index(drop=True)
