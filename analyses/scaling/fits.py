"""Models of the measured times, and their projection to more ranks.

Amdahl's law (Amdahl 1967, doi:10.1145/1465482.1465560): a step takes s + p / n on n ranks; s does not depend on n.
The speedup over one rank then stays below (s + p) / s.

Latency and bandwidth (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9): a call takes alpha + beta * bytes from the
arrival of its last rank; bytes are the wire bytes of the rank. The model is fitted to the calls of the run with
the most ranks.

The projection is the sum of computation, c + d / n; communication, from the fitted latency and bandwidth and from the
law of growth with the smallest error for calls and bytes; and waiting for late ranks, which grows as the expected
maximum of so many values, and with the computation that varies (`more_ranks`, as in `commtrace whatif --world-size`).

Each fit has at most two non-negative parameters and needs only numpy, so that it works in a bare installation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from commtrace.analyses.grouping import Array, rows_of
from commtrace.analyses.more_ranks import expected_maximum

from .scaling_specs import SCALING_FITS, SCALING_PROJECTION

PROJECTED_FACTORS: Final = (2, 4, 8)
"""Multiples of the largest number of ranks among the runs."""

MAX_ERROR: Final = 0.25
"""Largest relative difference from a measured run at which the model is still projected to more ranks."""


class AmdahlFit(NamedTuple):
    """A time of `fixed` + `divided` / ranks."""

    fixed: float
    divided: float
    error: float | None
    """Largest relative difference from the points; None if they are too few to differ."""

    def __call__(self, ranks: float) -> float:
        """Return the time on this number of ranks."""
        return self.fixed + self.divided / ranks


class HockneyFit(NamedTuple):
    """A call time of `alpha` + `beta` * bytes, in ns."""

    alpha: float
    beta: float
    error: float
    """Mean relative difference, weighted by the time that calls of each size take."""


def fit_amdahl(ranks: Array, times: Array) -> AmdahlFit:
    """Fit s + p / n with the least relative differences.

    Args:
        ranks: Numbers of ranks, float, shape (n,), two or more distinct ones.
        times: Positive times, float, shape (n,).
    """
    fixed, divided, ratios = _fit_relative(1 / ranks, times, np.ones(len(times)))
    return AmdahlFit(fixed, divided, float(np.abs(ratios - 1).max()) if len({*ranks}) > 2 else None)


def fit_hockney(messages: pd.DataFrame) -> HockneyFit | None:
    """Fit the calls of one run (`step_times.StepTimes.messages`); return None if they have fewer than two sizes."""
    sizes = messages.groupby(["op", "ranks", "bytes"], as_index=False)["transfer_ns"].agg(["median", "sum"])
    if sizes["bytes"].nunique() < 2:
        return None
    weights = (sizes["sum"] / sizes["sum"].sum()).to_numpy(float)
    alpha, beta, ratios = _fit_relative(sizes["bytes"].to_numpy(float), sizes["median"].to_numpy(float), weights)
    return HockneyFit(alpha, beta, float(np.sum(weights * np.abs(ratios - 1))))


def _fit_relative(x: Array, y: Array, weights: Array) -> tuple[float, float, Array]:
    """Fit a + b * x to y with a, b >= 0 and the least weighted squares of relative differences; return a, b, fit/y."""
    columns = np.stack([1 / y, x / y], axis=1)
    root = np.sqrt(weights)
    best, least = np.zeros(2), np.inf
    for used in ([0, 1], [0], [1]):  # with either parameter alone there is always a solution: x and y are positive
        solution = np.zeros(2)
        solution[used] = np.linalg.lstsq(columns[:, used] * root[:, None], root, rcond=None)[0]
        squares = float(np.sum((root * (columns @ solution - 1)) ** 2))
        if (solution >= 0).all() and squares < least:
            best, least = solution, squares
    return float(best[0]), float(best[1]), columns @ best


GROWTH: Final[dict[str, Callable[[float], float]]] = {
    "stays": lambda n: 1.0,
    "(n-1)/n": lambda n: (n - 1) / n,
    "1/n": lambda n: 1 / n,
    "n-1": lambda n: n - 1,
    "(n-1)/n^2": lambda n: (n - 1) / n**2,
    "log2(n)": lambda n: float(np.log2(n)),
}
"""How calls and bytes of a rank depend on the number of ranks in collectives over all ranks."""


class GrowthFit(NamedTuple):
    """A law of GROWTH and its factor."""

    law: str
    factor: float
    error: float | None
    """Largest relative difference from the points with more than one rank; None if there is only one."""

    def __call__(self, ranks: float) -> float:
        """Return the value on this number of ranks; a single rank sends nothing."""
        return self.factor * GROWTH[self.law](ranks) if ranks > 1 else 0.0


def fit_growth(ranks: Array, values: Array) -> GrowthFit:
    """Return the law of GROWTH that best fits the positive values, shape (n,), at more than one rank."""
    used = (ranks > 1) & (values > 0)
    fits = []
    for law, function in GROWTH.items():
        shape = np.array([function(float(n)) for n in ranks[used]])
        factor = float(np.mean(values[used] / shape)) if used.any() else 0.0
        error = float(np.max(np.abs(factor * shape / values[used] - 1), initial=0))
        fits.append(GrowthFit(law, factor, error if used.sum() > 1 else None))
    return min(fits, key=lambda fit: round(fit.error or 0.0, 6))


def fit_runs(table: pd.DataFrame, messages: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return `scaling_fits` and `scaling_projection`.

    Args:
        table: The table `scaling`, its rows in the order of ranks.
        messages: The messages of all runs (`step_times.StepTimes`) with a column `run`.
    """
    ranks = table["ranks"].to_numpy(float)
    tokens = table["tokens_per_step"]
    # The work of each run's step, relative to the first run.
    work = (tokens.astype(float) / float(tokens.iloc[0])).to_numpy() if tokens.notna().all() else np.ones(len(table))
    amdahl = fit_amdahl(ranks, table["step_ns"].to_numpy(float) / work)
    rows: list[tuple[str, str, float | None, str, float | None]] = [
        ("Amdahl", "fixed", amdahl.fixed * work[0], "ns", amdahl.error),
        ("Amdahl", "divided", amdahl.divided * work[0], "ns", amdahl.error),
    ]
    if amdahl.fixed > 0:
        limit = (amdahl.fixed + amdahl.divided) / amdahl.fixed
        rows.append(("Amdahl", "most speedup over one rank", limit, "", amdahl.error))
    projection = pd.DataFrame([], columns=SCALING_PROJECTION.column_names)
    hockney = fit_hockney(messages.loc[messages["run"] == table["run"].iloc[-1]])
    if hockney is not None and (table["compute_ns"] > 0).all() and table["wire_bytes"].notna().all():
        bandwidth = 1 / hockney.beta if hockney.beta else None
        growth = {name: fit_growth(ranks, table[name].to_numpy(float)) for name in ("calls", "wire_bytes")}
        rows += [
            ("latency and bandwidth", "latency", hockney.alpha, "ns", hockney.error),
            ("latency and bandwidth", "bandwidth", bandwidth, "GB/s", hockney.error),
            *(("growth", name, None, fit.law, fit.error) for name, fit in growth.items()),
        ]
        projection = _project(table, work, hockney, growth)
    return pd.DataFrame(rows, columns=SCALING_FITS.column_names), projection


def _project(table: pd.DataFrame, work: Array, hockney: HockneyFit, growth: dict[str, GrowthFit]) -> pd.DataFrame:
    """Return `scaling_projection` for steps like the last run's. If work grows with the ranks, it keeps growing."""
    ranks = table["ranks"].to_numpy(float)
    grows = work[-1] / work[0] * ranks[0] / ranks[-1] > 0.5 and work[-1] != work[0]  # weak scaling
    compute = fit_amdahl(ranks, table["compute_ns"].to_numpy(float) / work)
    last = table.iloc[-1]
    variation = expected_maximum(int(ranks[-1])) * compute(ranks[-1]) * work[-1]
    late = float(last["late_ns"] / variation) if variation else 0.0
    measured = {
        float(row.ranks): (float(load), row.step_ns) for row, load in zip(rows_of(table[::-1]), work[::-1], strict=True)
    }
    rows = []
    for n in [*dict.fromkeys(ranks), *(ranks[-1] * factor for factor in PROJECTED_FACTORS)]:
        load, measured_ns = measured.get(n, (float(work[-1] * (n / ranks[-1] if grows else 1)), None))
        latency, bandwidth = growth["calls"](n) * hockney.alpha, growth["wire_bytes"](n) * hockney.beta
        parts = {
            "compute_ns": compute(n) * load,
            "latency_ns": latency,
            "bandwidth_ns": bandwidth,
            "late_ns": late * expected_maximum(int(n)) * compute(n) * load,
        }
        rows.append(
            {"ranks": int(n), "load": load, "step_ns": sum(parts.values()), "measured_ns": measured_ns, **parts}
        )
    result = pd.DataFrame(rows)
    if float((result["step_ns"] / result["measured_ns"] - 1).abs().max()) > MAX_ERROR:
        result = result.loc[result["measured_ns"].notna()]
    rate = result["load"] / result["step_ns"]
    speedup = rate / rate.iloc[0]
    result = result.assign(speedup=speedup, efficiency=speedup * ranks[0] / result["ranks"])
    return result[SCALING_PROJECTION.column_names]
