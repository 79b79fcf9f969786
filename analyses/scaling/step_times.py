"""Step time and blocked time per rank.

A step of a rank lasts from its first call of the step to its first call of the next one. Within it,

    blocked     a thread of the rank is inside a call, or waits for one: the union of [t_begin, t_return] and of
                [t_wait, t_end] where the end is known on the host
    late        the part of `blocked` before the last rank begins a collective, or the sender a message. Between
                hosts, by their aligned clocks (`across_ranks.clocks`): 0 if their bounds leave the order open; not
                known if the clocks have no bounds
    in_flight   a call is in progress: the union of [t_start or t_begin, t_end]

The rest of a step, outside `blocked`, is computation and whatever else the program does. If the device's clock
recorded ends of calls, the host may continue during a transfer, and `blocked` does not measure the device's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.across_ranks.clocks import clocks_of
from commtrace.analyses.across_ranks.dependencies import operations
from commtrace.analyses.across_ranks.matching import Derived, MatchedCalls, match_calls
from commtrace.analyses.call_times import exact_ends
from commtrace.analyses.fold_engine import Analysis, NamedTables, fold
from commtrace.analyses.grouping import Array, merge_sums
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.durations import has_own_times, wait_begin
from commtrace.errors import LogError
from commtrace.formatting import format_ranks
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import DEVICE_CLOCKS, Phase

MAX_STEPS: Final = 200
"""Maximum number of measured steps, the last ones: enough for any mean, and a bound on memory."""

_RECORD_FIELDS: Final = (
    "step", "micro_batch", "t_begin", "t_return", "t_start", "t_end", "payload", "peer", "tag", "clock", "batch",
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
    """Share of the blocked time in calls whose ranks are all in the log, on one host or on hosts with clock bounds."""


def step_times(run: RecordedRun) -> StepTimes:
    """Measure the training steps of a run.

    Raises:
        LogError: The run is a dry run, a rank recorded no call, or no step is complete.
    """
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; pass a recorded run")
    run.require_events("the times of its steps")
    spans = fold(run, [_SPANS])["step_spans"]
    without_calls = {run.processes[number].rank for number in {*range(len(run.processes))} - {*spans["process"]}}
    if without_calls or not len(spans):
        ranks = f"rank {format_ranks(without_calls)}" if without_calls else "the run"
        raise LogError(f"{run.log.path}: {ranks} recorded no calls; record at least three steps on every rank")
    chosen, marked = _choose_steps(spans.loc[run.select_steps(spans["step"].to_numpy())], len(run.processes))
    if not len(chosen):
        raise LogError(f"{run.log.path}: no training step completed on every rank; record at least three in a row")
    calls = timed_calls(run, chosen)
    steps = [
        _measure_steps(of_process, spans.loc[spans["process"] == number].set_index("step"), chosen)
        for number, of_process in calls.groupby("process")
    ]
    table = pd.concat(steps, ignore_index=True)
    if not table["step_ns"].max() > 0:
        raise LogError(f"{run.log.path}: its steps have no duration, so its times are damaged")
    blocked = (calls["blocked_until"] - calls["t_begin"]).clip(lower=0)
    total, known = float(blocked.sum()), float(blocked[calls["last_begin"] > 0].sum())
    on_device = bool(calls["clock"].isin(DEVICE_CLOCKS).any())
    late_known = known / total if total else 1.0
    return StepTimes(table, _messages(calls), marked, on_device, late_known)


def _spans(block: RecordBlock) -> pd.DataFrame:
    """Return `begin` of the first and `end` of the last call of each step, and whether it has an evaluation."""
    used = np.flatnonzero(block["t_begin"] > 0)
    columns = {
        "process": block["process"],
        "step": block["step"].astype(np.int64),
        "begin": block["t_begin"],
        "end": np.maximum(np.maximum(block["t_return"], block["t_end"]), block["t_begin"]),
        "evaluates": (block["phase"] == Phase.EVALUATION).astype(np.int64),
    }
    return _merge_spans([pd.DataFrame({name: column[used] for name, column in columns.items()}, copy=False)])


def _finish_spans(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    return {"step_spans": table}


_merge_spans: Final = merge_sums("process", "step", begin="min", end="max", evaluates="max")
_SPANS: Final = Analysis("step_spans", _spans, _merge_spans, _finish_spans)


def _choose_steps(spans: pd.DataFrame, processes: int) -> tuple[Array, bool]:
    """Return the steps to measure, and whether the log has training steps; without any, the whole log is step -1.

    The measured steps are complete on every rank. The first step, and steps followed by an evaluation, are left out if
    there are others.
    """
    training = spans.loc[spans["step"] >= 0].groupby("step")
    if not len(training):
        return np.array([-1]), False
    sizes = training.size()
    common = sizes.index[sizes == processes].to_numpy()
    over = common[np.isin(common + 1, common)]
    later = over[1:] if len(over) > 1 else over
    regular = later[training["evaluates"].max().loc[later] == 0]
    return (regular if len(regular) else later)[-MAX_STEPS:], True


def timed_calls(run: RecordedRun, steps: Array | None = None, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Return the calls whose times are known, a row per call, sorted by process and time.

    Args:
        run: The run.
        steps: Steps of the calls to return, int; None: all.
        columns: Further columns of the event table.

    Returns:
        Fields of the record (times in ns of the host's clock, 0: not known), `process` (index in the log), `rank`,
        `op`, `ranks` (size of the group), `wire_bytes`, `columns`, and

        t_wait         when the program began to wait, if it blocked
        blocked_until  end of the time in which the call blocked a thread of the program, observed on the host
        exact          whether t_end is the end of the transfer (`call_times.exact_ends`)
        last_begin     when the last rank of the call began it, on the clock of this call's host; 0: not known
    """
    calls = match_calls(run, [*_RECORD_FIELDS, "t_wait", "flags", "op", *columns], steps, derived=_DERIVED)
    begin = np.where(has_own_times(calls), calls["t_begin"], 0)
    at = np.lexsort((begin, calls["process"]))
    at = at[begin[at] > 0]
    last_begin = _last_begins(run, calls, begin)[at]
    known = {name: calls[name][at].astype(np.int64) for name in ("process", *_RECORD_FIELDS)}
    end, waited = known["t_end"], wait_begin(calls)[at]
    waited = np.where(end > waited, waited, 0)
    table = {
        **known,
        **{name: calls[name][at] for name in ("ranks", "wire_bytes", "exact")},
        **{name: calls.text(name, at) for name in ("op", *columns)},
        "rank": np.array([process.rank for process in run.processes])[known["process"]],
        "t_wait": waited,
        "blocked_until": np.maximum(known["t_return"], np.where(waited > 0, end, 0)),
        "last_begin": last_begin,
    }
    return pd.DataFrame(table, copy=False)


def _group_sizes(block: RecordBlock) -> Array:
    return block.labels.group_sizes(block["group"])


def _wire_bytes(block: RecordBlock) -> Array:
    return block.labels.wire_bytes(block)


_DERIVED: Final[dict[str, Derived]] = {
    "ranks": _group_sizes, "wire_bytes": _wire_bytes, "exact": exact_ends, "operation": operations,
}  # fmt: skip


def _last_begins(run: RecordedRun, calls: MatchedCalls, begin: Array) -> Array:
    """Return when the last rank of each call began it, on the clock of the call's host, ns, 0 where not known.

    A receive waits until the send has begun; a buffered send does not wait for its receiver.

    Args:
        run: The run.
        calls: Its calls, with the columns "operation" and "op".
        begin: When each call began, 0 where not known.
    """
    clocks, at = clocks_of(run), calls.matched
    hosts, instance = clocks.host_of_process[calls["process"]], calls["instance"][at]
    aligned = clocks.to_reference(calls["process"], begin)
    moment = begin if aligned is None else aligned
    between_hosts = calls.smallest(hosts) < calls.largest(hosts)
    known = calls.complete & (calls.smallest(begin) > 0)
    known &= calls.smallest(calls["operation"]) == calls.largest(calls["operation"])
    known &= ~between_hosts if aligned is None else True
    last = calls.largest(np.where(calls.has_label("op", "recv"), 0, moment))[instance]
    # Between hosts, a difference counts only if it exceeds the error of their clocks.
    unclear = between_hosts[instance] & (np.abs(last - moment[at]) <= 2 * clocks.half_width_ns)
    result = np.zeros(len(calls), np.int64)
    result[at] = np.where(known[instance], begin[at] + np.where(unclear, 0, last - moment[at]), 0)
    return result


def _measure_steps(calls: pd.DataFrame, spans: pd.DataFrame, steps: Array) -> pd.DataFrame:
    """Return the rows of `StepTimes.steps` of one process, from its calls in these steps and spans by step."""
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
            "rank": np.full(len(steps), calls["rank"].iloc[0]),
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
    """Return the non-empty intervals, shape (n, 2)."""
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
    """Return `StepTimes.messages`. A message is measured at its receiver: a send may return before its bytes are sent.

    Calls that continue in the background are timed from when their last rank began them, not from their return: DDP's
    calls take a tenth of a millisecond to start, whatever their size.
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
