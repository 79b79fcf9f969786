"""The clock of one host as lines with jumps, from bounds on its difference from the reference's.

The difference is linear within windows of WINDOW_NS: its bounds in a window are those of all lines
within the corridor (`corridors`). Where there is no such line, the clock was stepped: the bounds
are split there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array

from .corridors import MAX_RATE, Bounds, Lines, find_jumps, lines_within

WINDOW_NS: Final = 10_000_000_000
"""Time in which the rate of a clock is constant, within RATE_TOLERANCE."""
RATE_TOLERANCE: Final = 5e-7
"""Largest deviation of a clock's rate from its mean in a window; the bounds are widened for it."""

_MIN_BOUNDS: Final = 32
_MAX_WINDOWS: Final = 500
_KNOTS: Final = 5
_UNBOUNDED: Final = 1e15
_ANY: Final = Lines(0.0, np.array([-np.inf, np.inf]), np.zeros(2))


class ClockStep(NamedTuple):
    """A jump of a clock: reference times before and after it, and bounds on its size; ns."""

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
        used_at: First and last time at which the bounds hold, ns of the reference's clock. Before
            and after them, all bounds are of one kind (lower or upper), which would not show a step
            of the clock.
        drift: Smallest and largest mean rate of the difference, a fraction.
        half_width_ns: Half of the largest distance between the bounds, except at jumps.
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


def reference_clock(first: int, last: int) -> AlignedClock:
    """Return the reference's own clock, with the first and last time of its calls."""
    zeros = np.zeros(2, np.int64)
    return AlignedClock(np.array([first, last + 1]), zeros, zeros, (first, last), (0.0, 0.0), 0.0, 0)


class _Piece(NamedTuple):
    """A part of the run in which a clock is linear, and whether it follows a jump."""

    begin: float
    end: float
    lines: Lines
    slack: float
    after_jump: bool

    def bounds(self, at: Array) -> tuple[Array, Array]:
        lower, upper = self.lines.bounds(at)
        return np.maximum(lower - self.slack, -_UNBOUNDED), np.minimum(upper + self.slack, _UNBOUNDED)

    def bounds_at(self, time: float) -> tuple[float, float]:
        lower, upper = self.bounds(np.array([time]))
        return float(lower[0]), float(upper[0])


def clock_within(bounds: Bounds, origin: int, base: int, span: tuple[int, int], calls: int) -> AlignedClock | None:
    """Return the clock that satisfies bounds, whose times and values count from `origin` and `base`.

    None if the times of lower and upper bounds do not overlap.
    """
    both = bounds.at[bounds.upper], bounds.at[~bounds.upper]
    first, last = max(float(at[0]) for at in both), min(float(at[-1]) for at in both)
    if first > last:
        return None
    pieces = _pieces(bounds)
    curves = [np.stack([at := np.linspace(piece.begin, piece.end, _KNOTS), *piece.bounds(at)]) for piece in pieces]
    widths = [float((upper - lower).max()) for _, lower, upper in curves]
    for number, piece in enumerate(pieces[1:], 1):
        left, right = curves[number - 1], curves[number]
        if piece.after_jump:  # in between, all that is known is that no clock runs backwards
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
        (origin + int(first), origin + int(last)),
        _drift(pieces),
        max((width for width in widths if width < _UNBOUNDED), default=_UNBOUNDED) / 2,
        calls,
        [*_steps(pieces, origin)],
    )


def _pieces(bounds: Bounds) -> list[_Piece]:
    """Return the linear parts of a clock: windows, between which it may jump."""
    end = len(bounds) - 1, len(bounds)
    pieces = [*_linear_pieces(bounds, [end])]
    if any(piece.lines is _ANY for piece in pieces) or not all(_meet(left, right) for left, right in pairwise(pieces)):
        pieces = [*_linear_pieces(bounds, [*_jumps(bounds), end])]
    for number, (left, right) in enumerate(pairwise(pieces)):
        if not right.after_jump and not _meet(left, right):  # a jump that no window shows
            pieces[number] = left._replace(end=(left.begin + left.end) / 2)
            pieces[number + 1] = right._replace(begin=(right.begin + right.end) / 2, after_jump=True)
    return pieces


def _linear_pieces(bounds: Bounds, jumps: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
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
    """Return disjoint pairs of indices of bounds between which the clock jumped."""
    jumps = set()
    for shift in (0.0, 0.5):  # windows that overlap by half
        for begin, end, start, stop in _windows(bounds, shift):
            slack = RATE_TOLERANCE * (end - begin) / 2
            jumps |= {(start + a, start + b) for a, b in find_jumps(bounds.between(start, stop), slack)}
    distinct: list[tuple[int, int]] = []
    for before, after in sorted(jumps):
        if distinct and before < distinct[-1][1]:
            distinct[-1] = distinct[-1][0], max(after, distinct[-1][1])
        else:
            distinct.append((before, after))
    return distinct


def _meet(left: _Piece, right: _Piece) -> bool:
    (left_low, left_high), (right_low, right_high) = left.bounds_at(right.begin), right.bounds_at(right.begin)
    return max(left_low, right_low) <= min(left_high, right_high)


def _windows(bounds: Bounds, shift: float = 0.0) -> Iterator[tuple[float, float, int, int]]:
    """Yield windows with enough bounds of both kinds: begin, end, and the indices of the bounds.

    Args:
        bounds: All bounds.
        shift: Fraction of a window by which all edges except the outer ones are moved.
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
            smallest, largest = np.floor(right_low - left_high - drift), np.ceil(right_high - left_low + drift)
            yield ClockStep(origin + int(left.end), origin + int(right.begin), int(smallest), int(largest))


def _drift(pieces: Sequence[_Piece]) -> tuple[float, float]:
    """Return the smallest and largest mean rate between jumps, where they differ least."""
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
