"""Corridors: what bounds at some times say about a function whose rate varies little, at any time.

If the rate lies between `lowest` and `highest`, a bound at one time is also a bound at any other: it grows by the rate
times the distance. The corridor is what all bounds allow together. All steps are cumulative minima and maxima, so their
cost is proportional to the number of bounds, whatever the values are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from commtrace.analyses.grouping import Array

MAX_RATE: Final = 5e-3
"""Largest drift of a clock that is considered: 5,000 ppm, far more than any oscillator has."""
RATE_SPREAD: Final = 5e-6
"""By how much rates within SPREAD_NS may differ: daemons that keep clocks change their rates by a few ppm at a time."""
SPREAD_NS: Final = 64e9

UNBOUNDED: Final = 1e15
"""Value of a bound that is not known, ns: eleven days."""

_WINDOW_NS: Final = 32e9
_MIN_BOUNDS: Final = 12
_FEW: Final = 16
_ITERATIONS: Final = 12


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds on a function of time, sorted by time: `value` at `at`, float64; upper if `upper`; from `call`."""

    at: Array
    value: Array
    upper: Array
    call: Array

    def __len__(self) -> int:
        return len(self.at)

    def between(self, first: int, stop: int) -> Bounds:
        """Return the bounds with indices from `first` to `stop`, exclusive."""
        return self.rows(slice(first, stop))

    def rows(self, at: Array | slice) -> Bounds:
        """Return some of the bounds."""
        return Bounds(self.at[at], self.value[at], self.upper[at], self.call[at])

    def widened(self, by: float) -> Bounds:
        """Return bounds that allow values beyond these."""
        return Bounds(self.at, self.value + np.where(self.upper, by, -by), self.upper, self.call)

    @property
    def sides(self) -> tuple[Array, Array]:
        """Lower and upper bound at each time, infinite where there is none."""
        return np.where(self.upper, -np.inf, self.value), np.where(self.upper, self.value, np.inf)

    def smallest_width(self) -> float:
        """Return the smallest distance between the two bounds of a call, 0 if none gave two."""
        calls, number = np.unique(self.call, return_inverse=True)
        low, high = np.full((2, len(calls)), np.inf)
        np.minimum.at(high, number[self.upper], self.value[self.upper])
        np.minimum.at(low, number[~self.upper], self.value[~self.upper])
        both = np.isfinite(low) & np.isfinite(high)
        return max(float((high - low)[both].min(initial=np.inf)), 0.0) if both.any() else 0.0

    def count_contradictions(self) -> int:
        """Return how many times a few bounds in a row contradict each other, whatever the rate is up to MAX_RATE."""
        rows = np.minimum(np.arange(0, len(self), _FEW)[:, None] + np.arange(_FEW), len(self) - 1)
        low, high = (side[rows] for side in self.sides)
        tilt = MAX_RATE * (self.at[rows] - self.at[rows[:, :1]])
        later = low - tilt - np.minimum.accumulate(high - tilt, axis=1)
        earlier = low + tilt - np.minimum.accumulate((high + tilt)[:, ::-1], axis=1)[:, ::-1]
        return int((np.maximum(later, earlier).max(axis=1) > 1).sum())

    def relevant(self) -> Bounds:
        """Return the bounds that do not follow from others, whatever the rate is up to MAX_RATE."""
        low, high = self.sides
        tilt = MAX_RATE * (self.at - self.at[0])
        kept = low + tilt >= np.maximum.accumulate(low + tilt)
        kept &= low - tilt >= np.maximum.accumulate((low - tilt)[::-1])[::-1]
        is_upper = high - tilt <= np.minimum.accumulate(high - tilt)
        is_upper &= high + tilt <= np.minimum.accumulate((high + tilt)[::-1])[::-1]
        return self.rows(np.flatnonzero(np.where(self.upper, is_upper, kept)))


def steepest(at: Array, low: Array, high: Array) -> Array:
    """Return the largest rate that bounds imply, at least -MAX_RATE, a row at a time.

    It is the maximum of (low[i] - high[j]) / (at[i] - at[j]) over all j before i: the mean rate between the two is at
    least that. Newton's iteration (Dinkelbach 1967) finds it in a few passes.

    Args:
        at: Times, ascending in each row, shape (rows, n).
        low: Lower bounds at these times, -inf: none.
        high: Upper bounds, inf: none.
    """
    rate = np.full(len(at), -MAX_RATE)
    at = at - at[:, :1]
    rows, numbers = np.arange(len(at)), np.arange(at.shape[1])
    for _ in range(_ITERATIONS):
        tilt = rate[rows, None] * at
        raised = high - tilt
        smallest = np.minimum.accumulate(raised, axis=1)
        excess = low - tilt - smallest
        last = excess.argmax(axis=1)
        each = np.arange(len(rows))
        found = np.flatnonzero(excess[each, last] > 0)
        if not len(found):
            break
        rows, at, low, high, last = rows[found], at[found], low[found], high[found], last[found]
        each = np.arange(len(rows))
        is_before = numbers < last[:, None]
        first = np.where(is_before & (raised[found] == smallest[found][each, last][:, None]), numbers, 0).max(axis=1)
        rate[rows] = (low[each, last] - high[each, first]) / np.maximum(at[each, last] - at[each, first], 1)
    return rate


class Rates(NamedTuple):
    """Rates of a function in windows: each of shape (windows,), but `edges`, (windows + 1,).

    Attributes:
        edges: Begin of each window, and the end of the last one.
        least: The mean rate was at least this at some time in the window (-MAX_RATE: not known).
        most: The mean rate was at most this at some time in the window (MAX_RATE: not known).
        spread: By how much the rates in the window may differ.
    """

    edges: Array
    least: Array
    most: Array
    spread: Array

    @staticmethod
    def of(bounds: Bounds) -> Rates:
        """Return the rates that bounds imply in windows of a sensible length, which overlap by half."""
        wanted = round((bounds.at[-1] - bounds.at[0]) / _WINDOW_NS)
        return Rates._in_windows(bounds, max(min(wanted, len(bounds) // _MIN_BOUNDS), 1))

    @staticmethod
    def of_all(bounds: Bounds) -> Rates:
        """Return the rates that bounds imply in one window."""
        return Rates._in_windows(bounds, 1)

    @staticmethod
    def unknown(bounds: Bounds) -> Rates:
        """Return all rates that are considered, over the time of bounds."""
        return Rates(bounds.at[[0, -1]], *np.array([[-MAX_RATE], [MAX_RATE], [0.0]]))

    @staticmethod
    def _in_windows(bounds: Bounds, windows: int) -> Rates:
        count, end = len(bounds), bounds.at[-1]
        size = -(-count // windows)
        firsts = np.arange(0, count, size)
        width = min(size + size // 2, count)
        rows = np.minimum(firsts, count - width)[:, None] + np.arange(width)
        low, high = bounds.sides
        at, low, high = bounds.at[rows], low[rows], high[rows]
        most = -steepest(-at[:, ::-1], low[:, ::-1], high[:, ::-1])
        spread = RATE_SPREAD * np.ceil(np.maximum(at[:, -1] - at[:, 0], 1) / SPREAD_NS)
        return Rates(np.append(bounds.at[firsts], end), steepest(at, low, high), most, spread)

    @property
    def contradicted(self) -> Array:
        """Whether the rates in each window differ by more than `spread`."""
        return np.asarray(self.least - self.most > self.spread)

    def widened(self, factor: float) -> Rates:
        """Return rates that may differ by more."""
        return self._replace(spread=self.spread * factor)

    def integrals(self, at: Array) -> tuple[Array, Array]:
        """Return the integrals of the lowest and the highest possible rate until some times."""
        # All rates lie within `spread` of each other, and some within [most, least] or [least, most].
        margin = np.maximum(self.spread, (self.least - self.most) * 1.5)
        sums = []
        for rate in (np.maximum(self.least - margin, -MAX_RATE), np.minimum(self.most + margin, MAX_RATE)):
            ends = np.concatenate([[0.0], np.cumsum(rate * np.diff(self.edges))])
            outside = rate[0] * np.minimum(at - self.edges[0], 0) + rate[-1] * np.maximum(at - self.edges[-1], 0)
            sums.append(np.interp(at, self.edges, ends) + outside)
        return sums[0], sums[1]


def _largest(low: Array, slow: Array, fast: Array) -> tuple[Array, Array]:
    """Return the largest lower bound at each time that follows from all, and whether it is the one at that time.

    A bound holds later plus the integral of the lowest rate (`slow`), and earlier minus that of the highest (`fast`).
    """
    before = np.maximum.accumulate(low - slow)
    after = np.maximum.accumulate((low - fast)[::-1])[::-1]
    return np.maximum(before + slow, after + fast), (low - slow >= before) & (low - fast >= after)


@dataclass(frozen=True, eq=False)
class Corridor:
    """Bounds on a function, from all bounds on it: those at some times; it may change in between with `rates`.

    Attributes:
        at: Times from which all others follow, ascending.
        lower: The lower bound at each.
        upper: The upper bound.
        rates: Possible rates.
        contradiction: By how much a lower bound exceeds an upper one; negative if none does.
    """

    at: Array
    lower: Array
    upper: Array
    rates: Rates
    contradiction: float

    @staticmethod
    def of(bounds: Bounds, rates: Rates) -> Corridor:
        """Return the corridor of bounds."""
        low, high = bounds.sides
        slow, fast = rates.integrals(bounds.at)
        (lower, binds), (upper, also_binds) = _largest(low, slow, fast), _largest(-high, -fast, -slow)
        lower, upper = np.maximum(lower, -UNBOUNDED), np.minimum(-upper, UNBOUNDED)
        binding = binds | also_binds
        binding[[0, -1]] = True
        kept = np.flatnonzero(binding)
        return Corridor(bounds.at[kept], lower[kept], upper[kept], rates, float((lower - upper).max()))

    def bounds(self, at: Array) -> tuple[Array, Array]:
        """Return the lower and the upper bound at any times, shape (n,)."""
        after = np.searchsorted(self.at, at)
        left, right = np.maximum(after - 1, 0), np.minimum(after, len(self.at) - 1)
        (slow, fast), (own_slow, own_fast) = self.rates.integrals(at), self.rates.integrals(self.at)
        is_after, is_before = at >= self.at[left], at <= self.at[right]
        low = np.where(is_after, self.lower[left] + slow - own_slow[left], -np.inf)
        low = np.maximum(low, np.where(is_before, self.lower[right] + fast - own_fast[right], -np.inf))
        high = np.where(is_after, self.upper[left] + fast - own_fast[left], np.inf)
        high = np.minimum(high, np.where(is_before, self.upper[right] + slow - own_slow[right], np.inf))
        return low, high

    def knots(self, begin: float, end: float) -> Array:
        """Return the times between which both bounds are linear, from `begin` to `end`."""
        at = np.unique(np.concatenate([self.at, self.rates.edges, [begin, end]]))
        at = at[(at >= begin) & (at <= end)]
        slow, fast = self.rates.integrals(at)
        lower, upper = self.bounds(at)
        width = np.maximum(np.diff(fast) - np.diff(slow), 1e-9)
        # Between two times, a bound grows from the first one, and falls to the second.
        parts = (
            (np.diff(upper) - np.diff(slow)) / width,
            (np.diff(fast) - np.diff(lower)) / width,
        )
        bends = [at[:-1] + np.clip(part, 0, 1) * np.diff(at) for part in parts]
        return np.unique(np.concatenate([at, *bends]))
