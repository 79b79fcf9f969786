"""Step time and blocked time per rank.

A step of a rank lasts from its first call of the step to its first call of the next one. Within it,

    blocked     a thread of the rank is inside a call, or waits for one: the union of [t_begin, t_return] and of
                [t_wait, t_end] where the end is known on the host
    late        the part of `blocked` before the last rank begins a collective, or the sender a message. Between
                hosts by their aligned clocks, and 0 where their bounds do not tell (`across_ranks.clocks`); not known
                between hosts whose clocks have no bounds
    in_flight   a call is in progress: the union of [t_start or t_begin, t_end]

The rest of a step, after `blocked`, is computation and whatever else the program does. If the device's clock
recorded ends of calls, the host may continue during a transfer, and `blocked` does not measure the device's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd

from commtrace.analyses.across_ranks.clocks import clocks_of
from commtrace.analyses.call_times import exact_ends
from commtrace.analyses.grouping import Array, concat_tables, merge_sums, positions_by_value
from commtrace.analyses.record_blocks import RecordBlock, read_blocks
from commtrace.durations import has_own_times, wait_begin
from commtrace.errors import LogError
from commtrace.formatting import format_ranks
from commtrace.reading.executors import RunPart
from commtrace.reading.labels import RunLabels
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import DEVICE_CLOCKS, Phase

MAX_STEPS: Final = 200
"""Steps that are measured, the last ones: enough for any mean, and a bound for memory."""

_ONE_SIDED: Final = ("put", "get", "accumulate")
_RECORD_FIELDS: Final = (
    "step", "micro_batch", "t_begin", "t_return", "t_start", "t_end", "payload", "seq", "peer", "tag", "clock", "batch",
)  # fmt: skip


@dataclass(frozen=True)
class StepTimes:
    """Step-time measurements of one run."""

    steps: pd.DataFrame
    """A row per `rank` and `step` with `step_ns`, `blocked_ns`, `late_ns`, `in_flight_ns`, `calls`, `payload_bytes`,
    `wire_bytes` (a message counts where it is sent; missing where it is not known)."""
    messages: pd.DataFrame
    """A row per call whose transfer was measured (all ranks known, exact end): `op`, `ranks`, `bytes` (wire bytes of
    the rank), `transfer_ns` from when the last rank began the call to its end."""
    marked: bool
    """Whether the log has training steps; else all of it counts as one."""
    on_device: bool
    """Whether the device's clock recorded some ends."""
    late_known: float
    """Share of the blocked time in calls of which all ranks are in the log, on one host or on hosts with bounds."""


def step_times(run: RecordedRun) -> StepTimes:
    """Measure the training steps of a run.

    Raises:
        LogError: The run is a dry run, a rank recorded no call, or no step is complete.
    """
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; pass a recorded run")
    run.require_events("the times of its steps")
    spans = _step_spans(run)
    without_calls = {process.rank for number, process in enumerate(run.processes) if number not in spans}
    if without_calls or not spans:
        ranks = f"rank {format_ranks(without_calls)}" if without_calls else "the run"
        raise LogError(f"{run.log.path}: {ranks} recorded no calls; record at least three steps on every rank")
    chosen, marked = _choose_steps([span.loc[run.select_steps(span.index.to_numpy())] for span in spans.values()])
    if not len(chosen):
        raise LogError(f"{run.log.path}: no training step completed on every rank; record at least three in a row")
    calls = timed_calls(run, chosen)
    steps = [
        _measure_steps(calls.loc[calls["process"] == number], run.processes[number].rank, spans[number], chosen)
        for number in sorted(calls["process"].unique().tolist())
    ]
    table = pd.concat(steps, ignore_index=True)
    if not table["step_ns"].max() > 0:
        raise LogError(f"{run.log.path}: its steps have no duration, so its times are damaged")
    blocked = (calls["blocked_until"] - calls["t_begin"]).clip(lower=0)
    total, known = float(blocked.sum()), float(blocked[calls["last_begin"] > 0].sum())
    on_device = bool(calls["clock"].isin(DEVICE_CLOCKS).any())
    late_known = known / total if total else 1.0
    return StepTimes(table, _messages(calls), marked, on_device, late_known)


def timed_calls(run: RecordedRun, steps: Array | None = None, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Return the calls whose times are known, a row per call, by process and time.

    Args:
        run: The run.
        steps: Steps whose calls are wanted, int; None: all.
        columns: Further columns of the event table.

    Returns:
        Fields of the record (times in ns of the host's clock, 0: not known), `process` (position in the log), `rank`,
        `op`, `members` (the group), `ranks` (its size), `wire_bytes`, `columns`, and

        t_wait         when the program began to wait, if it blocked
        blocked_until  end of the time in which the call blocked a thread of the program, observed on the host
        exact          whether t_end is the end of the transfer (`call_times.exact_ends`)
        last_begin     when the last rank of the call began it, on the clock of this call's host; 0: not known
    """
    calls = _table_of_calls(run, "calls", functools.partial(_calls, steps, columns))
    calls = calls.iloc[np.lexsort((calls["t_begin"], calls["process"]))].reset_index(drop=True)
    waited_until = np.where(calls["t_wait"] > 0, calls["t_end"], 0)
    return _with_last_begin(calls.assign(blocked_until=np.maximum(calls["t_return"], waited_until)), run)


_OfBlock: TypeAlias = Callable[[RecordBlock], pd.DataFrame]


def _table_of_calls(run: RecordedRun, name: str, function: _OfBlock) -> pd.DataFrame:
    """Return the tables of all blocks of a run as one, computed by its executor."""
    parts = run.executor.map(name, functools.partial(_of_part, function, run.labels), run.parts())
    return concat_tables([*chain.from_iterable(parts)])


def _of_part(function: _OfBlock, labels: RunLabels, part: RunPart) -> list[pd.DataFrame]:
    return [function(block) for block in read_blocks(part, labels, fields=_RECORD_FIELDS)]


def _step_spans(run: RecordedRun) -> dict[int, pd.DataFrame]:
    """Return `_spans` of each process that has calls, by its number, indexed by `step`."""
    table = _merge_spans([_table_of_calls(run, "steps", _spans)])
    processes = table["process"].to_numpy()
    return {number: table.loc[at].set_index("step") for number, at in positions_by_value(processes).items()}


_merge_spans: Final = merge_sums("process", "step", begin="min", end="max", evaluates="max")


def _spans(block: RecordBlock) -> pd.DataFrame:
    """Return `begin` of the first and `end` of the last call of each process and step, and whether it `evaluates`."""
    end = np.maximum(np.maximum(block["t_return"], block["t_end"]), block["t_begin"])
    columns = {"process": block["process"], "step": block["step"], "begin": block["t_begin"], "end": end}
    table = pd.DataFrame({**columns, "evaluates": block["phase"] == Phase.EVALUATION}).astype(np.int64)
    return _merge_spans([table.loc[block["t_begin"] > 0]])


def _choose_steps(spans: Sequence[pd.DataFrame]) -> tuple[Array, bool]:
    """Return the steps to measure, and whether the log has training steps; without any, all is the step -1.

    The measured steps are complete on every rank. The first step, and steps that an evaluation follows, are left out
    if there are others.
    """
    common: set[int] = set.intersection(*({int(step) for step in span.index if step >= 0} for span in spans))
    over = sorted(step for step in common if step + 1 in common)
    if over:
        evaluated = {int(step) for span in spans for step in span.index[span["evaluates"] > 0]}
        later = over[1:] or over
        return np.array(([step for step in later if step not in evaluated] or later)[-MAX_STEPS:], np.int64), True
    if any(step >= 0 for span in spans for step in span.index):
        return np.zeros(0, np.int64), True
    return np.array([-1], np.int64), False


def _calls(steps: Array | None, columns: Sequence[str], block: RecordBlock) -> pd.DataFrame:
    """Return the calls of a block, without `last_begin` and `blocked_until`."""
    labels = block.labels
    wanted = np.ones(len(block), bool) if steps is None else np.isin(block["step"], steps)
    used = np.flatnonzero(wanted & (block["t_begin"] > 0) & has_own_times(block))
    waited = wait_begin(block)
    return pd.DataFrame(
        {
            "process": block["process"][used],
            "rank": block["rank"][used],
            "op": labels.text("op", block["kind"][used]),
            "members": labels.text("group", block["group"][used]),
            "ranks": labels.group_sizes(block["group"][used]),
            "wire_bytes": labels.wire_bytes(block)[used],
            "exact": exact_ends(block)[used],
            **{name: labels.text(name, labels.ids(name, block)[used]) for name in columns},
            **{name: block[name][used].astype(np.int64) for name in _RECORD_FIELDS},
            "t_wait": np.where(block["t_end"] > waited, waited, 0)[used],
        }
    )


def _with_last_begin(calls: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    clocks = clocks_of(run)
    hosts = clocks.host_of_process[calls["process"]]
    common = clocks.to_reference(calls["process"].to_numpy(), calls["t_begin"].to_numpy())
    begin = calls["t_begin"] if common is None else pd.Series(common, calls.index)
    is_point_to_point = calls["op"].isin(["send", "recv"])
    peer = calls["peer"].where(is_point_to_point, -1)
    keys = pd.DataFrame(
        {
            "host": hosts if common is None else 0,
            "op": calls["op"].where(~is_point_to_point, "message"),
            "members": calls["members"],
            "sender": calls["rank"].where(calls["op"] == "send", peer),
            "receiver": calls["rank"].where(calls["op"] == "recv", peer),
            "tag": calls["tag"],
            "seq": calls["seq"],
        }
    )
    call_id = keys.groupby([*keys.columns], sort=False).ngroup()
    ranks_seen = calls.groupby(call_id)["rank"].transform("nunique")
    last = begin.groupby(call_id).transform("max")
    # A buffered send does not wait for its receiver; a receive waits until the send has begun.
    send_begin = begin.where(calls["op"] == "send").groupby(call_id).transform("max")
    # No rank waits for another in a one-sided call.
    all_seen = (ranks_seen == calls["ranks"].where(~is_point_to_point, 2)) & ~calls["op"].isin(_ONE_SIDED)
    last_begin = last.where(~is_point_to_point, send_begin).where(all_seen, 0)
    known = last_begin.fillna(0).astype(np.int64)
    if common is None or len(clocks.hosts) == 1:
        return calls.assign(last_begin=known)
    several = pd.Series(hosts, calls.index).groupby(call_id).transform("nunique") > 1
    unclear = several & ((known - begin).abs() <= 2 * clocks.half_width_ns)
    on_own_clock = (known - begin + calls["t_begin"]).where(~unclear, calls["t_begin"])
    return calls.assign(last_begin=on_own_clock.where(known > 0, 0))


def _measure_steps(calls: pd.DataFrame, rank: int, spans: pd.DataFrame, steps: Array) -> pd.DataFrame:
    """Return the rows of `StepTimes.steps` of one process."""
    begin = spans.loc[steps, "begin"].to_numpy()
    end = spans.loc[steps + 1, "begin"].to_numpy() if steps[0] >= 0 else spans.loc[steps, "end"].to_numpy()
    known = calls.loc[calls["last_begin"] > 0]
    until_last = np.minimum(known["blocked_until"], known["last_begin"])
    late_in_call = _intervals(known["t_begin"], np.minimum(until_last, known["t_return"]))
    late_in_wait = _intervals(known["t_wait"].where(known["t_wait"] > 0, until_last), until_last)
    started = calls["t_start"].where(calls["t_start"] > 0, calls["t_begin"])
    in_flight = _intervals(started, np.maximum(calls["t_end"], calls["t_return"]))
    by_step = calls.groupby("step")
    wire = by_step["wire_bytes"].agg(lambda values: values.sum(skipna=False))
    payload = calls["payload"].where(calls["op"] != "recv", 0).groupby(calls["step"]).sum()
    return pd.DataFrame(
        {
            "rank": np.full(len(steps), rank),
            "step": steps,
            "step_ns": end - begin,
            "blocked_ns": covered_ns(blocked_intervals(calls), begin, end),
            "late_ns": covered_ns(np.concatenate([late_in_call, late_in_wait]), begin, end),
            "in_flight_ns": covered_ns(in_flight, begin, end),
            "calls": by_step.size().reindex(steps, fill_value=0).to_numpy(),
            "payload_bytes": payload.reindex(steps, fill_value=0).to_numpy(),
            "wire_bytes": wire.reindex(steps, fill_value=0.0).to_numpy(),
        }
    )


def blocked_intervals(calls: pd.DataFrame) -> Array:
    """Return intervals in which calls of `timed_calls` blocked the program, ns, shape (n, 2); they may overlap."""
    inside = _intervals(calls["t_begin"], calls["t_return"])
    waiting = _intervals(calls["t_wait"].where(calls["t_wait"] > 0, calls["t_end"]), calls["t_end"])
    return np.concatenate([inside, waiting])


def _intervals(begin: Any, end: Any) -> Array:
    """Return the intervals that are not empty, shape (n, 2)."""
    pairs = np.stack([np.asarray(begin), np.asarray(end)], axis=1)
    return pairs[pairs[:, 1] > pairs[:, 0]]


def covered_ns(intervals: Array, begin: Array, end: Array) -> Array:
    """Return the time between `begin` and `end`, both of shape (n,), that intervals of shape (m, 2) cover, in ns."""
    if not len(intervals):
        return np.zeros(len(begin), np.int64)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.concatenate([[True], intervals[1:, 0] > reach[:-1]]))
    starts, ends = intervals[first, 0], reach[np.concatenate([first[1:] - 1, [len(reach) - 1]])]
    covered_before = np.concatenate([[0], np.cumsum(ends - starts)])

    def covered_until(timestamps: Array) -> Array:
        at = np.searchsorted(starts, timestamps, side="right")
        last = np.where(at > 0, np.minimum(timestamps, ends[at - 1]) - starts[at - 1], 0)
        return np.where(at > 0, covered_before[np.maximum(at - 1, 0)] + last, 0)

    total: Array = covered_until(end) - covered_until(begin)
    return total


def _messages(calls: pd.DataFrame) -> pd.DataFrame:
    """Return `StepTimes.messages`. A message is measured at its receiver: a send may return before its bytes are gone.

    Calls that continue in the background count from when their last rank began them, not from their return: DDP's take
    a tenth of a millisecond to start, whatever their size.
    """
    timed = calls.loc[
        (calls["last_begin"] > 0)
        & (calls["ranks"] > 1)
        & (calls["batch"] == 0)
        & calls["exact"]
        & ~calls["clock"].isin(DEVICE_CLOCKS)
        & (calls["op"] != "send")
        & calls["wire_bytes"].notna()
    ]
    transfer = timed["t_end"] - np.maximum(timed["last_begin"], timed["t_begin"])
    size = np.where(timed["op"] == "recv", timed["payload"], timed["wire_bytes"])
    table = pd.DataFrame({"op": timed["op"], "ranks": timed["ranks"], "bytes": size, "transfer_ns": transfer})
    return table.loc[transfer > 0].reset_index(drop=True)
