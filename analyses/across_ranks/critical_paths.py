"""Critical paths: what the end of each training step depends on, across ranks.

A rank's time is computation, except where one of its calls blocks it (`blocked_time`). A call that depends on others
cannot end before its release (`call_times`). From the end of a step backwards, the path therefore goes through a rank's
computation to the call that blocked it before, through that operation to its release, to the rank that came last,
through that rank's computation, and so on to the end of the previous step. The pieces cover the step without gap or
overlap: their sum is its duration.

The job's step begins and ends with the last rank's. Times are ns on the clock of the reference host (`clocks`). Ends
observed on a device do not block the host: runs with such ends have no paths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array, group_rows
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import DEVICE_CLOCKS, Phase

from .blocked_time import FIELDS, BlockedTime, StepsOfProcesses, Timeline, covered_ns, measured_steps
from .call_times import COLUMNS as TIME_COLUMNS
from .clocks import Clocks
from .matching import MatchedCalls, match_calls
from .step_time_specs import CRITICAL_PATH, STEP_TIME_PARTS, STEP_TIMES

MAX_STEPS: Final = 500
"""Number of steps that are examined: the last ones of the run."""
MAX_CALLS: Final = 1 << 20
"""Number of calls that are examined, the last ones of the run: it limits memory and time."""
_MIN_CALLS_OF_PROCESS: Final = 512

COMPUTATION, COMMUNICATION = "computation", "communication"
WAITING, EXPOSED, HIDDEN = "waiting", "exposed communication", "hidden communication"

COLUMNS: Final = (*FIELDS, "op", "role", "site")
"""Columns (`match_calls`) of the calls of `StepPaths`."""


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


class _Numbers(NamedTuple):
    """The columns of a timeline: single numbers are read four times as fast as from arrays."""

    begin: memoryview[int]
    end: memoryview[int]
    call: memoryview[int]
    release: memoryview[int]
    last_process: memoryview[int]
    latest: memoryview[int]
    gap: memoryview[int]
    """Position in `Timeline.gaps` of the first gap after each interval."""

    @staticmethod
    def of(line: Timeline) -> _Numbers:
        gap = np.searchsorted(line.gaps, np.arange(1, len(line.begin) + 1))
        columns = line.begin, line.end, line.call, line.release, line.last_process, line.latest, gap
        return _Numbers(*(np.ascontiguousarray(column, np.int64).data for column in columns))


@dataclass(eq=False)
class StepPaths:
    """Paths of the last steps that are measured (`blocked_time`).

    Attributes:
        blocked: The blocked time of all processes.
        steps: The steps whose paths are known, ascending and consecutive, shape (steps,).
        ends: When each process ended the step before `steps` and each step, ns, shape (processes,
            steps + 1).
        gaps: Computation of the processes.
    """

    blocked: BlockedTime
    steps: Array
    ends: Array
    gaps: Gaps = field(repr=False)

    @property
    def calls(self) -> MatchedCalls:
        """The calls of the steps."""
        return self.blocked.calls

    @property
    def processes(self) -> Array:
        """Indices in the log of the processes, ascending, shape (processes,)."""
        return self.blocked.processes

    @cached_property
    def _numbers(self) -> dict[int, _Numbers]:
        return {process: _Numbers.of(line) for process, line in self.blocked.timelines.items()}

    @cached_property
    def _first_gap(self) -> dict[int, int]:
        """Index of the first gap of each process in `gaps`."""
        first = np.searchsorted(self.gaps.process, self.processes)
        return dict(zip(self.processes.tolist(), first.tolist(), strict=True))

    def step_ns(self) -> Array:
        """Return the duration of each step of the job, shape (steps,)."""
        return np.diff(self.ends.max(axis=0))

    @cached_property
    def parts(self) -> dict[tuple[str, str], Array]:
        """Mean over the ranks of each part of each step by part and dimension, ns, float64, shape (steps,)."""
        begins, ends = self.ends.max(axis=0)[:-1], self.ends.max(axis=0)[1:]
        sums: dict[tuple[str, str], Array] = {}
        for line in self.blocked.timelines.values():
            for key, ns in _parts(self.blocked, line, begins, ends):
                sums[key] = sums.get(key, 0) + ns
        means = {key: ns / len(self.processes) for key, ns in sums.items()}
        outside = (ends - begins) - sum(ns for (part, _), ns in means.items() if part != HIDDEN)
        return {(COMPUTATION, ""): outside, **means}

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
            line = self._numbers[process]
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


def read_step_paths(
    run: RecordedRun, clocks: Clocks, most_calls: int = MAX_CALLS, columns: Sequence[str] = ()
) -> StepPaths | None:
    """Return the paths of the last steps of a run, among its last `most_calls` calls; None if there are none.

    There are none for dry runs, and for runs without three training steps among the calls that are
    examined, with a rank that left no log, with ends on a device's clock, with a host whose clock
    the calls do not bound, or with a step of no duration, whose times are damaged.
    """
    return next(reversed(read_path_runs(run, clocks, most_calls, columns, only_last=True)), None)


def read_path_runs(
    run: RecordedRun, clocks: Clocks, most_calls: int = MAX_CALLS, columns: Sequence[str] = (), *,
    only_last: bool = False,
) -> list[StepPaths]:  # fmt: skip
    """Return the paths of each run of consecutive steps, ascending: an evaluation, for example, ends one.

    See `read_step_paths`, which returns the last; `only_last`: return no other.
    """
    ranks = {process.rank for process in run.processes}
    if run.simulated or not ranks or len(ranks) != (run.world_size or len(ranks)) or not clocks.are_useful:
        return []
    count = max(most_calls // len(run.processes), _MIN_CALLS_OF_PROCESS)
    calls = match_calls(run, (*COLUMNS, *columns), derived=TIME_COLUMNS, last=count)
    steps, regular = measured_steps(_recorded_steps(run, calls, count), len(run.processes))
    if len(steps) < 2:
        return []
    steps = steps[regular & run.select_steps(steps)]
    runs = np.split(steps, np.flatnonzero(np.diff(steps) != 1) + 1)
    device_steps = calls["step"][np.isin(calls["clock"], DEVICE_CLOCKS)]
    runs = [own[-MAX_STEPS:] for own in runs[-1 if only_last else 0 :] if len(own)]
    runs = [own for own in runs if not np.isin(own, device_steps).any()]
    if not runs:
        return []
    blocked = BlockedTime.of(calls, clocks)
    gaps = _gaps(blocked.timelines)
    paths = [StepPaths(blocked, own, blocked.step_ends(np.append(own[0] - 1, own)), gaps) for own in runs]
    return [own for own in paths if own.step_ns().min() > 0]


def _recorded_steps(run: RecordedRun, calls: MatchedCalls, count: int) -> StepsOfProcesses:
    """Return the steps among the last `count` calls of each process; of the first of them, calls may be missing."""
    process, step = calls["process"], calls["step"]
    first, groups = group_rows([process, step])
    evaluates = np.bincount(groups, calls["phase"] == Phase.EVALUATION, len(first)) > 0
    records = [sum(segment.count for segment in own.segments) for own in run.processes]
    is_cut = np.array(records) >= count
    lowest = np.full(len(is_cut), np.iinfo(np.int64).max)
    np.minimum.at(lowest, process[first], step[first])
    whole = ~(is_cut[process[first]] & (step[first] == lowest[process[first]]))
    return StepsOfProcesses(process[first][whole], step[first][whole], evaluates[whole])


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
    return pd.DataFrame(rows, columns=CRITICAL_PATH.column_names)


def step_time_parts(paths: StepPaths) -> pd.DataFrame:
    """Return the table `step_time_parts`."""
    rows, step_ns = [], paths.step_ns()
    for which, step in chosen_steps(paths).items():
        parts = {key: float(ns[step]) for key, ns in paths.parts.items() if ns[step] or key == (COMPUTATION, "")}
        for (part, role), ns in sorted(parts.items(), key=lambda item: (item[0][0] != COMPUTATION, item[0])):
            rows.append((which, int(paths.steps[step]), part, role, ns, ns / float(step_ns[step])))
    return pd.DataFrame(rows, columns=STEP_TIME_PARTS.column_names)


def step_times(run: RecordedRun, paths: StepPaths, delays: Array) -> pd.DataFrame:
    """Return the table `step_times`.

    Args:
        run: The run.
        paths: The paths of its steps.
        delays: Computation of each process beyond the median of the others, ns, shape (processes, steps).
    """
    parts = {name: np.zeros(len(paths.steps)) for name in (COMPUTATION, WAITING, EXPOSED, HIDDEN)}
    for (part, _), ns in paths.parts.items():
        parts[part] = parts[part] + ns
    latest = delays.argmax(axis=0)
    ranks = np.array([run.processes[process].rank for process in paths.processes])
    columns = (
        paths.steps, paths.step_ns(), *parts.values(), ranks[latest], delays[latest, np.arange(len(paths.steps))],
    )  # fmt: skip
    return pd.DataFrame(dict(zip(STEP_TIMES.column_names, columns, strict=True)))


def _parts(blocked: BlockedTime, line: Timeline, begins: Array, ends: Array) -> Iterator[tuple[tuple[str, str], Array]]:
    """Yield a process's time in intervals, except computation, by part and dimension, ns, shape (intervals,)."""
    begun, ended = (blocked.times[name][line.call] for name in ("arrival", "t_end"))
    flights = np.stack([begun, np.maximum(ended, begun)], axis=1)
    roles = blocked.calls["role"][line.call]
    covered = covered_ns(line.blocked, begins, ends)
    for code in np.unique(roles).tolist():
        own = roles == code
        role = str(blocked.calls.categories["role"][code])
        waiting = covered_ns(line.waiting[own], begins, ends)
        yield (WAITING, role), waiting
        yield (EXPOSED, role), covered_ns(line.blocked[own], begins, ends) - waiting
        yield (HIDDEN, role), covered_ns(np.concatenate([flights[own], line.blocked]), begins, ends) - covered
