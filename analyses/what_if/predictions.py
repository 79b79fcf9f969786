"""Predicted step times of a changed run, and the bandwidth that hides communication.

The prediction of a change is the median over the replayed steps. Its 90 % interval has independent parts, added as
squares: the error of the median, from the variation between steps (1.2533 standard errors of the mean, with the median
absolute deviation as spread); the difference between the medians of the first and the second half of the steps, which
is what a median predicts of later steps; the error of changed transfers, where a network predicts them, or the bounds
of the times of messages, where they follow from the run (`buckets`; on each side, its own); and, if there
are other runs of the same program, the variation between runs: the prediction interval of one more run, from Student's
distribution.

What limits a step are the parts of its critical path after the change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array, rows_of
from commtrace.analyses.robust_deviation import robust_deviation
from commtrace.analyses.sections import Section
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import (
    TableSpec,
    bytes_column,
    column,
    count,
    duration,
    share,
    text_column,
    word_column,
)
from commtrace.formatting import format_count, format_duration, is_known

from . import layouts
from .bandwidth_bounds import BANDWIDTH_BOUNDS, EXPOSED_BY_BANDWIDTH, EXPOSED_TARGETS, format_bandwidth
from .changed_run import REMARKS, ChangedRun, DoesNotApplyError, ReplayedRun, wire_bytes_of_calls, worst_straggler
from .changes import changed_run, changes_of_catalogue
from .critical_parts import critical_parts, largest_parts
from .recorded_graph import Part, Replay
from .timelines import STEP_TIMELINES

AS_RECORDED: Final = "as recorded"
_MAX_EVENTS_AT_ONCE: Final = 1 << 24
"""Events that are computed at a time: they limit memory."""
_SPEEDS: Final = np.logspace(-10, 14, 97, base=2)
"""Speeds of transfers at which the exposed share is computed, as multiples of the recorded one."""
_NORMAL_90: Final = 1.6449
_MEDIAN_ERROR: Final = 1.2533
_LEAST_STEPS: Final = 3
"""Number of steps up to which all of them count."""
_LEAST_FOR_INTERVAL: Final = 4
"""Number of steps without which their variation is not known."""
_STUDENT_95: Final = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""95 % quantiles of Student's distribution by degrees of freedom from 1; for more, the last one is an upper bound."""

WHAT_IF: Final = TableSpec("what_if", "Steps with changes", "A row per change, the first one is the recorded run.", (
    text_column("change", "change", "What is changed, as it is written; several compose.", shortenable=True),
    duration("step_ns", "step", "Predicted duration of a step: median over the replayed steps."),
    duration("low_ns", "from",
        "Lower end of its 90 % interval; missing for fewer than 4 steps, or if the error of a network is not known."),
    duration("high_ns", "to", "Upper end likewise."),
    share("gain", "gain", "Part of the recorded step that it saves; negative: the step becomes longer."),
    text_column("limits", "then limited by",
        "Largest parts of the critical path of a step of median duration after the change.", shortenable=True),
))  # fmt: skip
REQUIRED_BANDWIDTH: Final = TableSpec("required_bandwidth", "Bandwidth that hides communication",
    "A row per dimension, and one for all of them.", (
    word_column("dimension", "dimension", 'Parallel dimension; "all": of all dimensions at once.'),
    bytes_column("wire_bytes", "wire (min)/step", "Wire bytes of a rank in a step; missing unless known."),
    column("GB/s", format_bandwidth, "bandwidth_gb_per_s", "GB/s now",
        "wire_bytes of the steps by the time of transfers."),
    share("exposed", "exposed now", "Part of the step that would be saved if these transfers took no time."),
    *(
        column("ratio", lambda value: f"{value:.3g}x" if is_known(value) else "-", f"speed_{round(100 * target)}",
            f"for {target:.0%}", f"How much faster these transfers must be for {target:.0%} exposed; from 1/1,024 "
            "to 16,384 times are examined; missing if none suffices.")
        for target in EXPOSED_TARGETS
    ),
))  # fmt: skip
EXPOSED_BY_SPEED: Final = TableSpec("exposed_by_speed", "Exposed share by speed",
    "Rows for each dimension, and for all of them.", (
    word_column("dimension", "dimension", 'Parallel dimension; "all": of all dimensions at once.'),
    column("ratio", lambda value: f"{value:.3g}x", "speed", "speed", "Speed of these transfers, times that of now."),
    share("exposed", "exposed", "Part of the step that would then be saved if they took no time."),
    word_column("is_recorded", "recorded", "Whether this is the speed of now."),
))  # fmt: skip
WHAT_IF_RUN: Final = TableSpec("what_if_run", "What was replayed", "One row.", (
    count("steps", "steps", "Replayed steps."),
    count("ranks", "ranks", "Ranks."),
    count("calls", "calls", "Their calls."),
    count("equal_runs", "equal runs", "Other runs of the same program, which the intervals take into account."),
    shared.ranks_column("worst_rank", "worst straggler",
        "Rank without whose additional computation the step becomes shortest; missing without several ranks."),
    duration("error_ns", "replay error", "Largest difference between a replayed and the recorded time of an event."),
))  # fmt: skip
TABLES: Final = (
    WHAT_IF, REQUIRED_BANDWIDTH, WHAT_IF_RUN, BANDWIDTH_BOUNDS, *layouts.TABLES, STEP_TIMELINES, EXPOSED_BY_SPEED,
    EXPOSED_BY_BANDWIDTH,
)  # fmt: skip
SECTIONS: Final = (
    Section("what-if", "Steps with changes", (WHAT_IF,)),
    Section("step-timelines", STEP_TIMELINES.title, (STEP_TIMELINES,), blocks=lambda _: iter(())),
    Section("required-bandwidth", REQUIRED_BANDWIDTH.title, (REQUIRED_BANDWIDTH,)),
    Section("exposed-by-speed", EXPOSED_BY_SPEED.title, (EXPOSED_BY_SPEED,), blocks=lambda _: iter(())),
    Section("bandwidth-bounds", BANDWIDTH_BOUNDS.title, (BANDWIDTH_BOUNDS,)),
    Section("exposed-by-bandwidth", EXPOSED_BY_BANDWIDTH.title, (EXPOSED_BY_BANDWIDTH,), blocks=lambda _: iter(())),
    Section("layouts", layouts.LAYOUTS.title, (layouts.LAYOUTS,)),
    Section("layout-transfers", layouts.LAYOUT_TRANSFERS.title, (layouts.LAYOUT_TRANSFERS,)),
)
"""The sections of text and page, in their order."""


def what_if(changed: ChangedRun, *, catalogue: bool = False, variation: float = 0.0) -> pd.DataFrame:
    """Return the table `what_if`; `attrs["remarks"]` has sentences on what it assumes without proof.

    Args:
        changed: The run after the changes that are made together.
        catalogue: Whether to add a row for each change of the catalogue, on top of them; the largest gain first.
        variation: Half of the interval that is due to the variation between runs, relative (`variation_of_runs`).
    """
    predicted = partial(_row, variation)
    rows = [predicted(AS_RECORDED, changed_run(changed.recorded))]
    if changed.texts:
        rows.append(predicted(" ".join(changed.texts), changed))
    remarks = [*changed.remarks]
    if catalogue:
        prefix = "... " * bool(changed.texts)
        more = []
        for change in changes_of_catalogue(changed.recorded):
            try:
                run = changed.with_change(change)
            except DoesNotApplyError:
                continue
            more.append(predicted(prefix + change.text, run))
            remarks += run.remarks
        rows += sorted(more, key=lambda row: row.step_ns)
    table = pd.DataFrame([asdict(row) for row in rows])
    table = table.assign(gain=1 - table["step_ns"] / rows[0].step_ns)[WHAT_IF.column_names]
    table.attrs[REMARKS] = [*dict.fromkeys(remarks)]
    return table


@dataclass(frozen=True)
class _Prediction:
    """A row of the table `what_if`, without its gain."""

    change: str
    step_ns: float
    low_ns: float | None
    high_ns: float | None
    limits: str


def variation_of_runs(runs: Sequence[ReplayedRun]) -> float:
    """Return half of the 90 % interval of the step of one more run, relative, from equal runs; 0.0 for only one."""
    if len(runs) < 2:
        return 0.0
    steps = np.array([median_step_ns(run.replay, run.replay.delays) for run in runs])
    student = _STUDENT_95[min(len(runs) - 1, len(_STUDENT_95)) - 1]
    return float(student * np.sqrt(1 + 1 / len(runs)) * np.std(steps, ddof=1) / np.mean(steps))


def _row(variation: float, text: str, changed: ChangedRun) -> _Prediction:
    """Return a row without its gain."""
    replay = changed.replayed.replay
    times = replay.graph.times(changed.delays)
    steps = replay.durations(times)[..., _first(replay) :]
    step_ns = float(np.median(steps[0]))
    medians = np.median(steps, axis=-1)
    around = float(np.hypot(_spread(steps[0]), variation * step_ns))
    has_interval = changed.is_error_known and len(steps[0]) >= _LEAST_FOR_INTERVAL
    below, above = step_ns - float(medians.min()), float(medians.max()) - step_ns
    if not changed.is_one_sided:
        below = above = max(below, above)
    low = max(0.0, step_ns - float(np.hypot(around, below))) if has_interval else None
    high = step_ns + float(np.hypot(around, above)) if has_interval else None
    return _Prediction(text, step_ns, low, high, _limits(changed.replayed, changed.delays[0], times[0]))


def _spread(steps: Array) -> float:
    """Return half the width of the interval of the median of later steps, ns, from the steps, shape (steps,)."""
    half = len(steps) // 2
    if not half:
        return 0.0
    error = _NORMAL_90 * _MEDIAN_ERROR * robust_deviation(steps) / np.sqrt(len(steps))
    return float(np.hypot(error, np.median(steps[:half]) - np.median(steps[-half:])))


def _first(replay: Replay) -> int:
    """Return the first step that counts. The first replayed one begins as it was recorded, whatever is changed."""
    return int(len(replay.paths.steps) > _LEAST_STEPS)


def _limits(replayed: ReplayedRun, delays: Array, times: Array) -> str:
    """Return the largest parts of the critical path of a step of median duration."""
    replay, calls = replayed.replay, replayed.replay.paths.calls
    steps = replay.durations(times)
    counted = np.arange(_first(replay), len(steps))
    has_dimensions = len(np.unique(calls["role"][replay.call[replayed.selected("")]])) > 1
    columns = ("role", "op") if has_dimensions else ("op",)
    step = int(counted[np.argsort(steps[counted], kind="stable")[(len(counted) - 1) // 2]])
    ends = times[replay.ends].max(axis=0)
    begin = ends[step - 1] if step else replay.begin_ns
    last = int(replay.ends[int(times[replay.ends[:, step]].argmax()), step])
    sums: defaultdict[str, float] = defaultdict(float)
    for edge, ns in critical_parts(replay.graph, delays, times, last, begin):
        part, call = Part(int(replay.part[edge])), int(replay.call[edge])
        name = {Part.COMPUTATION: "computation", Part.CALL: "inside calls"}.get(part, "")
        if part == Part.TRANSFER:
            name = " ".join(str(calls.text(column, np.array(call))) for column in columns)
        sums[name] += ns
    return largest_parts(sums, float(steps[step]))


def required_bandwidth(changed: ChangedRun) -> pd.DataFrame:
    """Return the table `required_bandwidth` of a run after some changes."""
    replayed, delays = changed.replayed, changed.delays[0]
    rows = [_required(replayed, delays, role, replayed.selected(role)) for role in _roles(replayed)]
    rows.sort(key=lambda row: -float(row["exposed"] or 0))
    if len(rows) > 1:
        rows.insert(0, _required(replayed, delays, "all", replayed.selected("")))
    return pd.DataFrame(rows, columns=REQUIRED_BANDWIDTH.column_names)


def _roles(replayed: ReplayedRun) -> list[str]:
    """Return the parallel dimensions of the transfers."""
    replay, calls = replayed.replay, replayed.replay.paths.calls
    return [*map(str, calls.categories["role"][np.unique(calls["role"][replay.call[replayed.selected("")]])])]


def exposed_shares(changed: ChangedRun) -> pd.DataFrame:
    """Return the table `exposed_by_speed` of a run after some changes."""
    replayed, delays = changed.replayed, changed.delays[0]
    roles = _roles(replayed)
    selected = {**({"all": ""} if len(roles) > 1 else {}), **{role: role for role in roles}}
    rows = []
    for dimension, what in selected.items():
        step_ns = exposed_by_speed(replayed, delays, replayed.selected(what) & (delays > 0))
        shares = 1 - step_ns[-1] / np.append(step_ns[:-1], median_step_ns(replayed.replay, delays))
        is_now = [False] * len(_SPEEDS) + [True]
        speeds = np.append(_SPEEDS, 1.0)
        rows.append(pd.DataFrame({"dimension": dimension, "speed": speeds, "exposed": shares, "is_recorded": is_now}))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame([], columns=EXPOSED_BY_SPEED.column_names)


def _required(replayed: ReplayedRun, delays: Array, dimension: str, edges: Array) -> dict[str, float | str | None]:
    replay = replayed.replay
    edges = edges & (delays > 0)
    step_ns = exposed_by_speed(replayed, delays, edges)
    shares = 1 - step_ns[-1] / step_ns[:-1]
    now = float(1 - step_ns[-1] / median_step_ns(replay, delays))
    wire, gb_per_s = _wire_and_bandwidth(replayed, delays, edges)
    row: dict[str, float | str | None] = {
        "dimension": dimension, "wire_bytes": wire, "bandwidth_gb_per_s": gb_per_s, "exposed": now,
    }  # fmt: skip
    for target in EXPOSED_TARGETS:
        enough = np.flatnonzero(shares <= target)
        speed = float(_SPEEDS[0]) if len(enough) else None
        if len(enough) and enough[0]:
            # The share falls with the speed: interpolate between the last one above and the first one below.
            x, y = np.log(_SPEEDS[enough[0] - 1 : enough[0] + 1]), shares[enough[0] - 1 : enough[0] + 1]
            speed = float(np.exp(np.interp(target, y[::-1], x[::-1])))
        row[f"speed_{round(100 * target)}"] = speed
    return row


def median_step_ns(replay: Replay, delays: Array) -> Array:
    """Return the median duration of the steps that count, ns, shape (...), for delays of shape (..., edges)."""
    return np.asarray(np.median(replay.step_ns(delays)[..., _first(replay) :], axis=-1))


def exposed_by_speed(replayed: ReplayedRun, delays: Array, edges: Array) -> Array:
    """Return the median step at each of `_SPEEDS` of the transfers `edges`, ns, and last if they took no time."""
    replay = replayed.replay
    factors = np.append(1 / _SPEEDS, 0.0)
    at_once = max(1, _MAX_EVENTS_AT_ONCE // len(replay.graph.start))
    medians = []
    for first in range(0, len(factors), at_once):
        scaled = np.where(edges, delays * factors[first : first + at_once, None], delays)
        medians.append(median_step_ns(replay, scaled))
    return np.concatenate(medians)


def _wire_and_bandwidth(replayed: ReplayedRun, delays: Array, edges: Array) -> tuple[float | None, float | None]:
    """Return the wire bytes of a rank in a step, and GB/s while it transfers; None: not known."""
    replay, calls = replayed.replay, replayed.replay.paths.calls
    transfers, _ = replay.transfers(np.flatnonzero(edges))
    call, payload = replay.call[transfers], replay.payload(transfers)
    total = float(wire_bytes_of_calls(replayed.run, calls, call, payload, replayed.new_world_size).sum())
    seconds = float(delays[transfers].sum()) / 1e9
    per_step = total / len(replay.paths.processes) / len(replay.paths.steps)
    if not np.isfinite(total):
        return None, None
    return per_step, total / seconds / 1e9 if seconds > 0 else None


def run_facts(replayed: ReplayedRun, equal_runs: int = 0) -> pd.DataFrame:
    """Return the table `what_if_run`."""
    replay = replayed.replay
    ranks = replayed.ranks()
    worst = str(ranks[worst_straggler(changed_run(replayed))]) if len(ranks) > 1 else None
    calls = len(np.unique(replay.call[replay.part == Part.TRANSFER]))
    facts = len(replay.paths.steps), len(ranks), calls, equal_runs, worst, replay.error_ns
    return pd.DataFrame([facts], columns=WHAT_IF_RUN.column_names)


def sentences(tables: dict[str, pd.DataFrame]) -> Iterator[str]:
    """Yield what was replayed, and what the predictions assume."""
    row = next(rows_of(tables[WHAT_IF_RUN.name]))
    yield (
        f"{format_count(row.steps)} steps of {format_count(row.ranks)} ranks were replayed. Computation, and the order "
        "of calls, stay as recorded; processors that ranks and transfers share are not modelled."
    )
    if row.error_ns:
        yield f"The replay gives back the recorded times within {format_duration(row.error_ns)}."
    if row.equal_runs:
        yield f"The intervals are for one more run, from {format_count(1 + int(row.equal_runs))} equal runs."
    else:
        yield "The intervals are for other steps of this run; runs may differ more (--equal DIR)."
    yield from tables[WHAT_IF.name].attrs.get(REMARKS, ())
    unknown = tables[WHAT_IF.name]["low_ns"].isna()
    if unknown.all():
        yield "There are no intervals: with so few steps, their variation is not known."
    elif unknown.any():
        yield "A described network is ideal: its error is not known, and real steps take longer."
