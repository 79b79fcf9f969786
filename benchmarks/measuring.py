"""Pairs, controls and medians: how every benchmark here compares a program with and without something switched on.

Bare, bare again and switched on are measured in turn, a block each, in an order that changes from round to round. What
counts are the pairs of one round: side/bare is the ratio, again/bare the control. Medians over the rounds are reported,
so that nothing has to be left out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ORDERS = tuple(itertools.permutations(range(3)))


class Round(NamedTuple):
    """One measurement of each, in the same unit."""

    bare: float
    again: float
    side: float


@dataclass(frozen=True)
class Row:
    """One result. Differences and ratios are medians over the rounds, not quotients of the other medians."""

    case: str
    """What is measured ..."""
    name: str
    """... and what is switched on."""
    unit: str
    side: float
    """Median with it, and `bare` without it; where nothing was compared, this is the only number."""
    bare: float | None = None
    difference: float | None = None
    ratio: float | None = None
    control_difference: float | None = None
    """Bare again less bare, and ..."""
    control: float | None = None
    """... bare again divided by bare: how far from 1 the same thing comes out in the same run."""
    pairs: int | None = None
    difference_quartiles: tuple[float, float] | None = None
    """Lower and upper quartile of the differences ..."""
    ratio_quartiles: tuple[float, float] | None = None
    """... and of the ratios."""


def compared(case: str, name: str, unit: str, rounds: Sequence[Round]) -> Row:
    """The row of at least two rounds."""
    differences = [one.side - one.bare for one in rounds]
    ratios = [one.side / one.bare for one in rounds]
    return Row(
        case,
        name,
        unit,
        side=statistics.median(one.side for one in rounds),
        bare=statistics.median(one.bare for one in rounds),
        difference=statistics.median(differences),
        ratio=statistics.median(ratios),
        control_difference=statistics.median(one.again - one.bare for one in rounds),
        control=statistics.median(one.again / one.bare for one in rounds),
        pairs=len(rounds),
        difference_quartiles=quartiles(differences),
        ratio_quartiles=quartiles(ratios),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile of at least two values, by linear interpolation between them."""
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def in_turn(bare: Callable[[], T], side: Callable[[], T], rounds: int) -> list[tuple[T, T, T]]:
    """Measure so many rounds: bare, bare again, side. Six rounds have every order once; all processes have the same."""
    measured = []
    for number in range(rounds):
        order = ORDERS[number % len(ORDERS)]
        values = {which: (bare, bare, side)[which]() for which in order}
        measured.append((values[0], values[1], values[2]))
    return measured
