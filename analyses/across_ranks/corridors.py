"""Corridors: the straight lines between lower and upper bounds, and jumps where there is none.

The lines `offset + rate * (at - center)` within a corridor form a convex polygon in the plane of
offset and rate. Only the corners of the bounds' convex hulls limit it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from commtrace.analyses.grouping import Array

MAX_RATE: Final = 5e-3
"""Largest drift of a clock that is considered: 5,000 ppm, far more than any oscillator has."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds on a function of time, sorted by time: `value` at `at`, float64; upper if `upper`."""

    at: Array
    value: Array
    upper: Array

    def __len__(self) -> int:
        return len(self.at)

    def between(self, first: int, stop: int) -> Bounds:
        """Return the bounds with indices from `first` to `stop`, exclusive."""
        return Bounds(self.at[first:stop], self.value[first:stop], self.upper[first:stop])


@dataclass(frozen=True, eq=False)
class Lines:
    """All lines within a corridor: the corners of their polygon, as offsets at `center` and rates, shape (corners,)."""

    center: float
    offset: Array
    rate: Array

    def bounds(self, at: Array) -> tuple[Array, Array]:
        """Return the lowest and the highest value of any of the lines at some times, both of shape (n,)."""
        values = self.offset + self.rate * (at[:, None] - self.center)
        return values.min(axis=1), values.max(axis=1)


def lines_within(bounds: Bounds, slack: float = 0.0) -> Lines | None:
    """Return the lines that violate no bound by more than `slack`; None if there is none.

    For each rate, the offset lies between the largest lower and the smallest upper bound, both
    minus `rate * (at - center)`. They are piecewise linear in the rate, and bend at the rates of
    the hulls' edges. Without bounds of a kind, offsets are infinite.
    """
    center = float(bounds.at[0] + bounds.at[-1]) / 2
    at = bounds.at - center
    above = _hull(at[bounds.upper], -(bounds.value[bounds.upper] + slack))
    below = _hull(at[~bounds.upper], bounds.value[~bounds.upper] - slack)
    edges = [np.diff(value) / np.diff(times) * sign for (times, value), sign in ((above, -1), (below, 1))]
    rates = np.unique(np.concatenate([[-MAX_RATE, MAX_RATE], *edges]).clip(-MAX_RATE, MAX_RATE))

    def offset_range(rates: Array) -> tuple[Array, Array]:
        """Return the lowest and the highest offset at each rate."""
        low = (below[1] - rates[:, None] * below[0]).max(axis=1, initial=-np.inf)
        high = (-above[1] - rates[:, None] * above[0]).min(axis=1, initial=np.inf)
        return low, high

    low, high = offset_range(rates)
    possible = np.flatnonzero(high >= low)
    if not len(possible):
        return None
    first, last = int(possible[0]), int(possible[-1])
    ends = [_root(rates, high - low, outside, inside) for outside, inside in ((first - 1, first), (last + 1, last))]
    rates = np.concatenate([rates[first : last + 1], [rate for rate in ends if rate is not None]])
    low, high = offset_range(rates)
    return Lines(center, np.concatenate([low, np.maximum(low, high)]), np.concatenate([rates, rates]))


def _root(rates: Array, width: Array, outside: int, inside: int) -> float | None:
    """Return the rate between two at which the width, linear there, is 0; None at the end of all rates."""
    if not 0 <= outside < len(rates):
        return None
    part = width[inside] / (width[inside] - width[outside])
    return float(rates[inside] + (rates[outside] - rates[inside]) * part)


def _hull(at: Array, value: Array) -> tuple[Array, Array]:
    """Return the corners of the upper convex hull of points, `at` ascending, from left to right."""
    if not len(at):
        return at, value
    first = np.flatnonzero(np.concatenate([[True], at[1:] > at[:-1]]))
    at, value = at[first], np.maximum.reduceat(value, first)
    while len(at) > 2:
        # A point below the line through its neighbours is not a corner, whether or not they are.
        left, right = at[1:-1] - at[:-2], at[2:] - at[1:-1]
        corner = np.ones(len(at), bool)
        corner[1:-1] = (value[1:-1] - value[:-2]) * right > (value[2:] - value[1:-1]) * left
        if corner.all():
            break
        at, value = at[corner], value[corner]
    return at, value


def find_jumps(bounds: Bounds, slack: float) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices of bounds between which an otherwise linear function jumped.

    The bounds from the first to the second index contradict each other, but those before the
    second do not. So the jump is between them, whatever follows.
    """
    first = 0

    def is_bent(begin: int, stop: int) -> bool:
        return lines_within(bounds.between(begin, stop), slack) is None

    while is_bent(first, len(bounds)):
        stop = first + 1 + bisect_left(range(first + 2, len(bounds) + 1), True, key=partial(is_bent, first))
        straight = bisect_left(range(stop - 1, first, -1), True, key=partial(is_bent, stop=stop + 1))
        yield stop - straight - 1, stop
        first = stop
