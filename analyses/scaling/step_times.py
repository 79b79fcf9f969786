"""Step time and blocked time per rank: sums of `across_ranks.blocked_time` over measured steps.

Within a step,

    blocked     calls block the rank
    late        the part of `blocked` in which the rank waits for others, where that is known
    in_flight   a call is in progress: the union of all times from arrival to end, and of `blocked`

The rest of a step, outside `blocked`, is computation and whatever else the program does. If the device's clock
recorded ends of calls, the host may continue during a transfer, and `blocked` does not measure the device's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.across_ranks.blocked_time import (
    FIELDS,
    BlockedTime,
    StepsOfProcesses,
    Timeline,
    covered_ns,
    measured_steps,
)
from commtrace.analyses.across_ranks.call_times import COLUMNS as TIME_COLUMNS
from commtrace.analyses.across_ranks.matching import Derived, match_calls
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import Analysis, NamedTables, fold
from commtrace.analyses.grouping import Array, merge_sums, sum_groups
from commtrace.analyses.record_blocks import RecordBlock
from commtrace.durations import exact_ends, has_own_times, wait_begin
from commtrace.errors import LogError
from commtrace.rank_ranges import format_ranks
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import DEVICE_CLOCKS, Phase

MAX_STEPS: Final = 200
"""Maximum number of measured steps, the last ones: enough for any mean, and a bound on memory."""

_UNMARKED: Final = -1
"""Step of all calls of a run that marks no steps."""


@dataclass(frozen=True)
class StepTimes:
    """Step-time measurements of one run."""

    steps: pd.DataFrame
    """A row per `rank` and `step` with `step_ns`, `blocked_ns`, `late_ns`, `in_flight_ns`, `calls`, `payload_bytes`,
    `wire_bytes` (a message counts where it is sent; missing where it is not known)."""
    messages: pd.DataFrame
    """A row per call whose transfer was measured (all ranks known, exact end): `op`, `ranks`, `bytes` (wire bytes of
    the rank), `transfer_ns`."""
    marked: bool
    """Whether the log has training steps; else all of it counts as one."""
    on_device: bool
    """Whether the device's clock recorded some ends."""
    late_known: float
    """Share of the blocked time of which it is known whether the rank waits for others."""


def step_times(run: AnalysedRun) -> StepTimes:
    """Measure the training steps of a run.

    Raises:
        LogError: The run is a dry run, a rank recorded no call, or no step is complete.
    """
    if run.simulated:
        raise LogError(f"{run.log.path}: a dry run has no times; pass a recorded run")
    run.require_times("the times of its steps")
    recorded = fold(run, [_RECORDED_STEPS])["recorded_steps"]
    without_calls = {run.processes[number].rank for number in {*range(len(run.processes))} - {*recorded["process"]}}
    if without_calls or not len(recorded):
        ranks = f"rank {format_ranks(without_calls)}" if without_calls else "the run"
        raise LogError(f"{run.log.path}: {ranks} recorded no calls; record at least three steps on every rank")
    marked = bool((recorded["step"] >= 0).any())
    steps = _choose_steps(recorded, run) if marked else np.array([_UNMARKED])
    if not len(steps):
        raise LogError(f"{run.log.path}: no training step completed on every rank; record at least three in a row")
    blocked = _read(run, _blocking_steps(recorded, steps) if marked else steps)
    table = pd.concat(_step_rows(run, blocked, steps, marked=marked), ignore_index=True)
    if not table["step_ns"].max() > 0:
        raise LogError(f"{run.log.path}: its steps have no duration, so its times are damaged")
    of_steps = np.isin(blocked.calls["step"], steps)
    on_device = bool(np.isin(blocked.calls["clock"][of_steps], DEVICE_CLOCKS).any())
    return StepTimes(table, _messages(blocked, of_steps), marked, on_device, _late_known(blocked))


def _recorded_steps(block: RecordBlock) -> pd.DataFrame:
    """Return the steps of each process, when their calls began and ended, and whether they have an evaluation."""
    used = np.flatnonzero(block["t_begin"] > 0)
    columns = {
        "process": block["process"],
        "step": block["step"].astype(np.int64),
        "evaluates": (block["phase"] == Phase.EVALUATION).astype(np.int64),
        "begin": block["t_begin"],
        "end": np.maximum(block["t_return"], block["t_end"]),
    }
    return _merge_steps([pd.DataFrame({name: column[used] for name, column in columns.items()}, copy=False)])


def _finish_steps(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    return {"recorded_steps": table}


_merge_steps: Final = merge_sums("process", "step", evaluates="max", begin="min", end="max")
_RECORDED_STEPS: Final = Analysis("recorded_steps", _recorded_steps, _merge_steps, _finish_steps)


def _choose_steps(recorded: pd.DataFrame, run: AnalysedRun) -> Array:
    """Return the steps to measure; those with an evaluation, and those after one, only if there are no others."""
    columns = (recorded[name].to_numpy() for name in ("process", "step", "evaluates"))
    steps, regular = measured_steps(StepsOfProcesses(*columns), len(run.processes))
    selected = run.select_steps(steps)
    return (steps[selected & regular] if (selected & regular).any() else steps[selected])[-MAX_STEPS:]


def _blocking_steps(recorded: pd.DataFrame, steps: Array) -> Array:
    """Return the steps whose calls may block a rank within `steps`, ascending.

    A step begins at the end of the one before it, and the next one shows which operations it waits for in its end.
    Calls of earlier steps, or of start-up, may still be in flight.
    """
    process, step, begin, end = (recorded[name].to_numpy() for name in ("process", "step", "begin", "end"))
    first = step == steps[0] - 1
    begun = np.full(process.max() + 1, np.iinfo(np.int64).max)
    begun[process[first]] = begin[first]
    in_flight = (step < steps[0]) & (end > begun[process])
    within = (step >= steps[0] - 1) & (step <= steps[-1] + 1)
    return np.unique(step[in_flight | within])


_COLUMNS: Final = (*FIELDS, "micro_batch", "t_start", "payload", "peer", "tag", "batch", "op")


def _group_sizes(block: RecordBlock) -> Array:
    return block.labels.group_sizes(block["group"])


def _wire_bytes(block: RecordBlock) -> Array:
    return block.labels.wire_bytes(block)


_DERIVED: Final[dict[str, Derived]] = {
    **TIME_COLUMNS, "ranks": _group_sizes, "wire_bytes": _wire_bytes, "exact": exact_ends,
}  # fmt: skip


def _read(run: AnalysedRun, steps: Array | None = None, columns: Sequence[str] = ()) -> BlockedTime:
    return BlockedTime.of(match_calls(run, [*_COLUMNS, *columns], steps, derived=_DERIVED), run.clocks)


def _step_rows(run: AnalysedRun, blocked: BlockedTime, steps: Array, *, marked: bool) -> Iterator[pd.DataFrame]:
    """Yield the rows of `StepTimes.steps`."""
    calls = blocked.calls
    ends = blocked.step_ends(wanted := np.union1d(steps, steps - 1))
    is_receive = calls.has_label("op", "recv")
    for row, (process, line) in enumerate(blocked.timelines.items()):
        begin, end = (ends[row, np.searchsorted(wanted, numbers)] for numbers in (steps - 1, steps))
        if not marked:
            begin, end = line.begin[:1], end
        own = np.unique(line.call)
        numbers = np.searchsorted(steps, calls["step"][own])
        is_in = steps[np.minimum(numbers, len(steps) - 1)] == calls["step"][own]
        own, numbers = own[is_in], numbers[is_in]
        sums = {
            "calls": np.ones(len(own), np.int64),
            "payload_bytes": np.where(is_receive[own], 0, calls["payload"][own]),
            "wire_bytes": calls["wire_bytes"][own],
        }
        columns = {
            "step_ns": end - begin,
            "blocked_ns": covered_ns(line.blocked, begin, end),
            "late_ns": covered_ns(line.waiting, begin, end),
            "in_flight_ns": covered_ns(np.concatenate([line.blocked, _flights(blocked, line)]), begin, end),
        } | {name: sum_groups(values, numbers, len(steps)) for name, values in sums.items()}
        yield pd.DataFrame({"rank": run.processes[process].rank, "step": steps, **columns})


def _flights(blocked: BlockedTime, line: Timeline) -> Array:
    """Return when the calls of a process were in progress, shape (calls, 2)."""
    call = np.unique(line.call)
    arrival = blocked.times["arrival"][call]
    return np.stack([arrival, np.maximum(blocked.times["t_end"][call], arrival)], axis=1)


def _late_known(blocked: BlockedTime) -> float:
    """Return `StepTimes.late_known`."""
    lines = blocked.timelines.values()
    lengths = [np.diff(line.blocked, axis=1)[:, 0] for line in lines]
    total = sum(int(ns.sum()) for ns in lengths)
    known = sum(int(ns[line.is_known].sum()) for ns, line in zip(lengths, lines, strict=True))
    return known / total if total else 1.0


def _messages(blocked: BlockedTime, of_steps: Array) -> pd.DataFrame:
    """Return `StepTimes.messages`. A message is measured at its receiver: a send may return before its bytes are sent.

    Calls that continue in the background are timed from their release, not from their return: DDP's calls take a tenth
    of a millisecond to start, whatever their size.
    """
    calls, times = blocked.calls, blocked.call_times
    measured = of_steps & times.known & (times.transfer > 0) & calls["exact"] & (calls["batch"] == 0)
    measured &= ~np.isin(calls["clock"], DEVICE_CLOCKS) & ~calls.has_label("op", "send")
    at = np.flatnonzero(measured & ~np.isnan(calls["wire_bytes"]))
    op = calls.text("op", at)
    size = np.where(op == "recv", calls["payload"][at], calls["wire_bytes"][at])
    return pd.DataFrame({"op": op, "ranks": calls["ranks"][at], "bytes": size, "transfer_ns": times.transfer[at]})


def timed_calls(run: AnalysedRun, steps: Array | None = None, columns: Sequence[str] = ()) -> pd.DataFrame:
    """Return the calls whose times are known, a row per call, sorted by process and time.

    Args:
        run: The run.
        steps: Steps of the calls to return, int; None: all.
        columns: Further columns of the event table.

    Returns:
        Fields of the record (times in ns of the host's clock, 0: not known), `process` (index in the log), `rank`,
        `op`, `ranks` (size of the group), `wire_bytes`, `columns`, and

        t_wait          when the program began to wait, if it blocked
        blocked_until   end of the time in which the call blocked a thread of the program, observed on the host
        blocked_ns      time in which it blocked its rank (`across_ranks.blocked_time`)
        waiting_ns      the part of it before the call's release; missing if not known
        exact           whether t_end is the end of the transfer (`durations.exact_ends`)
        release         when the last rank that the call waits for had arrived, or the call itself; 0: not known
        transfer_ns     from then to the end; missing if not known
    """
    blocked = _read(run, steps, columns)
    calls, times = blocked.calls, blocked.call_times
    begin = np.where(has_own_times(calls), calls["t_begin"], 0)
    at = np.lexsort((begin, calls["process"]))
    at = at[begin[at] > 0]
    fields = [name for name in _COLUMNS if name not in ("op", "t_wait", "phase", "flags")]
    known = {name: calls[name][at].astype(np.int64) for name in ("process", *fields)}
    end, waited = known["t_end"], wait_begin(calls)[at]
    waited = np.where(end > waited, waited, 0)
    table = {
        **known,
        **{name: calls[name][at] for name in ("ranks", "wire_bytes", "exact")},
        **{name: calls.text(name, at) for name in ("op", *columns)},
        "rank": np.array([process.rank for process in run.processes])[known["process"]],
        "t_wait": waited,
        "blocked_until": np.maximum(known["t_return"], np.where(waited > 0, end, 0)),
        "release": np.maximum(times.release[at], 0),
        "transfer_ns": np.where(times.known, times.transfer, np.nan)[at],
        **{name: values[at] for name, values in blocked.of_calls().items()},
    }
    return pd.DataFrame(table, copy=False)
