"""Critical paths: what the end of each training step depends on, across ranks.

A rank's time is computation, except where one of its calls blocks it: inside the call, or in a wait
for its end. Waits in C++ are not recorded (DDP's waits for gradients): an operation without an
observed wait that ends after the last call of its phase counts as waited for from that call on. A
call that depends on others (`dependencies`) cannot end before the last of them has begun: its
*release*. From the end of a step backwards, the path therefore goes through a rank's computation to
the call that blocked it before, through that operation to its release, to the rank that came last,
through that rank's computation, and so on to the end of the previous step. The pieces cover the
step without gap or overlap: their sum is its duration.

A step of a rank begins where the last call of its previous step ended; the job's step begins with the last rank.
Computation before the first call of a step counts towards that step. Times are ns on the clock of the reference host
(`clocks`). Ends observed on a device do not block the host: runs with such ends have no paths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.analyses.scaling.step_times import covered_ns
from commtrace.analyses.table_specs import TABLES
from commtrace.durations import has_own_times, wait_begin
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.segment_reader import last_records
from commtrace.schema import DEVICE_CLOCKS, Clock, Phase

from .clocks import USEFUL_NS, clocks_of
from .dependencies import SOURCE, TARGET, agree, dependencies, operations
from .matching import NOT_MATCHED, MatchedCalls, match_calls

MAX_STEPS: Final = 500
"""Number of steps that are examined: the last ones of the run."""
MAX_CALLS: Final = 1 << 20
"""Number of calls that are examined, the last ones of the run: it limits memory and time."""
_MIN_CALLS_OF_PROCESS: Final = 512

COMPUTATION, COMMUNICATION = "computation", "communication"
WAITING, EXPOSED, HIDDEN = "waiting", "exposed communication", "hidden communication"

_COLUMNS: Final = (
    "t_begin", "t_return", "t_wait", "t_end", "step", "clock", "flags", "op", "role", "site", "phase",
)  # fmt: skip


class PathPiece(NamedTuple):
    """A piece of a path: time of one rank in a gap between calls, or in a call; the other is -1."""

    process: int
    begin: int
    end: int
    gap: int
    call: int


_Piece: TypeAlias = tuple[int, int, int, int, int]
"""A piece as a plain tuple, which is faster: the paths of a report have hundreds of thousands."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Intervals in which a process was blocked, by begin. Those of several threads may overlap."""

    begin: Array
    end: Array
    call: Array
    """Call that blocked it, as an index into the matched calls."""
    release: Array
    """When the last call that it depends on began; -1 if there is none, or one is not known."""
    last_process: Array
    """Process that made that call."""

    @cached_property
    def latest(self) -> Array:
        """Index of the interval with the latest end, among each interval and those before it."""
        reach = np.maximum.accumulate(self.end)
        return np.maximum.accumulate(np.where(self.end == reach, np.arange(len(reach)), 0))

    @cached_property
    def gaps(self) -> Array:
        """Indices of the intervals before which no call blocked the process, except the first."""
        return np.flatnonzero(self.begin[1:] > self.end[self.latest[:-1]]) + 1

    @cached_property
    def numbers(self) -> _Numbers:
        """All columns, for reading one number at a time."""
        gap = np.searchsorted(self.gaps, np.arange(1, len(self.begin) + 1))
        columns = self.begin, self.end, self.call, self.release, self.last_process, self.latest, gap
        return _Numbers(*(np.ascontiguousarray(column, np.int64).data for column in columns))


class _Numbers(NamedTuple):
    """The columns of a timeline: single numbers are read four times as fast as from arrays."""

    begin: memoryview[int]
    end: memoryview[int]
    call: memoryview[int]
    release: memoryview[int]
    last_process: memoryview[int]
    latest: memoryview[int]
    gap: memoryview[int]
    """Position in `gaps` of the first gap after each interval."""


@dataclass(frozen=True, eq=False)
class Gaps:
    """Computation of all processes: times in which no call blocked them, by process and time.

    Attributes:
        process: Position of the process in the log, shape (gaps,).
        begin: Begin of each gap, ns.
        end: Its end, ns.
        before: The call that blocked the process before the gap.
        after: The call that blocked it after the gap.
    """

    process: Array
    begin: Array
    end: Array
    before: Array
    after: Array


@dataclass(eq=False)
class StepPaths:
    """Timelines of all processes over the steps that are complete on every rank.

    Attributes:
        calls: The calls of the steps, matched.
        times: `t_begin`, `t_return`, `t_wait` and `t_end` of the calls on the reference's clock, shape (calls,).
        processes: Indices in the log of the processes that have a timeline, shape (processes,).
        steps: The steps whose paths are known, ascending, shape (steps,).
        ends: When each process ended the step before `steps` and each step, ns, shape (processes,
            steps + 1).
    """

    calls: MatchedCalls
    times: Mapping[str, Array]
    processes: Array
    steps: Array
    ends: Array
    timelines: dict[int, Timeline] = field(repr=False)
    gaps: Gaps = field(repr=False)

    @cached_property
    def _first_gap(self) -> dict[int, int]:
        """Index of the first gap of each process in `gaps`."""
        first = np.searchsorted(self.gaps.process, self.processes)
        return dict(zip(self.processes.tolist(), first.tolist(), strict=True))

    def step_ns(self) -> Array:
        """Return the duration of each step of the job, shape (steps,)."""
        return np.diff(self.ends.max(axis=0))

    @cached_property
    def on_path(self) -> Array:
        """Part of each gap that lies on the critical path of a step, ns, shape (gaps,)."""
        result = [0] * len(self.gaps.begin)
        for step in range(len(self.steps)):
            for _, begin, end, gap, _ in self._pieces(step):
                if gap >= 0:
                    result[gap] += end - begin
        return np.array(result, float)

    def path(self, step: int) -> list[PathPiece]:
        """Return the critical path of `steps[step]`, from its end to its begin."""
        return [*map(PathPiece._make, self._pieces(step))]

    def walk(self, process: int, moment: int, until: int) -> Iterator[PathPiece]:
        """Yield what a process did before a moment, and what that depended on, back to `until`."""
        return map(PathPiece._make, self._walk(process, moment, until))

    def _pieces(self, step: int) -> Iterator[_Piece]:
        last = int(self.ends[:, step + 1].argmax())
        until, end = (int(moments.max()) for moments in (self.ends[:, step], self.ends[:, step + 1]))
        return self._walk(int(self.processes[last]), end, until)

    def _walk(self, process: int, moment: int, until: int) -> Iterator[_Piece]:
        while moment > until:
            line = self.timelines[process].numbers
            earlier = bisect_left(line.begin, moment) - 1
            at = line.latest[earlier] if earlier >= 0 else -1
            ended = line.end[at] if at >= 0 else until
            if ended < moment:
                begin = max(ended, until)
                # Nothing is known about a process after its last call or before its first one.
                gap = self._first_gap[process] + line.gap[earlier] if 0 <= earlier < len(line.begin) - 1 else -1
                yield process, begin, moment, gap, -1
                moment = begin
                # The call before the gap comes next, unless it took no time.
                if moment <= until or line.begin[at] == moment:
                    continue
            release, owner = line.release[at], line.last_process[at]
            # Without a release, or if clock errors put it after the end, only the call is known.
            if not 0 <= release < moment:
                release, owner = line.begin[at], process
            begin = max(release, until)
            yield process, begin, moment, -1, line.call[at]
            process, moment = owner, begin


_PATHS: Final[WeakKeyDictionary[RecordedRun, StepPaths | None]] = WeakKeyDictionary()


def step_paths(run: RecordedRun) -> StepPaths | None:
    """Return the timelines of the last steps of a run, computed once; None if there are none.

    There are none for dry runs, and for runs without three training steps among the calls that are
    examined, with a rank that left no log, with ends on a device's clock, with a host whose clock
    the calls do not bound, or with a step of no duration, whose times are damaged.
    """
    if run not in _PATHS:
        _PATHS[run] = _read(run)
    return _PATHS[run]


def _read(run: RecordedRun) -> StepPaths | None:
    ranks = {process.rank for process in run.processes}
    if run.simulated or not ranks or len(ranks) != (run.world_size or len(ranks)):
        return None
    if clocks_of(run).half_width_ns > USEFUL_NS:
        return None
    wanted = _complete_steps(run)
    if len(wanted) < 3:
        return None
    derived = {"depends": dependencies, "operation": operations}
    calls = match_calls(run, _COLUMNS, wanted, derived=derived, last=_calls_per_process(run))
    evaluates = calls.text("phase") == Phase.EVALUATION.name.lower()
    if np.isin(calls["clock"], DEVICE_CLOCKS).any():
        return None
    times = _aligned_times(run, calls)
    if times is None:
        return None
    release, owner = _releases(calls, times["t_begin"])
    timelines = _timelines(calls, times, release, owner)
    excluded = np.unique(calls["step"][evaluates])
    processes = np.array(sorted(timelines), np.int64)
    ends = np.zeros((len(processes), len(wanted)), np.int64)
    for row, process in enumerate(processes.tolist()):
        line = timelines[process]
        np.maximum.at(ends[row], np.searchsorted(wanted, calls["step"][line.call]), line.end)
        ends[row] = np.maximum.accumulate(ends[row])
    pairs = np.flatnonzero((np.diff(wanted) == 1) & ~np.isin(wanted[1:], excluded) & ~np.isin(wanted[:-1], excluded))
    pairs = pairs[-_run_length(pairs) :]
    if not len(pairs):
        return None
    kept = slice(int(pairs[0]), int(pairs[-1]) + 2)
    paths = StepPaths(calls, times, processes, wanted[kept][1:], ends[:, kept], timelines, _gaps(timelines))
    return paths if paths.step_ns().min() > 0 else None


def _run_length(numbers: Array) -> int:
    """Return how many numbers at the end are consecutive."""
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    return len(numbers) - int(breaks[-1]) - 1 if len(breaks) else len(numbers)


def _calls_per_process(run: RecordedRun) -> int:
    """Return how many calls of each process are examined."""
    return max(MAX_CALLS // len(run.processes), _MIN_CALLS_OF_PROCESS)


def _complete_steps(run: RecordedRun) -> Array:
    """Return the last MAX_STEPS steps that are over on every process, ascending."""
    common: Array | None = None
    for process in run.processes:
        own = _last_steps(process, _calls_per_process(run))
        common = own if common is None else np.intersect1d(common, own)
    if common is None:
        return np.zeros(0, np.int64)
    over = common[:-1]
    return over[run.select_steps(over)][-MAX_STEPS:]


def _last_steps(process: Process, calls: int) -> Array:
    """Return the steps of the last records of a process, ascending and without gaps."""
    segments = last_records(process.segments, calls)
    numbers = [np.unique(records["step"]) for segment in segments for records in segment.blocks()]
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *numbers]))
    steps = steps[steps >= 0]
    steps = steps[-_run_length(steps) :] if len(steps) else steps
    # If earlier records were not read, the first step may lack some.
    return steps if sum(segment.count for segment in segments) < calls else steps[1:]


def _aligned_times(run: RecordedRun, calls: MatchedCalls) -> dict[str, Array] | None:
    """Return times on the reference's clock, 0 if not known; None if a host's is not bounded."""
    clocks, times = clocks_of(run), {}
    for name in ("t_begin", "t_return", "t_wait", "t_end"):
        aligned = clocks.to_reference(calls["process"], calls[name])
        if aligned is None:
            return None
        times[name] = np.where(calls[name] > 0, aligned, 0)
    return times


def _releases(calls: MatchedCalls, begin: Array) -> tuple[Array, Array]:
    """Return the release of each call, -1 if none is known, and the process that came last."""
    instance, depends = calls["instance"], calls["depends"]
    usable = calls.complete & agree(calls)
    known = np.flatnonzero(instance != NOT_MATCHED)
    known = known[usable[instance[known]]]
    source = known[(depends[known] & SOURCE) > 0]
    source = source[np.argsort(begin[source], kind="stable")]
    moment, last = np.full((2, len(usable)), -1, np.int64)
    moment[instance[source]], last[instance[source]] = begin[source], calls["process"][source]
    target = known[(depends[known] & TARGET) > 0]
    target = target[moment[instance[target]] >= 0]
    release, owner = np.full((2, len(calls)), -1, np.int64)
    # No operation begins on a rank before the rank's own call.
    itself = begin[target] >= moment[instance[target]]
    release[target] = np.where(itself, begin[target], moment[instance[target]])
    owner[target] = np.where(itself, calls["process"][target], last[instance[target]])
    return release, owner


def _timelines(calls: MatchedCalls, times: dict[str, Array], release: Array, owner: Array) -> dict[int, Timeline]:
    """Return the timeline of each process that has calls."""
    begin, returned, end = (times[name] for name in ("t_begin", "t_return", "t_end"))
    known = has_own_times(calls) & (begin > 0) & (returned >= begin)
    outlasts = known & (end > returned)
    waited = np.maximum(np.where(wait_begin(calls) > 0, times["t_wait"], 0), returned)
    waits = np.flatnonzero(outlasts & (wait_begin(calls) > 0) & (end > waited))
    unobserved = outlasts & (calls["t_wait"] == 0) & (calls["clock"] == int(Clock.FUTURE))
    inside = np.flatnonzero(known)
    # If a call returns before its operation ends, other ranks block only the wait for it.
    ends_inside = (end[inside] > 0) & (end[inside] <= returned[inside])
    timelines = {}
    waits_of = positions_by_value(calls["process"][waits])
    for process, at in positions_by_value(calls["process"][inside]).items():
        own, own_waits = inside[at], waits[waits_of.get(process, [])]
        blocks = np.concatenate([ends_inside[at], np.ones(len(own_waits), bool)])
        call = np.concatenate([own, own_waits])
        first = np.concatenate([begin[own], waited[own_waits]])
        last = np.concatenate([returned[own], end[own_waits]])
        extra, since = _unobserved_waits(calls, own[unobserved[own]], end, first, last, call)
        columns = [
            np.concatenate(pair)
            for pair in (
                (first, since), (last, end[extra]), (call, extra), (blocks, np.ones(len(extra), bool)),
            )
        ]  # fmt: skip
        first, last, call, blocks = (column[np.argsort(columns[0], kind="stable")] for column in columns)
        timelines[process] = Timeline(
            first, last, call, np.where(blocks, release[call], -1), np.where(blocks, owner[call], -1)
        )
    return timelines


def _unobserved_waits(
    calls: MatchedCalls, candidates: Array, end: Array, first: Array, last: Array, call: Array
) -> tuple[Array, Array]:
    """Return the `candidates` that count as waited for (module docstring), and since when."""
    order = np.argsort(first, kind="stable")
    first, reach, call = first[order], np.maximum.accumulate(last[order]), call[order]
    before = np.searchsorted(first, end[candidates]) - 1
    after = np.minimum(before + 1, len(first) - 1)
    in_gap = (reach[before] < end[candidates]) & (before + 1 < len(first))
    moved_on = (calls["phase"][call[after]] != calls["phase"][candidates]) | (
        calls["step"][call[after]] != calls["step"][candidates]
    )
    chosen = np.flatnonzero(in_gap & moved_on)
    return candidates[chosen], reach[before[chosen]]


def _gaps(timelines: dict[int, Timeline]) -> Gaps:
    columns: list[list[Array]] = [[np.zeros(0, np.int64)] for _ in range(5)]
    for process, line in sorted(timelines.items()):
        at = line.gaps
        before = line.latest[at - 1]
        process_gaps = np.full(len(at), process), line.end[before], line.begin[at], line.call[before], line.call[at]
        for column, values in zip(columns, process_gaps, strict=True):
            column.append(values)
    return Gaps(*(np.concatenate(column) for column in columns))


def chosen_steps(paths: StepPaths) -> dict[str, int]:
    """Return the indices in `paths.steps` of a step of median duration ("median") and of the longest ("slowest")."""
    order = np.argsort(paths.step_ns(), kind="stable")
    return {"median": int(order[(len(order) - 1) // 2]), "slowest": int(order[-1])}


def critical_path(run: RecordedRun, paths: StepPaths) -> pd.DataFrame:
    """Return the table `critical_path`."""
    tables = [_path_table(run, paths, which, step) for which, step in chosen_steps(paths).items()]
    return pd.concat(tables, ignore_index=True)


def _path_table(run: RecordedRun, paths: StepPaths, which: str, step: int) -> pd.DataFrame:
    pieces = paths.path(step)[::-1]
    start = int(paths.ends[:, step].max())
    # Computation is named by the phase of the call that it leads to.
    call = np.array([piece.call if piece.gap < 0 else paths.gaps.after[piece.gap] for piece in pieces], np.int64)
    inside = np.array([piece.call >= 0 for piece in pieces], bool)
    labels = {name: np.where(call >= 0, paths.calls.text(name, call), "") for name in ("op", "role", "phase", "site")}
    columns = {
        name: values if name == "phase" else np.where(inside, values, np.array(None, object))
        for name, values in labels.items()
    }
    rows = {
        "which": which,
        "step": int(paths.steps[step]),
        "rank": [run.processes[piece.process].rank for piece in pieces],
        "part": np.where(inside, COMMUNICATION, COMPUTATION),
        **columns,
        "begin_ns": [piece.begin - start for piece in pieces],
        "ns": [piece.end - piece.begin for piece in pieces],
    }
    return pd.DataFrame(rows, columns=TABLES["critical_path"].column_names)


def step_time_parts(paths: StepPaths) -> pd.DataFrame:
    """Return the table `step_time_parts`."""
    rows = []
    for which, step in chosen_steps(paths).items():
        begin, end = (int(moments.max()) for moments in (paths.ends[:, step], paths.ends[:, step + 1]))
        parts: Counter[tuple[str, str]] = Counter()
        for line in paths.timelines.values():
            parts.update(_parts(paths, line, begin, end))
        means = {key: ns / len(paths.timelines) for key, ns in parts.items()}
        computing = (end - begin) - sum(ns for (part, _), ns in means.items() if part != HIDDEN)
        for (part, role), ns in [((COMPUTATION, ""), computing), *sorted(means.items())]:
            share = ns / (end - begin) if end > begin else 0.0
            rows.append((which, int(paths.steps[step]), part, role, ns, share))
    return pd.DataFrame(rows, columns=TABLES["step_time_parts"].column_names)


def _parts(paths: StepPaths, line: Timeline, begin: int, end: int) -> Counter[tuple[str, str]]:
    """Return a process's time in an interval, except computation: ns by part and dimension."""
    # If calls overlap, each counts from the end of those that began before it.
    reach = np.concatenate([[begin], line.end[line.latest][:-1]])
    started, ended = (paths.times[name][line.call] for name in ("t_begin", "t_end"))
    ended = np.maximum(ended, started)
    # Intervals outside the step add nothing, and are most of the timeline.
    at = np.flatnonzero(((line.begin < end) & (line.end > begin)) | ((started < end) & (ended > begin)))
    blocked = np.stack([line.begin[at], line.end[at]], axis=1)
    first = np.clip(np.maximum(blocked[:, 0], reach[at]), begin, end)
    last = np.maximum(np.clip(blocked[:, 1], begin, end), first)
    released = np.where(line.last_process[at] >= 0, np.clip(line.release[at], first, last), first)
    flights = np.stack([started[at], ended[at]], axis=1)
    codes = paths.calls["role"][line.call[at]]
    window = np.array([begin]), np.array([end])
    result: Counter[tuple[str, str]] = Counter()
    for code in np.unique(codes).tolist():
        own = codes == code
        role = str(paths.calls.categories["role"][code])
        result[WAITING, role] = int((released - first)[own].sum())
        result[EXPOSED, role] = int((last - released)[own].sum())
        both = np.concatenate([flights[own], blocked])
        result[HIDDEN, role] = int(covered_ns(both, *window)[0] - covered_ns(blocked, *window)[0])
    return +result
