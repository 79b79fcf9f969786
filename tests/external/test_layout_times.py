"""Step times of Megatron jobs that others measured, predicted by closed forms from a fifth of the layouts.

    LAYOUT_TIMES=vTrain/data/ground_truth_multi.csv pytest -m external -s tests/external/test_layout_times.py

The table of vTrain (MICRO 2024, github.com/VIA-Research/vTrain) has the measured time of a step of four GPT models on
64 to 512 A100s, 8 to a node, in 109 layouts of tensor, data and pipeline parallelism. It is not part of this project.

A step takes m + p - 1 slots of a stage with one micro-batch (1F1B, m micro-batches, p stages; Narayanan et al. 2021,
arXiv 2104.04473, section 2.2), and one all_reduce of the gradients. A slot has

    computation    96 b s h^2 (L/p) (1 + s / 6h) + 6 b s h V FLOP (the same paper, section 5.1: with recomputation),
                   divided by t, at one rate; and, if `with_scores`, a time for each of the b a s^2 (L/p) / t attention
                   scores, which several operations write and read
    tensor         the all_reduces of `closed_forms.tensor_parallel`, 2 b s h bytes each
    pipeline       two messages of 2 b s h / t bytes

Communication takes what a described network (`commtrace.network.algorithms.cost`) says; nothing overlaps. The rates and
the latency and bandwidth of both levels of the network are the same for all four jobs, and are fitted to every fifth
row of the table, by the least mean absolute logarithm of predicted by measured time. Each of the five choices of rows
counts.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest

from commtrace.analyses.grouping import Array
from commtrace.network.algorithms import Level, cost
from commtrace.network.networks import hosts_of_group
from commtrace.theory.closed_forms import all_reduce, tensor_parallel

TABLE: Final = Path(os.environ.get("LAYOUT_TIMES", ""))
pytestmark = [
    pytest.mark.external,
    pytest.mark.skipif("LAYOUT_TIMES" not in os.environ, reason="LAYOUT_TIMES is not set"),
]

NODE: Final = 8
VOCABULARY: Final = 51_200
ELEMENT_BYTES: Final = 2
FOLDS: Final = 5
STARTS: Final = ((1.6e14, 2.4e14), (5e-11, 1e-11), (100.0, 250.0), (8.0, 15.0), (10.0,), (5.0,))
"""Values from which the search starts: FLOP/s, s per score, GB/s and us in a node, GB/s and us between nodes."""

SCORES: Final = 1
LIMITS: Final = {True: (8.0, 5), False: (13.5, 3)}
"""Largest mean error over all choices of rows, %, and in how many of them the layout that is ranked first is within 5 %
of the best one in each job. The goal, 8 % and all of them, is missed without a time for scores."""


class Call(NamedTuple):
    """Calls of one operation, payload and group."""

    op: str
    payload: int
    ranks: int
    hosts: int
    number: float


@dataclass(frozen=True)
class Layout:
    """A row of the table: a job and its layout."""

    job: str
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    stages: int
    seconds: float

    @property
    def slots(self) -> int:
        return self.batch // (self.data * self.micro_batch) + self.stages - 1

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence

    def flop(self) -> float:
        """Return the floating-point operations of a rank in a step, idle slots included."""
        own = self.layers / self.stages
        layers = 96 * self.tokens * self.hidden**2 * own * (1 + self.sequence / (6 * self.hidden))
        return (layers + 6 * self.tokens * self.hidden * VOCABULARY) / self.tensor * self.slots

    def scores(self) -> float:
        return self.tokens * self.heads * self.sequence * self.layers / self.stages / self.tensor * self.slots

    def calls(self) -> Iterator[Call]:
        elements, t, d = self.tokens * self.hidden, self.tensor, self.data
        if t > 1:
            own = Fraction(self.layers, self.stages)
            volume = tensor_parallel(self.micro_batch, self.sequence, self.hidden, own, t)
            count = float(volume / all_reduce(elements, t)) * self.slots
            yield Call("all_reduce", ELEMENT_BYTES * elements, t, hosts_of_group(t, 1, NODE), count)
        if d > 1:
            parameters = 12 * self.layers * self.hidden**2 / self.stages + VOCABULARY * self.hidden
            yield Call("all_reduce", round(ELEMENT_BYTES * parameters / t), d, hosts_of_group(d, t, NODE), 1)
        if self.stages > 1:
            hosts = hosts_of_group(2, t * d, NODE)
            yield Call("send_recv", ELEMENT_BYTES * elements // t, 2, hosts, 2 * self.slots)


def read() -> list[Layout]:
    with TABLE.open(encoding="utf-8-sig") as file:
        rows = [[*row.values()] for row in csv.DictReader(file)]
    names = [field.name for field in fields(Layout)][1:-1]
    return [
        Layout(job=row[0], seconds=float(row[11]) / 1e3, **dict(zip(names, map(int, row[2:11]), strict=True)))
        for row in rows
    ]


def predicted(rates: Array, layouts: Sequence[Layout]) -> Array:
    """Return the step of each layout, s, for the values of STARTS."""
    flop_per_s, score_s, intra_gb_per_s, inter_gb_per_s, intra_us, inter_us = rates.tolist()
    levels = Level(intra_us, intra_gb_per_s), Level(inter_us, inter_gb_per_s)
    return np.array(
        [
            layout.flop() / flop_per_s
            + layout.scores() * score_s
            + sum(call.number * cost(*call[:4], *levels).total_us / 1e6 for call in layout.calls())
            for layout in layouts
        ]
    )


def fitted(layouts: Sequence[Layout], *, with_scores: bool) -> Array:
    """Return the values of STARTS with the least mean absolute logarithm of predicted by measured time."""
    measured = np.array([layout.seconds for layout in layouts])

    def loss(rates: Array) -> float:
        return float(np.abs(np.log(predicted(rates, layouts) / measured)).mean())

    starts = [np.array(start) for start in itertools.product(*STARTS)]
    if not with_scores:
        starts = [start * (np.arange(len(start)) != SCORES) for start in starts]
    descents = [_descent(loss, start, 8) for start in starts]
    return _descent(loss, min(descents, key=loss), 60)


def _descent(loss: Callable[[Array], float], rates: Array, rounds: int) -> Array:
    """Return better values than `rates`: each one in turn is multiplied and divided by a factor that shrinks."""
    best, factors = loss(rates), np.full(len(rates), 1.5)
    for _ in range(rounds):
        for at in range(len(rates)):
            found = False
            for power in (1, -1):
                other = rates.copy()
                other[at] *= factors[at] ** power
                if (new := loss(other)) < best:
                    best, rates, found = new, other, True
                    break
            factors[at] = factors[at] if found else factors[at] ** 0.6
    return rates


@pytest.mark.parametrize("with_scores", [True, False])
def test_layouts_are_predicted_from_a_fifth_of_them(with_scores: bool) -> None:
    layouts = read()
    measured = np.array([layout.seconds for layout in layouts])
    numbers = np.arange(len(layouts))
    jobs = {job: np.flatnonzero([layout.job == job for layout in layouts]) for job in {row.job for row in layouts}}
    means, good = [], 0
    errors: list[tuple[float, Layout]] = []
    for fold in range(FOLDS):
        is_fitted = numbers % FOLDS == fold
        rates = fitted([layouts[at] for at in np.flatnonzero(is_fitted)], with_scores=with_scores)
        times = predicted(rates, layouts)
        error = 100 * (times / measured - 1)
        means.append(float(np.abs(error[~is_fitted]).mean()))
        first = {job: float(measured[own][times[own].argmin()] / measured[own].min() - 1) for job, own in jobs.items()}
        good += max(first.values()) <= 0.05
        errors += [(float(error[at]), layouts[at]) for at in np.flatnonzero(~is_fitted)]
        shown = {job: f"{100 * above:.1f} %" for job, above in sorted(first.items())}
        print(f"rows {fold} + 5n: mean error {means[-1]:.1f} %, ranked first above the best: {shown}, {rates}")
    for error_of_row, layout in sorted(errors, key=lambda item: -abs(item[0]))[:8]:
        print(f"  {error_of_row:+.1f} % {layout}")
    for job, own in sorted(jobs.items()):
        of_job = [abs(error_of_row) for error_of_row, layout in errors if layout.job == job]
        print(f"  {job}: {len(own)} layouts, mean {np.mean(of_job):.1f} %, median {np.median(of_job):.1f} %")
    every = np.abs([error_of_row for error_of_row, _ in errors])
    print(f"mean {np.mean(means):.2f} %, median {np.median(every):.2f} %, {good} of {FOLDS} rank all jobs within 5 %")
    most, least_good = LIMITS[with_scores]
    assert np.mean(means) <= most
    assert good >= least_good
