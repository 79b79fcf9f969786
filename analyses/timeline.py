"""Calls of one training step of each rank, in the order of time.

Only step 0 and powers of two are candidates, because they are known before the log has been read to its end. The step
is the last candidate that is complete on every rank shown, which is late enough to be past the warm-up. The table has
the first FIRST_PROCESSES processes of the log, and further ones at powers of two. Times are on one clock if the calls
bound the hosts' clocks (`across_ranks.clocks`). Otherwise they are only as comparable as the hosts' wall clocks are
synchronised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.durations import durations

from .across_ranks.clocks import to_one_clock
from .analysed_run import AnalysedRun
from .fold_engine import Analysis, NamedTables
from .grouping import concat_tables
from .record_blocks import RecordBlock, steps_of
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, bytes_column, duration, flag

FIRST_PROCESSES: Final = 16
MAX_CALLS: Final = 4096

TIMELINE: Final = TableSpec("timeline", "The calls of one training step",
    "A row per call, by rank and time, of one step that was complete on every rank shown.", (
    shared.RANK, shared.STEP, shared.OP, shared.ROLE, shared.PHASE, shared.SITE,
    bytes_column("payload_bytes", "payload", "Payload of the call."),
    duration("begin_ns", "start",
        "Start of the call since the first call, on the hosts' aligned clocks, else their wall clocks."),
    duration("in_call_ns", "in call", "Time inside the call; missing if not known."),
    duration("to_completion_ns", "to completion", "Time from the call to its end; missing if not observed."),
    flag("more_calls", "", f"Whether the rank made more calls in this step than the {MAX_CALLS:,} that are kept."),
))  # fmt: skip

_CANDIDATE_STEPS: Final = 2
_NO_CANDIDATE: Final = -1
"""Step of a row that only has `last_step`, the latest step of a process. Kept if the process has no candidate row."""
_LABELS: Final = ("op", "role", "phase", "site")


def shown(process: int) -> bool:
    """Return whether the calls of the process with this index in the log are kept."""
    return 0 <= process < FIRST_PROCESSES or (process > 0 and process & (process - 1) == 0)


def _partial(block: RecordBlock) -> pd.DataFrame:
    steps, processes = steps_of(block), block["process"]
    is_candidate = (steps >= 0) & (steps & (steps - 1) == 0) & (block["t_begin"] > 0)
    calls, latest = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for process in filter(shown, np.unique(processes).tolist()):
        own = np.flatnonzero(processes == process)
        calls.append(own[is_candidate[own]])
        latest.append(own[[steps[own].argmax()]])
    used = np.concatenate([*calls, *latest])
    table = pd.DataFrame(
        {
            "process": processes[used],
            "rank": block["rank"][used],
            "step": np.concatenate([*(steps[own] for own in calls), np.full(len(latest) - 1, _NO_CANDIDATE)]),
            "last_step": steps[used],
            "t_begin": block["t_begin"][used],
            **{name: block.labels.codes(name, block.labels.ids(name, block)[used]) for name in _LABELS},
            "payload_bytes": block["payload"][used],
            "in_call_ns": durations("in_call", block)[used],
            "to_completion_ns": durations("to_completion", block)[used],
        }
    )
    return _kept(table)


def _kept(table: pd.DataFrame) -> pd.DataFrame:
    """Keep the first calls of each process's last candidate steps. One more than MAX_CALLS sets `more_calls`."""
    by_process = table.groupby("process")
    table = table.assign(last_step=by_process["last_step"].transform("max"))
    is_call = table["step"] > _NO_CANDIDATE
    is_recent = by_process["step"].rank(method="dense", ascending=False) <= _CANDIDATE_STEPS
    has_no_candidate = (by_process["step"].transform("max") == _NO_CANDIDATE) & ~table["process"].duplicated()
    kept = table.loc[(is_call & is_recent) | has_no_candidate]
    ordered = kept.sort_values(["process", "step", "t_begin"], kind="stable", ignore_index=True)
    return ordered.loc[ordered.groupby(["process", "step"]).cumcount() <= MAX_CALLS].reset_index(drop=True)


def _merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return _kept(concat_tables(tables))


def _finish(table: pd.DataFrame, run: AnalysedRun) -> NamedTables:
    table = table.loc[table["step"] > _NO_CANDIDATE]
    calls = _on_one_clock(table.loc[table["step"] == _step(table)], run)
    by_process = calls.groupby("process")["process"]
    calls = calls.assign(more_calls=by_process.transform("size") > MAX_CALLS).loc[by_process.cumcount() < MAX_CALLS]
    result = calls.assign(begin_ns=calls["begin"] - calls["begin"].min()).sort_values(
        ["rank", "begin_ns"], kind="stable"
    )
    for measure in ("in_call_ns", "to_completion_ns"):
        result[measure] = result[measure].astype("Int64").mask(result[measure] < 0)
    columns = ["rank", "step", *_LABELS, "payload_bytes", "begin_ns", "in_call_ns", "to_completion_ns", "more_calls"]
    return {"timeline": result[columns].reset_index(drop=True)}


def _step(table: pd.DataFrame) -> int:
    """Return the last step that is complete on every process shown, else that all have, else that any has."""
    if not len(table):
        return -1
    processes = table["process"].nunique()
    by_step = table.groupby("step").agg(processes=("process", "nunique"), last=("last_step", "min"))
    complete = by_step["processes"] == processes
    choices = (complete & (by_step["last"] > by_step.index), complete, complete | True)
    return int(by_step.index[next(choice for choice in choices if choice.any())].max())


def _on_one_clock(calls: pd.DataFrame, run: AnalysedRun) -> pd.DataFrame:
    """Return the calls whose times are known on one clock, with `begin` on that clock."""
    if run.simulated:
        return calls.head(0).assign(begin=0)
    begin, known = to_one_clock(run, run.clocks, calls["process"].to_numpy(), calls["t_begin"].to_numpy())
    return calls.assign(begin=begin).loc[known]


ANALYSIS: Final = Analysis("timeline", _partial, _merge, _finish)
