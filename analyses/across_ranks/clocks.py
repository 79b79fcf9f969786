"""Clocks: for each host, its clock minus a reference host's, as bounds that follow from the recorded calls alone.

An operation that waits for a call cannot end before that call has begun (`dependencies`). Let f be
a host's clock as a function of the reference's. A call that began at `begin` on one host, and a
call that waited for it and ended at `end` on the other, then give

    begin <= f(end)      if the reference waited        a lower bound of f
    f(begin) <= end      if the host waited             an upper bound of f

An end observed late gives a wider, but still valid, bound; `aligned_clock` makes a clock of the
bounds. Hosts that share no operation with the reference are bounded through hosts that are already
aligned: their calls of an operation give a time before which it had not begun everywhere, and one
after which it had. Device times are used as the recorder mapped them to the host's clock, with the
error added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables, RunAnalysis
from commtrace.analyses.grouping import Array, positions_by_value
from commtrace.analyses.table_specs import TABLES
from commtrace.reading.recorded_run import RecordedRun

from .aligned_clock import AlignedClock, clock_within, reference_clock
from .corridors import Bounds
from .dependencies import SOURCE, TARGET, agree, arrivals, completions, dependencies, operations
from .matching import NOT_MATCHED, MatchedCalls, host_numbers, match_calls

USEFUL_NS: Final = 1_000_000
"""Half-width of bounds above which wall clocks kept by NTP are likely to be more accurate."""
MAX_CALLS: Final = 12_000_000
"""Calls that are matched at a time; of a longer log, every n-th operation is used."""

_MARGIN_NS: Final = 1_000_000_000
_MAX_SWEEPS: Final = 64
_NEVER, _ALWAYS = np.iinfo(np.int64).max, np.iinfo(np.int64).min


@dataclass(frozen=True, eq=False)
class Clocks:
    """The clocks of a run's hosts.

    Attributes:
        hosts: Their names. Each boot of a host counts as a host.
        host_of_process: Position of each process's host in `hosts`, shape (processes,).
        reference: Position of the reference host.
        aligned: The clock of each host; None where nothing bounds it.
    """

    hosts: Sequence[str]
    host_of_process: Array
    reference: int
    aligned: Sequence[AlignedClock | None]

    def to_reference(self, processes: Array, readings: Array) -> Array | None:
        """Return times of the reference's clock at readings of processes' clocks, int64, shape (n,).

        They are the middles of the bounds. None if a host's bounds are missing or wider than
        USEFUL_NS: its wall clock is then likely to be more accurate.
        """
        times = np.zeros(len(readings), np.int64)
        for host, at in positions_by_value(self.host_of_process[processes]).items():
            clock = self.aligned[host]
            if clock is None or clock.half_width_ns > USEFUL_NS:
                return None
            earliest, latest = clock.to_reference(readings[at])
            times[at] = earliest + (latest - earliest) // 2
        return times

    @property
    def half_width_ns(self) -> float:
        """The largest half-width of a host's bounds, infinite where a host has none."""
        return max(np.inf if clock is None else clock.half_width_ns for clock in self.aligned)

    @property
    def table(self) -> pd.DataFrame:
        """The table `clocks`."""
        return pd.DataFrame([self._row(number) for number in range(len(self.hosts))], columns=_names("clocks"))

    @property
    def step_table(self) -> pd.DataFrame:
        """The table `clock_steps`."""
        rows = [
            (self.hosts[number], self.hosts[self.reference], *step)
            for number, clock in enumerate(self.aligned)
            for step in (() if clock is None else clock.steps)
        ]
        return pd.DataFrame(rows, columns=_names("clock_steps"))

    def _row(self, number: int) -> tuple[object, ...]:
        clock, names = self.aligned[number], (self.hosts[number], self.hosts[self.reference])
        if clock is None:
            return *names, *(None,) * 4, 0, 0
        lower, upper = clock.offsets(np.array([sum(clock.used_at) // 2]))
        slowest, fastest = (1e6 * rate for rate in clock.drift)
        drift = (slowest + fastest) / 2, (fastest - slowest) / 2
        return *names, int(lower[0] + upper[0]) // 2, *drift, clock.half_width_ns, clock.calls, len(clock.steps)


def _names(table: str) -> list[str]:
    return TABLES[table].column_names


def _tables(run: RecordedRun) -> NamedTables:
    return {"clocks": clocks_of(run).table, "clock_steps": clocks_of(run).step_table}


ANALYSIS: Final = RunAnalysis("clocks", _tables)

_CLOCKS: Final[WeakKeyDictionary[RecordedRun, Clocks]] = WeakKeyDictionary()


def clocks_of(run: RecordedRun) -> Clocks:
    """Return the clocks of a run's hosts; they are computed once. Nothing is read for a run on one host."""
    if run not in _CLOCKS:
        _CLOCKS[run] = _align(run)
    return _CLOCKS[run]


def to_one_clock(run: RecordedRun, processes: Array, readings: Array) -> tuple[Array, Array]:
    """Return times of one clock at readings of processes' clocks, and whether each is known, shape (n,).

    The clock is the reference's if calls bound all others; else the wall clock, as well as hosts
    synchronise it.
    """
    times = clocks_of(run).to_reference(processes, readings)
    if times is not None:
        return times, np.ones(len(readings), bool)
    offsets = wall_clock_offsets(run)
    offset_of = np.array([offsets.get(number, 0) for number in range(len(run.processes))], np.int64)
    return readings + offset_of[processes], np.isin(processes, [*offsets])


def wall_clock_offsets(run: RecordedRun) -> dict[int, int]:
    """Return wall-clock minus monotonic ns by process, if known; equal within a boot of a host."""
    hosts = host_numbers(run)[1].tolist()
    offsets: dict[int, int] = {}
    for number, host in enumerate(hosts):
        if (offset := run.labels.clock_offsets[number]) is not None:
            offsets.setdefault(host, offset)
    return {number: offsets[host] for number, host in enumerate(hosts) if host in offsets}


def _align(run: RecordedRun) -> Clocks:
    hosts, host_of_process = host_numbers(run)
    if len(hosts) < 2 or run.simulated:
        return Clocks(hosts, host_of_process, 0, [reference_clock(0, 0), *(None for _ in hosts[1:])])
    records = sum(segment.count for process in run.processes for segment in process.segments)
    columns = {
        "arrival": arrivals, "completion": completions(run), "depends": dependencies, "operation": operations,
    }  # fmt: skip
    calls = match_calls(run, [], derived=columns, part=(0, -(-records // MAX_CALLS) or 1))
    return _Aligner(calls, hosts, host_of_process).align()


class _Aligner:
    """Alignment of one host after the other, with bounds on the moment of each operation.

    The moment of an operation is any at which all its sources have begun and no target has ended.
    `began` is the latest time, on the reference's clock, at which a source had certainly not begun;
    `ended` is the earliest at which a target had certainly ended.
    """

    def __init__(self, calls: MatchedCalls, hosts: Sequence[str], host_of_process: Array) -> None:
        self.calls, self.hosts, self.host_of_process = calls, hosts, host_of_process
        self.began, self.ended = np.full(len(calls.channel), _ALWAYS), np.full(len(calls.channel), _NEVER)
        self._agree = agree(calls)
        self._processes = positions_by_value(host_of_process)

    def align(self) -> Clocks:
        reference = self._reference()
        aligned: list[AlignedClock | None] = [None] * len(self.hosts)
        clock = aligned[reference] = reference_clock(*self._span(reference))
        self._update_moments(reference, clock)
        others = [host for host in range(len(self.hosts)) if host != reference]
        known = np.zeros(len(self.hosts), np.int64)
        for _ in range(_MAX_SWEEPS):
            before = known.copy()
            for host in others:
                rows = self._known_rows(host)
                count = sum(map(len, rows))
                fitted = self._fit(host, *rows) if count > known[host] else None
                if fitted is not None:
                    known[host], aligned[host] = count, fitted
                    self._update_moments(host, fitted)
            if (known == before).all():
                break
        return Clocks(self.hosts, self.host_of_process, reference, aligned)

    def _reference(self) -> int:
        """Return the first host with the most calls in operations of several hosts."""
        calls = self.calls
        at = calls.matched
        host = self.host_of_process[calls["process"][at]]
        instance = calls["instance"][at]
        of_instance = np.zeros(len(calls.channel), np.int64)
        of_instance[instance] = host
        several = np.zeros(len(calls.channel), bool)
        several[instance[of_instance[instance] != host]] = True
        return int(np.bincount(host[several[instance]], minlength=len(self.hosts)).argmax())

    def _rows(self, host: int) -> Array:
        """Return the indices of the usable calls of a host."""
        rows = np.concatenate([self.calls.of_process(number) for number in self._processes[host]])
        rows = rows[(self.calls["instance"][rows] != NOT_MATCHED) & (self.calls["arrival"][rows] > 0)]
        return np.asarray(rows[self._agree[self.calls["instance"][rows]]])

    def _sources_and_targets(self, host: int) -> tuple[Array, Array]:
        rows = self._rows(host)
        depends, ended = self.calls["depends"][rows], self.calls["completion"][rows] > 0
        return rows[(depends & SOURCE) > 0], rows[((depends & TARGET) > 0) & ended]

    def _span(self, host: int) -> tuple[int, int]:
        rows = self._rows(host)
        if not len(rows):
            return 0, 0
        begin, end = self.calls["arrival"][rows], self.calls["completion"][rows]
        return int(begin.min()), int(max(begin.max(), end.max()))

    def _update_moments(self, host: int, clock: AlignedClock) -> None:
        """Update the bounds on moments from the calls of an aligned host while its bounds hold."""
        (sources, targets), instance = self._sources_and_targets(host), self.calls["instance"]
        for name, at, moments, bound, side in (
            ("arrival", sources, self.began, np.maximum, 0),
            ("completion", targets, self.ended, np.minimum, 1),
        ):
            interval = clock.to_reference(self.calls[name][at])
            holds = (interval[0] >= clock.used_at[0]) & (interval[1] <= clock.used_at[1])
            bound.at(moments, instance[at[holds]], interval[side][holds])

    def _known_rows(self, host: int) -> tuple[Array, Array]:
        """Return the indices of a host's sources and targets that have a bounded moment."""
        (sources, targets), instance = self._sources_and_targets(host), self.calls["instance"]
        return sources[self.ended[instance[sources]] != _NEVER], targets[self.began[instance[targets]] != _ALWAYS]

    def _fit(self, host: int, sources: Array, targets: Array) -> AlignedClock | None:
        if not len(sources) or not len(targets):
            return None
        calls = self.calls
        at = np.concatenate([self.ended[calls["instance"][sources]], self.began[calls["instance"][targets]]])
        value = np.concatenate([calls["arrival"][sources], calls["completion"][targets]]) - at
        upper = np.arange(len(at)) >= len(sources)
        order = np.argsort(at, kind="stable")
        origin, base = int(at[order[0]]), int(value[0])
        bounds = Bounds((at[order] - origin).astype(np.float64), (value[order] - base).astype(np.float64), upper[order])
        used = len(sources) + len(targets) - len(np.intersect1d(sources, targets, assume_unique=True))
        begin, end = (time - base - origin for time in self._span(host))
        return clock_within(bounds, origin, base, (begin - _MARGIN_NS, end + _MARGIN_NS), used)
