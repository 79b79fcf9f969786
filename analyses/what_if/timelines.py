"""One step before and after changes, as what each rank computes and transfers when: the table `step_timelines`.

The step is the recorded one of median duration. Both timelines begin when it begins on the last rank.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, count, duration, word_column

from .changed_run import ChangedRun, ReplayedRun
from .recorded_graph import Part, Replay

BEFORE, AFTER = "as recorded", "changed"
COMPUTATION: Final = "computation"
SHOWN_RANKS: Final = 8
"""Ranks that are shown: the first ones."""

STEP_TIMELINES: Final = TableSpec("step_timelines", "A step before and after",
    f"A row per computation and transfer of the first {SHOWN_RANKS} ranks; waits are the time between.", (
    word_column("state", "state", f'"{BEFORE}" or "{AFTER}".'),
    count("step", "step", "Number of the step."),
    count("rank", "rank", "Rank."),
    word_column("part", "part", f'"{COMPUTATION}", or the operation that is transferred.'),
    shared.ROLE,
    duration("begin_ns", "begin", "When it begins, since the begin of the step."),
    duration("ns", "time", "How long it takes."),
    duration("step_ns", "step", "Duration of the step."),
))  # fmt: skip


def step_timelines(changed: ChangedRun) -> pd.DataFrame:
    """Return the table `step_timelines` of a run before and after changes."""
    replay = changed.recorded.replay
    durations = replay.step_ns(replay.delays)
    first = int(len(durations) > 1)  # the first one begins as it was recorded, whatever is changed
    step = first + int(np.argsort(durations[first:], kind="stable")[(len(durations) - first - 1) // 2])
    states = {BEFORE: (changed.recorded, replay.delays), AFTER: (changed.replayed, changed.delays[0])}
    rows = [_rows(run, delays, step).assign(state=state) for state, (run, delays) in states.items()]
    return pd.concat(rows, ignore_index=True)[STEP_TIMELINES.column_names]


def _rows(run: ReplayedRun, delays: Array, step: int) -> pd.DataFrame:
    replay, calls = run.replay, run.replay.paths.calls
    times = replay.graph.times(delays)
    ends = times[replay.ends].max(axis=0)
    begin, end = (ends[step - 1] if step else replay.begin_ns), ends[step]
    edges, from_ns, to_ns = _intervals(replay, times, delays)
    process = replay.process[edges]
    kept = (to_ns > begin) & (from_ns < end) & (process < SHOWN_RANKS)
    edges, from_ns, to_ns = edges[kept], np.maximum(from_ns[kept], begin), np.minimum(to_ns[kept], end)
    is_computation, call = replay.part[edges] == Part.COMPUTATION, replay.call[edges]
    return pd.DataFrame({
        "step": int(replay.paths.steps[step]),
        "rank": np.array(run.ranks())[replay.process[edges]],
        "part": np.where(is_computation, COMPUTATION, calls.text("op", call).astype(str)),
        "role": np.where(is_computation, "", calls.text("role", call).astype(str)),
        "begin_ns": from_ns - begin,
        "ns": to_ns - from_ns,
        "step_ns": end - begin,
    })  # fmt: skip


def _intervals(replay: Replay, times: Array, delays: Array) -> tuple[Array, Array, Array]:
    """Return an edge of each computation and transfer, and its begin and end, ns.

    What the edges to one event are is one interval: it begins with the last event that they come from.
    """
    edges, begins, ends = [], [], []
    for part in (Part.COMPUTATION, Part.TRANSFER):
        own = np.flatnonzero((replay.part == part) & (delays > 0))
        target, first, number = np.unique(replay.graph.target[own], return_index=True, return_inverse=True)
        source = np.full(len(target), -np.inf)
        if part == Part.COMPUTATION:
            np.maximum.at(source, number, times[replay.graph.source[own]])
            begin, end = source, source + delays[own][first]
        else:  # an operation ends when its target occurs; of the delays to it, those of arrival are the transfer
            length = np.full(len(target), np.inf)
            np.minimum.at(length, number, delays[own])
            begin, end = times[target] - length, times[target]
        edges.append(own[first])
        begins.append(begin)
        ends.append(end)
    return np.concatenate(edges), np.concatenate(begins), np.concatenate(ends)
