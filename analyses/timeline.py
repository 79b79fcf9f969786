"""The calls of one training step, rank by rank, in the order of time.

`timeline`, a row per call, by rank and time:

    rank, step, op, role, phase, site, payload_bytes
    begin_ns             since the first of these calls began
    in_call_ns           how long the program was inside the call (missing: not known)
    to_completion_ns     until its end, where anybody saw it (missing: nobody did)
    more_calls           whether the rank made more calls in this step than the MOST that are kept, the first ones

The step is 0 or a power of two, the last one that is over on every rank shown: late enough to be past the warming-up,
and known before the log has been read to its end. Ranks shown are the first FIRST that left a log, and
beyond them those at powers of two. Times of ranks on different hosts compare as well as the hosts' clocks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .call_times import durations
from .engine import Analysis, Block, NamedTables

FIRST: Final = 16
MOST: Final = 4096

_CANDIDATES: Final = 2
_WORDS: Final = ("op", "role", "phase", "site")


def shown(process: int) -> bool:
    """Whether the process at this position of the log is one whose calls are kept."""
    return 0 <= process < FIRST or (process > 0 and process & (process - 1) == 0)


def _partial(block: Block) -> pd.DataFrame:
    steps = block["step"].astype(np.int64)
    candidate = (steps >= 0) & (steps & (steps - 1) == 0) & (block["t_begin"] > 0) & shown(block.labels.number)
    use = np.flatnonzero(candidate)
    use = use[np.isin(steps[use], np.unique(steps[use])[-_CANDIDATES:])]
    columns = {name: block.labels.text(name, block.labels.ids(name, block)[use]) for name in _WORDS}
    table = pd.DataFrame(
        {
            "process": np.full(len(use), block.labels.number, np.int64),
            "rank": np.full(len(use), block.labels.rank, np.int64),
            "step": steps[use],
            "last_step": np.full(len(use), steps.max() if len(steps) else -1, np.int64),
            "t_begin": block["t_begin"][use],
            **columns,
            "payload_bytes": block["payload"][use],
            "in_call_ns": durations("in_call", block)[use],
            "to_completion_ns": durations("to_completion", block)[use],
        }
    )
    return _kept(table)


def _kept(table: pd.DataFrame) -> pd.DataFrame:
    """The first calls of the last candidates of each process; one call more than MOST, to know that there are more."""
    steps = table.groupby("process")["step"].rank(method="dense", ascending=False)
    last = table.groupby("process")["last_step"].transform("max")
    kept = table.assign(last_step=last).loc[steps <= _CANDIDATES]
    ordered = kept.sort_values(["process", "step", "t_begin"], kind="stable", ignore_index=True)
    return ordered.loc[ordered.groupby(["process", "step"]).cumcount() <= MOST].reset_index(drop=True)


def _merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return _kept(pd.concat([table for table in tables if len(table)] or [tables[0]], ignore_index=True))


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    offsets = _offsets(run)
    part = table.loc[(table["step"] == _step(table)) & table["process"].isin([*offsets])]
    by_process = part.groupby("process")["process"]
    part = part.assign(
        more_calls=by_process.transform("size") > MOST,
        begin=part["t_begin"] + part["process"].map(offsets).astype(np.int64),
    ).loc[by_process.cumcount() < MOST]
    result = part.assign(begin_ns=part["begin"] - part["begin"].min()).sort_values(["rank", "begin_ns"], kind="stable")
    for measure in ("in_call_ns", "to_completion_ns"):
        result[measure] = result[measure].astype("Int64").mask(result[measure] < 0)
    columns = ["rank", "step", *_WORDS, "payload_bytes", "begin_ns", "in_call_ns", "to_completion_ns", "more_calls"]
    return {"timeline": result[columns].reset_index(drop=True)}


def _step(table: pd.DataFrame) -> int:
    """The last step that every process shown has and is past; else that all have; else that any has."""
    if not len(table):
        return -1
    processes = table["process"].nunique()
    by_step = table.groupby("step").agg(processes=("process", "nunique"), last=("last_step", "min"))
    everyone = by_step["processes"] == processes
    for choice in (everyone & (by_step["last"] > by_step.index), everyone, everyone | True):
        if choice.any():
            return int(by_step.index[choice].max())
    raise AssertionError("unreachable")


def _offsets(run: RecordedRun) -> dict[int, int]:
    """What makes wall-clock ns of a process's monotonic ones, where it is told: the same for one boot of a host."""
    hosts = [(process.host, str(process.tables.process.get("boot_id"))) for process in run.processes]
    told = {
        host: labels.unix_minus_mono_ns
        for host, labels in zip(reversed(hosts), reversed(run.labels), strict=True)
        if labels.unix_minus_mono_ns is not None
    }
    return {number: told[host] for number, host in enumerate(hosts) if host in told}


ANALYSIS: Final = Analysis("timeline", _partial, _merge, _finish)
