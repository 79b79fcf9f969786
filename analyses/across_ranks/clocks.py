"""Clocks: for each host, its clock minus a reference host's, as bounds that follow from the recorded calls alone.

An operation that waits for a call cannot end before that call has begun (`dependencies`). So for f, a host's clock as a
function of the reference's, a call that began at `begin` on one host, and one that waited for it and ended at `end` on
the other, give

    begin <= f(end)      if the reference waited        a lower bound of f
    f(begin) <= end      if the host waited             an upper bound of f

An end that was seen late gives a wider bound, and a true one. f is straight within windows of WINDOW_NS, so that its
bounds there are those of all lines within the corridor (`corridors`). Where there is no such line, the clock was
stepped: the bounds are split there. Hosts that share no operation with the reference are bounded by hosts that are
aligned already: each knows of an operation a moment before which it had not begun everywhere, and one after which it
had. Times of devices enter as the recorder mapped them to the host's clock, its error added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import Array, NamedTables, positions_by_value, without_records
from commtrace.analyses.table_specs import TABLES
from commtrace.reading.recorded_run import RecordedRun

from .corridors import MAX_RATE, Bounds, Lines, find_jumps, lines_within
from .dependencies import SOURCE, TARGET, agree, arrivals, completions, dependencies, operations
from .matching import NOT_MATCHED, MatchedCalls, host_numbers, match_calls

WINDOW_NS: Final = 10_000_000_000
"""Time in which the rate of a clock is constant, within RATE_TOLERANCE."""
RATE_TOLERANCE: Final = 5e-7
"""Largest difference of a clock's rate from its mean in a window; the bounds are that much wider."""
USEFUL_NS: Final = 1_000_000
"""Half-width of bounds above which wall clocks, as NTP keeps them, are likely to be closer."""
MAX_CALLS: Final = 12_000_000
"""Calls that are matched at a time; of a longer log, every n-th operation is used."""

_MIN_BOUNDS: Final = 32
_MAX_WINDOWS: Final = 500
_KNOTS: Final = 5
_MARGIN_NS: Final = 1_000_000_000
_MAX_SWEEPS: Final = 64
_UNBOUNDED: Final = 1e15
_ANY: Final = Lines(0.0, np.array([-np.inf, np.inf]), np.zeros(2))
_NEVER, _ALWAYS = np.iinfo(np.int64).max, np.iinfo(np.int64).min


class ClockStep(NamedTuple):
    """A jump of a clock: when, between two times of the reference's clock, and by how much, within bounds; ns."""

    after_ns: int
    before_ns: int
    smallest_ns: int
    largest_ns: int


@dataclass(frozen=True, eq=False)
class AlignedClock:
    """A host's clock minus the reference's, as bounds that are linear between knots.

    Attributes:
        at: Knots, ns of the reference's clock, int64, ascending, shape (knots,).
        lower: Lower bound of the difference at each knot, ns, int64.
        upper: Upper bound likewise.
        used_at: First and last time from which the bounds are, ns of the reference's clock.
        drift: Smallest and largest mean rate of the difference, a fraction.
        half_width_ns: Half of the largest distance of the bounds within `used_at`, without the jumps.
        calls: Calls of the host that gave bounds.
        steps: Jumps of the clock.
    """

    at: Array
    lower: Array
    upper: Array
    used_at: tuple[int, int]
    drift: tuple[float, float]
    half_width_ns: float
    calls: int
    steps: Sequence[ClockStep] = ()

    def offsets(self, at: Array) -> tuple[Array, Array]:
        """Return the lower and upper bound of the difference at times of the reference's clock, int64, shape (n,)."""
        relative, knots = (at - self.at[0]).astype(np.float64), (self.at - self.at[0]).astype(np.float64)
        lower, upper = (
            bound[0] + rounding(np.interp(relative, knots, bound - bound[0])).astype(np.int64)
            for bound, rounding in ((self.lower, np.floor), (self.upper, np.ceil))
        )
        return lower, upper

    def from_reference(self, earliest: Array, latest: Array) -> tuple[Array, Array]:
        """Return the earliest and latest reading of this clock in an interval of the reference's clock."""
        return earliest + self.offsets(earliest)[0], latest + self.offsets(latest)[1]

    def to_reference(self, readings: Array) -> tuple[Array, Array]:
        """Return the earliest and latest time of the reference's clock at readings of this clock, int64, shape (n,)."""
        knots = (self.at - self.at[0]).astype(np.float64)
        times = []
        for curve, rounding in ((self.at + self.upper, np.floor), (self.at + self.lower, np.ceil)):
            relative = readings - curve[0]
            inside = rounding(np.interp(relative, curve - curve[0], knots)).astype(np.int64)
            outside = np.minimum(relative, 0) + np.maximum(readings - curve[-1], 0)
            times.append(self.at[0] + inside + outside)
        return times[0], times[1]


@dataclass(frozen=True, eq=False)
class Clocks:
    """The clocks of a run's hosts.

    Attributes:
        hosts: Their names, each boot of a host for itself.
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

        They are the middles of the bounds. None if a host's bounds are missing or wider than USEFUL_NS: its wall clock
        is then likely to be closer.
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


ANALYSIS: Final = without_records("clocks", _tables)

_CLOCKS: Final[WeakKeyDictionary[RecordedRun, Clocks]] = WeakKeyDictionary()


def clocks_of(run: RecordedRun) -> Clocks:
    """Return the clocks of a run's hosts; they are computed once. Nothing is read for a run on one host."""
    if run not in _CLOCKS:
        _CLOCKS[run] = _align(run)
    return _CLOCKS[run]


def to_one_clock(run: RecordedRun, processes: Array, readings: Array) -> tuple[Array, Array]:
    """Return times of one clock at readings of processes' clocks, and whether each is known, shape (n,).

    It is the reference's if calls bound all others; else the wall clock, as far as hosts have it synchronised.
    """
    times = clocks_of(run).to_reference(processes, readings)
    if times is not None:
        return times, np.ones(len(readings), bool)
    offsets = wall_clock_offsets(run)
    offset_of = np.array([offsets.get(number, 0) for number in range(len(run.processes))], np.int64)
    return readings + offset_of[processes], np.isin(processes, [*offsets])


def wall_clock_offsets(run: RecordedRun) -> dict[int, int]:
    """Return wall-clock minus monotonic ns by process, one value for a boot of a host; left out if not known."""
    hosts = host_numbers(run)[1].tolist()
    offsets: dict[int, int] = {}
    for host, labels in zip(hosts, run.labels, strict=True):
        if labels.unix_minus_mono_ns is not None:
            offsets.setdefault(host, labels.unix_minus_mono_ns)
    return {number: offsets[host] for number, host in enumerate(hosts) if host in offsets}


def _align(run: RecordedRun) -> Clocks:
    hosts, host_of_process = host_numbers(run)
    if len(hosts) < 2 or run.simulated:
        return Clocks(hosts, host_of_process, 0, [_reference_clock(0, 0), *(None for _ in hosts[1:])])
    records = sum(segment.count for process in run.processes for segment in process.segments)
    columns = {
        "arrival": arrivals, "completion": completions(run), "depends": dependencies, "operation": operations,
    }  # fmt: skip
    calls = match_calls(run, [], derived=columns, part=(0, -(-records // MAX_CALLS) or 1))
    return _Aligner(calls, hosts, host_of_process).align()


def _reference_clock(first: int, last: int) -> AlignedClock:
    zeros = np.zeros(2, np.int64)
    return AlignedClock(np.array([first, last + 1]), zeros, zeros, (first, last), (0.0, 0.0), 0.0, 0)


@dataclass(eq=False)
class _Aligner:
    """Aligns host after host, and keeps for each operation what the aligned hosts know of its moment.

    The moment of an operation is any at which all of its sources have begun and no target has ended. `began` is the
    latest time, on the reference's clock, at which a source had certainly not begun, `ended` the earliest at which a
    target had certainly ended.
    """

    calls: MatchedCalls
    hosts: Sequence[str]
    host_of_process: Array
    began: Array = field(init=False)
    ended: Array = field(init=False)

    def __post_init__(self) -> None:
        self.began = np.full(len(self.calls.channel), _ALWAYS)
        self.ended = np.full(len(self.calls.channel), _NEVER)
        self._agree = agree(self.calls)
        self._processes = positions_by_value(self.host_of_process)

    def align(self) -> Clocks:
        reference = self._reference()
        aligned: list[AlignedClock | None] = [None] * len(self.hosts)
        clock = aligned[reference] = _reference_clock(*self._span(reference))
        self._tell(reference, clock)
        others = [host for host in range(len(self.hosts)) if host != reference]
        known = np.zeros(len(self.hosts), np.int64)
        for _ in range(_MAX_SWEEPS):
            before = known.copy()
            for host in others:
                rows = self._known_rows(host)
                grown = sum(map(len, rows))
                fitted = self._fit(host, *rows) if grown > known[host] else None
                if fitted is not None:
                    known[host], aligned[host] = grown, fitted
                    self._tell(host, fitted)
            if (known == before).all():
                break
        return Clocks(self.hosts, self.host_of_process, reference, aligned)

    def _reference(self) -> int:
        """Return the host with the most calls that belong to an operation of several hosts, the first of several."""
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
        """Return the positions of the usable calls of a host."""
        rows = np.concatenate([self.calls.of_process(number) for number in self._processes[host]])
        rows = rows[(self.calls["instance"][rows] != NOT_MATCHED) & (self.calls["arrival"][rows] > 0)]
        return np.asarray(rows[self._agree[self.calls["instance"][rows]]])

    def _sources(self, rows: Array) -> Array:
        return rows[(self.calls["depends"][rows] & SOURCE) > 0]

    def _targets(self, rows: Array) -> Array:
        return rows[((self.calls["depends"][rows] & TARGET) > 0) & (self.calls["completion"][rows] > 0)]

    def _span(self, host: int) -> tuple[int, int]:
        rows = self._rows(host)
        if not len(rows):
            return 0, 0
        begin, end = self.calls["arrival"][rows], self.calls["completion"][rows]
        return int(begin.min()), int(max(begin.max(), end.max()))

    def _tell(self, host: int, clock: AlignedClock) -> None:
        """Enter what an aligned host knows of the moments of its operations."""
        rows = self._rows(host)
        sources, targets = self._sources(rows), self._targets(rows)
        instance = self.calls["instance"]
        earliest, _ = clock.to_reference(self.calls["arrival"][sources])
        _, latest = clock.to_reference(self.calls["completion"][targets])
        np.maximum.at(self.began, instance[sources], earliest)
        np.minimum.at(self.ended, instance[targets], latest)

    def _known_rows(self, host: int) -> tuple[Array, Array]:
        """Return the positions of sources and targets of a host of whose operations other hosts know the moment."""
        rows, instance = self._rows(host), self.calls["instance"]
        sources, targets = self._sources(rows), self._targets(rows)
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
        return _clock(bounds, origin, base, (begin - _MARGIN_NS, end + _MARGIN_NS), used)


class _Piece(NamedTuple):
    """A part of the run in which a clock is straight, and whether a jump is before it."""

    begin: float
    end: float
    lines: Lines
    slack: float
    after_jump: bool

    def bounds(self, at: Array) -> tuple[Array, Array]:
        lower, upper = self.lines.lowest(at) - self.slack, self.lines.highest(at) + self.slack
        return np.maximum(lower, -_UNBOUNDED), np.minimum(upper, _UNBOUNDED)

    def bounds_at(self, time: float) -> tuple[float, float]:
        lower, upper = self.bounds(np.array([time]))
        return float(lower[0]), float(upper[0])


def _clock(bounds: Bounds, origin: int, base: int, span: tuple[int, int], calls: int) -> AlignedClock:
    """Return the clock that satisfies bounds, whose times and values count from `origin` and `base`."""
    pieces = _pieces(bounds)
    curves = [np.stack([at := np.linspace(piece.begin, piece.end, _KNOTS), *piece.bounds(at)]) for piece in pieces]
    widths = [float((upper - lower).max()) for _, lower, upper in curves]
    for number, piece in enumerate(pieces[1:], 1):
        left, right = curves[number - 1], curves[number]
        if piece.after_jump:  # nothing is known in between but that no clock runs backwards
            between = np.array([[left[0, -1] + 1, right[0, 0] - 1], [-_UNBOUNDED] * 2, [_UNBOUNDED] * 2])
            curves[number] = np.concatenate([between[:, : 2 * (between[0, 0] < between[0, 1])], right], axis=1)
        else:  # both pieces hold where they meet
            left[1:, -1] = right[1:, 0] = max(left[1, -1], right[1, 0]), min(left[2, -1], right[2, 0])
    outer = [
        np.array([[time], *([bound] for bound in piece.bounds_at(time))])
        for time, piece in zip(span, (pieces[0], pieces[-1]), strict=True)
    ]
    at, lower, upper = np.concatenate([outer[0], *curves, outer[1]], axis=1)
    at, distinct = np.unique(np.round(at), return_index=True)
    lower = np.maximum.accumulate(at + np.floor(lower[distinct])) - at
    upper = np.minimum.accumulate((at + np.ceil(upper[distinct]))[::-1])[::-1] - at
    return AlignedClock(
        origin + at.astype(np.int64),
        base + lower.astype(np.int64),
        base + upper.astype(np.int64),
        (origin + int(bounds.at[0]), origin + int(bounds.at[-1])),
        _drift(pieces),
        max((width for width in widths if width < _UNBOUNDED), default=_UNBOUNDED) / 2,
        calls,
        [*_steps(pieces, origin)],
    )


def _pieces(bounds: Bounds) -> list[_Piece]:
    """Return the straight parts of a clock: windows, between which it may jump."""
    whole = len(bounds) - 1, len(bounds)
    pieces = [*_straight_pieces(bounds, [whole])]
    if any(piece.lines is _ANY for piece in pieces) or not all(_meet(left, right) for left, right in pairwise(pieces)):
        pieces = [*_straight_pieces(bounds, [*_jumps(bounds), whole])]
    for number, (left, right) in enumerate(pairwise(pieces)):
        if not right.after_jump and not _meet(left, right):  # a jump that no window shows
            pieces[number] = left._replace(end=(left.begin + left.end) / 2)
            pieces[number + 1] = right._replace(begin=(right.begin + right.end) / 2, after_jump=True)
    return pieces


def _straight_pieces(bounds: Bounds, jumps: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    """Yield a piece for each window between jumps, with _ANY lines if its bounds contradict each other."""
    first = 0
    for before, after in jumps:
        part = bounds.between(first, before + 1)
        for number, (begin, end, start, stop) in enumerate(_windows(part)):
            slack = RATE_TOLERANCE * (end - begin) / 2
            lines = lines_within(part.between(start, stop), slack)
            yield _Piece(begin, end, lines or _ANY, slack, bool(first) and not number)
        first = after


def _jumps(bounds: Bounds) -> list[tuple[int, int]]:
    """Return the positions between which the clock jumped, found in windows that overlap by half, without overlap."""
    found = set()
    for shift in (0.0, 0.5):
        for begin, end, start, stop in _windows(bounds, shift):
            slack = RATE_TOLERANCE * (end - begin) / 2
            found |= {(start + a, start + b) for a, b in find_jumps(bounds.between(start, stop), slack)}
    distinct: list[tuple[int, int]] = []
    for before, after in sorted(found):
        if distinct and before < distinct[-1][1]:
            distinct[-1] = distinct[-1][0], max(after, distinct[-1][1])
        else:
            distinct.append((before, after))
    return distinct


def _meet(left: _Piece, right: _Piece) -> bool:
    (left_low, left_high), (right_low, right_high) = left.bounds_at(right.begin), right.bounds_at(right.begin)
    return max(left_low, right_low) <= min(left_high, right_high)


def _windows(bounds: Bounds, shift: float = 0.0) -> Iterator[tuple[float, float, int, int]]:
    """Yield begin, end, and the positions of the bounds of windows, each with enough bounds of both kinds.

    Args:
        bounds: All bounds.
        shift: Part of a window by which all edges but the outer ones are moved.
    """
    begin, end = float(bounds.at[0]), float(bounds.at[-1])
    count = min(max(round((end - begin) / WINDOW_NS), 1), _MAX_WINDOWS)
    edges = begin + (end - begin) * (np.arange(1, count) + shift) / count
    stops = np.searchsorted(bounds.at, edges)
    uppers = np.concatenate([[0], np.cumsum(bounds.upper)])
    kept = [(begin, 0)]
    for edge, stop in zip(edges.tolist(), stops.tolist(), strict=True):
        for other in (kept[-1][1], len(bounds)):
            length, upper = abs(stop - other), abs(uppers[stop] - uppers[other])
            if min(upper, length - upper) < _MIN_BOUNDS:
                break
        else:
            kept.append((edge, stop))
    for (left, first), (right, stop) in pairwise([*kept, (end, len(bounds))]):
        yield left, right, first, stop


def _steps(pieces: Sequence[_Piece], origin: int) -> Iterator[ClockStep]:
    for left, right in pairwise(pieces):
        if right.after_jump:
            (left_low, left_high), (right_low, right_high) = left.bounds_at(left.end), right.bounds_at(right.begin)
            drift = MAX_RATE * (right.begin - left.end)
            least, most = np.floor(right_low - left_high - drift), np.ceil(right_high - left_low + drift)
            yield ClockStep(origin + int(left.end), origin + int(right.begin), int(least), int(most))


def _drift(pieces: Sequence[_Piece]) -> tuple[float, float]:
    """Return the smallest and largest mean rate, of the part between jumps that leaves the least between them."""
    starts = [0, *(number for number, piece in enumerate(pieces) if piece.after_jump), len(pieces)]
    ranges = []
    for first, stop in pairwise(starts):
        left, right = pieces[first], pieces[stop - 1]
        if stop - first == 1:
            ranges.append((float(left.lines.rate.min()), float(left.lines.rate.max())))
            continue
        begin, end = ((piece.begin + piece.end) / 2 for piece in (left, right))
        (low, high), (last_low, last_high) = left.bounds_at(begin), right.bounds_at(end)
        ranges.append(((last_low - high) / (end - begin), (last_high - low) / (end - begin)))
    return min(ranges, key=lambda bounds: bounds[1] - bounds[0])
