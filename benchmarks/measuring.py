"""Pairs, controls and medians: how benchmarks compare a program with and without something switched on.

A round measures a block each of bare, bare again and switched on, in an order that changes from round to round. Values
are compared within a round: side/bare is the ratio, again/bare the control. Medians over the rounds are reported, so
that no outlier has to be removed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

PROCESSOR: Final = ", CPU time"
"""Ends the case of a row of processor time."""
PIECES: Final = ", where recorders run"
"""Ends the case of a row of processor time of the training thread in some pieces of a step (`operators`)."""
A_CALL: Final = ", a call"
"""Ends the case of a row of a call within a step."""


class Round(NamedTuple):
    """One measurement of each side, in the same unit."""

    bare: float
    again: float
    side: float


@dataclass(frozen=True)
class Row:
    """One result. Differences and ratios are medians over the rounds, and are not computed from `side` and `bare`.

    With an interval, a ratio is a trimmed mean instead (`interval_of`), and its difference follows from that.
    """

    case: str
    """What is measured."""
    name: str
    """What is switched on."""
    unit: str
    side: float
    """Median with it, while `bare` is the median without it. It is the only number if nothing was compared."""
    bare: float | None = None
    difference: float | None = None
    ratio: float | None = None
    control_difference: float | None = None
    """Bare again minus bare."""
    control: float | None = None
    """Bare again / bare: its distance from 1 is the noise of the run."""
    pairs: int | None = None
    difference_quartiles: tuple[float, float] | None = None
    """Lower and upper quartile of the differences."""
    ratio_quartiles: tuple[float, float] | None = None
    """Lower and upper quartile of the ratios."""
    ratio_interval: tuple[float, float] | None = None
    """95 % confidence interval of the ratio."""
    control_interval: tuple[float, float] | None = None
    """95 % confidence interval of the control."""


def compared(case: str, name: str, unit: str, rounds: Sequence[Round]) -> Row:
    """Return the row of at least two rounds."""
    differences = [times.side - times.bare for times in rounds]
    ratios = [times.side / times.bare for times in rounds]
    return Row(
        case,
        name,
        unit,
        side=statistics.median(times.side for times in rounds),
        bare=statistics.median(times.bare for times in rounds),
        difference=statistics.median(differences),
        ratio=statistics.median(ratios),
        control_difference=statistics.median(times.again - times.bare for times in rounds),
        control=statistics.median(times.again / times.bare for times in rounds),
        pairs=len(rounds),
        difference_quartiles=quartiles(differences),
        ratio_quartiles=quartiles(ratios),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and upper quartile of at least two values, by linear interpolation."""
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


STUDENT_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""97.5 % quantiles of Student's distribution by degrees of freedom from 1; for more, the last one is an upper bound."""
TRIMMED: Final = 5
"""One value in so many is left out of a trimmed mean at each end."""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    bounds: tuple[float, float]


def interval_of(values: Sequence[float]) -> Interval:
    """Return the interval of the trimmed mean of at least two independent values (Tukey and McLaughlin 1963).

    The variance is that of the values of which the smallest and largest ones are replaced by the next ones. Fewer than
    `TRIMMED` values are not trimmed: that is Student's interval of the mean.
    """
    ordered, count = sorted(values), len(values)
    out = count // TRIMMED
    kept = ordered[out : count - out]
    winsorized = [kept[0]] * out + kept + [kept[-1]] * out
    mean, freedom = statistics.mean(kept), len(kept) - 1
    error = statistics.stdev(winsorized) * math.sqrt(count) / len(kept)
    half = STUDENT_975[min(freedom, len(STUDENT_975)) - 1] * error
    return Interval(mean, (mean - half, mean + half))


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return the items in another order for each of the first numbers; each order comes equally often."""
    orders = list(itertools.permutations(items))
    return list(orders[number % len(orders)])


def in_turn(bare: Callable[[], T], side: Callable[[], T], rounds: int) -> list[tuple[T, T, T]]:
    """Measure rounds of bare, bare again and side. Six rounds have every order once, the same in all processes."""
    measured = []
    for number in range(rounds):
        values = {which: (bare, bare, side)[which]() for which in rotated(range(3), number)}
        measured.append((values[0], values[1], values[2]))
    return measured
