"""One host's clock from bounds on its difference from the reference's.

The difference is the corridor of all bounds (`corridors`), for rates that the bounds themselves imply. Bounds that do
not fit are one of three things:

    a jump              those before it agree, those after it agree, and no possible rate leads from one to the other
    a changing rate     any other disagreement that a rate up to MAX_RATE explains
    a contradiction     the rest: bounds at nearly the same time contradict each other; all are widened by as much
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array

from .corridors import MAX_RATE, RATE_SPREAD, UNBOUNDED, Bounds, Corridor, Rates

_MAX_SEARCHED: Final = 16
"""Number of windows in which jumps are searched; if more disagree, no jumps explain it."""
_MAX_JUMPS: Final = 3
"""Number of jumps in a window; if there were more, no jumps explain it."""


class ClockStep(NamedTuple):
    """A jump of a clock: reference times before and after it, and bounds on its size; ns."""

    after_ns: int
    before_ns: int
    smallest_ns: int
    largest_ns: int


class Contradiction(NamedTuple):
    """Bounds that no clock satisfies.

    Attributes:
        largest_ns: By how much a lower bound exceeds an upper one at most.
        calls: Number of calls whose bounds contradict others.
        widened_ns: By how much all bounds are widened.
    """

    largest_ns: int
    calls: int
    widened_ns: int


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
        half_width_ns: Half of the largest distance between the bounds at a call within `used_at`, except at jumps.
        calls: Calls of the host that gave bounds.
        steps: Jumps of the clock.
        rate_change: By how much its rate changed, at least, a fraction; 0 if a constant rate is possible.
        contradiction: What of its bounds no clock explains; None if one does.
    """

    at: Array
    lower: Array
    upper: Array
    used_at: tuple[int, int]
    drift: tuple[float, float]
    half_width_ns: float
    calls: int
    steps: Sequence[ClockStep] = ()
    rate_change: float = 0.0
    contradiction: Contradiction | None = None

    @property
    def is_odd(self) -> bool:
        """Whether the clock jumped, changed its rate by more than is assumed of any, or contradicts itself."""
        return bool(self.steps) or self.contradiction is not None or self.rate_change > RATE_SPREAD

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


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of the run without jumps: its bounds, and what they allow together.

    Attributes:
        bounds: All bounds.
        corridor: The corridor of the relevant ones.
        contradiction: What contradicted each other, before the bounds were widened.
    """

    bounds: Bounds
    corridor: Corridor
    contradiction: Contradiction | None = None

    @staticmethod
    def of(bounds: Bounds) -> _Piece:
        """Return the piece with these bounds, widened if they contradict each other."""
        relevant = bounds.relevant()
        rates = Rates.of(relevant)
        if rates.contradicted.any() and (contradiction := _contradiction(bounds, relevant)):
            piece = _Piece.of(bounds.widened(contradiction.widened_ns))
            return _Piece(piece.bounds, piece.corridor, contradiction)
        corridor = Corridor.of(relevant, rates)
        while corridor.contradiction > 0 and rates.spread.min() < MAX_RATE:  # over more than a window
            corridor = Corridor.of(relevant, rates := rates.widened(2))
        return _Piece(bounds, corridor)

    @property
    def begin(self) -> float:
        """Time of the first bound."""
        return float(self.bounds.at[0])

    @property
    def end(self) -> float:
        """Time of the last bound."""
        return float(self.bounds.at[-1])

    def at(self, at: Array) -> tuple[Array, Array]:
        """Return the lower and the upper bound at some times."""
        return self.corridor.bounds(at)

    def widths(self) -> Array:
        """Return the distances between the bounds at the calls, where both kinds are before and after."""
        at, upper = self.bounds.at, self.bounds.upper
        if upper.all() or not upper.any():
            return np.zeros(0)
        is_inside = (at >= max(at[upper][0], at[~upper][0])) & (at <= min(at[upper][-1], at[~upper][-1]))
        lower, higher = self.at(at[is_inside])
        return higher - lower

    def curves(self, begin: float, end: float) -> Array:
        """Return times and the lower and upper bounds, between which they are linear, shape (3, knots)."""
        at = self.corridor.knots(begin, end)
        return np.stack([at, *self.at(at)])


def clock_within(bounds: Bounds, origin: int, base: int, span: tuple[int, int]) -> AlignedClock | None:
    """Return the clock that satisfies bounds, whose times and values count from `origin` and `base`.

    None if the times of lower and upper bounds do not overlap.
    """
    both = bounds.at[bounds.upper], bounds.at[~bounds.upper]
    first, last = max(float(at[0]) for at in both), min(float(at[-1]) for at in both)
    if first > last:
        return None
    pieces = _pieces(bounds)
    at, lower, upper = np.concatenate([*_curves(pieces, span)], axis=1)
    at, distinct = np.unique(np.round(at), return_index=True)
    lower = np.maximum.accumulate(at + np.floor(lower[distinct])) - at
    upper = np.minimum.accumulate((at + np.ceil(upper[distinct]))[::-1])[::-1] - at
    widths = np.concatenate([piece.widths() for piece in pieces])
    widths = widths[widths < UNBOUNDED]
    return AlignedClock(
        origin + at.astype(np.int64),
        base + lower.astype(np.int64),
        base + upper.astype(np.int64),
        (origin + int(first), origin + int(last)),
        _drift(pieces),
        float(widths.max(initial=0)) / 2 if len(widths) else UNBOUNDED,
        len(np.unique(bounds.call)),
        [*_steps(pieces, origin)],
        _rate_change(pieces),
        _largest([piece.contradiction for piece in pieces if piece.contradiction]),
    )


def _pieces(bounds: Bounds) -> list[_Piece]:
    """Return the parts of a clock between jumps."""
    parts = [*_between_jumps(bounds)]
    pieces = [_Piece.of(parts[0])]
    for part in parts[1:]:
        right = _Piece.of(part)
        if _meet(pieces[-1], right):  # its rate changed
            first = int(np.searchsorted(bounds.at, pieces[-1].begin))
            right = _Piece.of(bounds.between(first, int(np.searchsorted(bounds.at, right.end, "right"))))
            pieces.pop()
        pieces.append(right)
    return pieces


def _between_jumps(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the bounds before, between and after possible jumps."""
    relevant = bounds.relevant()
    rates = Rates.of(relevant)
    disagree = np.flatnonzero(rates.contradicted)
    begin = -np.inf
    if 0 < len(disagree) <= _MAX_SEARCHED and relevant.count_contradictions() <= _MAX_SEARCHED:
        for before, after in _jumps(relevant, rates, disagree):
            if before < begin:
                continue
            yield bounds.rows((bounds.at >= begin) & (bounds.at <= before))
            begin = after
    yield bounds.rows(bounds.at >= begin)


def _jumps(bounds: Bounds, rates: Rates, windows: Array) -> Iterator[tuple[float, float]]:
    """Yield the times before and after each possible jump in some windows."""
    last = len(rates.edges) - 1
    stop = 0
    for window in windows.tolist():
        # A window overlaps the next one by half. What is before and after it shows whether a jump is enough.
        start = max(stop, int(np.searchsorted(bounds.at, rates.edges[max(window - 1, 0)])))
        end = int(np.searchsorted(bounds.at, rates.edges[min(window + 3, last)], "right"))
        part = bounds.between(start, end)
        found = [*islice(_find_jumps(part), _MAX_JUMPS + 1)]
        if len(found) <= _MAX_JUMPS:
            for before, after in found:
                yield float(part.at[before]), float(part.at[after])
                stop = start + after


def _find_jumps(bounds: Bounds) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices of bounds between which a function, otherwise of little change in its rate, jumped.

    The bounds from the first to the second index contradict each other, but those before the second do not. So the
    jump is between them, whatever follows.
    """
    first = 0

    def is_bent(begin: int, stop: int) -> bool:
        return stop - begin > 1 and Rates.of_all(bounds.between(begin, stop)).contradicted.item()

    while is_bent(first, len(bounds)):
        stop = first + 1 + bisect_left(range(first + 2, len(bounds) + 1), True, key=partial(is_bent, first))
        straight = bisect_left(range(stop - 1, first, -1), True, key=partial(is_bent, stop=stop + 1))
        yield stop - straight - 1, stop
        first = stop


def _meet(left: _Piece, right: _Piece) -> bool:
    """Return whether one piece may go on as the other."""
    at = np.array([left.end, right.begin])
    (lower, upper), (other_lower, other_upper) = left.at(at), right.at(at)
    return bool((np.maximum(lower, other_lower) <= np.minimum(upper, other_upper)).any())


def _contradiction(bounds: Bounds, relevant: Bounds) -> Contradiction | None:
    """Return what of some bounds no rate up to MAX_RATE explains."""
    corridor = Corridor.of(relevant, Rates.unknown(relevant))
    if corridor.contradiction <= 1:
        return None
    low, high = bounds.sides
    lower, upper = corridor.bounds(bounds.at)
    calls = np.unique(bounds.call[(low > upper) | (high < lower)])
    # Where clocks of one host differ, each is beyond the bounds from the others by up to the width of its own.
    widened = int(np.ceil(corridor.contradiction + bounds.smallest_width()))
    return Contradiction(int(np.ceil(corridor.contradiction)), len(calls), widened)


def _largest(contradictions: Sequence[Contradiction]) -> Contradiction | None:
    if not contradictions:
        return None
    largest = max(contradictions)
    return largest._replace(calls=sum(contradiction.calls for contradiction in contradictions))


def _curves(pieces: Sequence[_Piece], span: tuple[int, int]) -> Iterator[Array]:
    """Yield times and the lower and upper bounds of each piece, and between them, shape (3, knots)."""
    for number, piece in enumerate(pieces):
        begin, end = min(float(span[0]), piece.begin), max(float(span[1]), piece.end)
        if number:
            begin, before = piece.begin, pieces[number - 1].end
            if begin - before > 2:  # all that is known is that no clock runs backwards
                yield np.array([[before + 1, begin - 1], [-UNBOUNDED] * 2, [UNBOUNDED] * 2])
        yield piece.curves(begin, end if number + 1 == len(pieces) else piece.end)


def _steps(pieces: Sequence[_Piece], origin: int) -> Iterator[ClockStep]:
    for left, right in pairwise(pieces):
        at = np.array([left.end, right.begin])
        (left_low, left_high), (right_low, right_high) = left.at(at), right.at(at)
        # If the reference's clock jumped, the time between the two is shorter than it shows.
        grown = np.diff([piece.corridor.rates.integrals(at) for piece in (left, right)], axis=-1)
        smallest = np.floor(right_low[1] - left_high[0] - max(grown.max(), 0))
        largest = np.ceil(right_high[1] - left_low[0] - min(grown.min(), 0))
        yield ClockStep(origin + int(left.end), origin + int(right.begin), int(smallest), int(largest))


def _rate_change(pieces: Sequence[_Piece]) -> float:
    rates = [piece.corridor.rates for piece in pieces]
    return max(0.0, max(float(each.least.max()) for each in rates) - min(float(each.most.min()) for each in rates))


def _drift(pieces: Sequence[_Piece]) -> tuple[float, float]:
    """Return the smallest and largest mean rate between jumps, where they differ least."""
    return min((_mean_rate(piece) for piece in pieces), key=lambda bounds: bounds[1] - bounds[0])


def _mean_rate(piece: _Piece) -> tuple[float, float]:
    ends = np.array([piece.begin, piece.end])
    length = max(piece.end - piece.begin, 1)
    (lower, last_lower), (upper, last_upper) = piece.at(ends)
    slowest, fastest = (float(np.diff(integral)[0]) / length for integral in piece.corridor.rates.integrals(ends))
    return max(slowest, float(last_lower - upper) / length), min(fastest, float(last_upper - lower) / length)
