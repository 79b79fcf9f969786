"""Models through what was measured, and what they say of more ranks.

Amdahl's law (Amdahl 1967, doi:10.1145/1465482.1465560): the time of a step is s + p / n with n ranks, s what every rank
does whatever their number. Speedup over one rank then stays below (s + p) / s.

Latency and bandwidth (Hockney 1994, doi:10.1016/S0167-8191(06)80021-9): a call takes alpha + beta * bytes once all its
ranks are there; bytes are those that the rank must at least send. Fitted to calls of the run with the most ranks.

The projection puts the parts together: computation as c + d / n, the calls of a rank and its bytes by the law of growth
that the runs follow best, latency and bandwidth as fitted, and waiting for late ranks in proportion to both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.engine import Array

FURTHER: Final = (2, 4, 8)
"""Times the most ranks that were run."""

GOOD_FIT: Final = 0.25
"""A model that misses a run by more than this share is not used to look ahead."""

COLUMNS: Final = ["model", "parameter", "value", "unit", "error"]
PROJECTION: Final = [
    "ranks", "step_ns", "measured_ns", "speedup", "efficiency", "compute_ns", "latency_ns", "bandwidth_ns", "late_ns",
]  # fmt: skip


@dataclass(frozen=True)
class Division:
    """s + p / n."""

    fixed: float
    divided: float
    error: float | None
    """Largest relative difference from the points; None where they are too few to differ."""

    def __call__(self, ranks: float) -> float:
        """Return the time with this number of ranks."""
        return self.fixed + self.divided / ranks


@dataclass(frozen=True)
class Hockney:
    """alpha + beta * bytes, in ns."""

    alpha: float
    beta: float
    error: float
    """Mean relative difference, weighted by the time that calls of the size take."""


def division(ranks: Array, times: Array) -> Division:
    """The non-negative s and p with the least relative differences from points at two or more numbers of ranks."""
    best: tuple[float, float, float] | None = None
    for use in ((True, True), (True, False), (False, True)):
        columns = np.stack([np.ones(len(ranks)) / times, 1 / (ranks * times)], axis=1)[:, list(use)]
        solution, *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
        if (solution < 0).any():
            continue
        values = iter(solution)
        fixed, divided = (float(next(values)) if one else 0.0 for one in use)
        miss = float(np.sum((columns @ solution - 1) ** 2))
        if best is None or miss < best[0]:
            best = miss, fixed, divided
    assert best is not None  # either alone always has a solution: times are positive
    _, fixed, divided = best
    differences = np.abs((fixed + divided / ranks) / times - 1)
    return Division(fixed, divided, float(differences.max()) if len(set(ranks.tolist())) > 2 else None)


def hockney(messages: pd.DataFrame) -> Hockney | None:
    """Through the calls of one run; None where they have one size only, or none."""
    cells = messages.groupby(["op", "ranks", "bytes"], as_index=False)["transfer_ns"].agg(["median", "sum"])
    if cells["bytes"].nunique() < 2:
        return None
    times, weights = cells["median"].to_numpy(float), cells["sum"].to_numpy(float)
    root = np.sqrt(weights / weights.sum())
    columns = np.stack([np.ones(len(cells)), cells["bytes"].to_numpy(float)], axis=1) / times[:, None]
    best: tuple[float, float, float] | None = None
    for use in ([0, 1], [1], [0]):
        solution, *_ = np.linalg.lstsq(columns[:, use] * root[:, None], root, rcond=None)
        if (solution < 0).any():
            continue
        alpha, beta = (float(solution[use.index(at)]) if at in use else 0.0 for at in (0, 1))
        miss = float(np.sum((root * (columns @ np.array([alpha, beta]) - 1)) ** 2))
        if best is None or miss < best[0]:
            best = miss, alpha, beta
    assert best is not None
    _, alpha, beta = best
    error = float(np.sum(weights * np.abs(columns @ np.array([alpha, beta]) - 1)) / weights.sum())
    return Hockney(alpha, beta, error)


GROWTH: Final[dict[str, Callable[[float], float]]] = {
    "stays": lambda n: 1.0,
    "(n-1)/n": lambda n: (n - 1) / n,
    "1/n": lambda n: 1 / n,
    "n-1": lambda n: n - 1,
    "(n-1)/n^2": lambda n: (n - 1) / n**2,
    "log2(n)": lambda n: float(np.log2(n)),
}
"""How calls and bytes of a rank depend on the number of ranks: what collectives over all of them do."""


def growth(ranks: Array, values: Array) -> tuple[str, Callable[[float], float]]:
    """The law nearest to the points with more than one rank, and its function."""
    use = (ranks > 1) & (values > 0)
    if not use.any():
        return "stays", lambda n: float(values[-1])
    found: dict[str, tuple[float, float]] = {}
    for name, law in GROWTH.items():
        shape = np.array([law(float(n)) for n in ranks[use]])
        factor = float(np.mean(values[use] / shape))
        found[name] = float(np.max(np.abs(factor * shape / values[use] - 1))), factor
    name = min(found, key=lambda one: (round(found[one][0], 6), [*GROWTH].index(one)))
    law, factor = GROWTH[name], found[name][1]
    return name, lambda n: factor * law(n) if n > 1 else 0.0


def fitted(table: pd.DataFrame, messages: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`scaling_fits` and `scaling_projection` of the rows of `scaling`, which are by ranks."""
    ranks = table["ranks"].to_numpy(float)
    work = _work(table)
    whole = division(ranks, table["step_ns"].to_numpy(float) / work)
    rows: list[dict[str, Any]] = [
        _fit("Amdahl", "fixed", whole.fixed * work[0], "ns", whole.error),
        _fit("Amdahl", "divided", whole.divided * work[0], "ns", whole.error),
    ]
    if whole.fixed > 0:
        most = (whole.fixed + whole.divided) / whole.fixed
        rows.append(_fit("Amdahl", "most speedup over one rank", most, "", whole.error))
    last = table.iloc[-1]
    transfer = hockney(messages.loc[messages["run"] == last["run"]])
    if transfer is None or table["compute_ns"].isna().any() or table["wire_bytes"].isna().any():
        return pd.DataFrame(rows, columns=COLUMNS), pd.DataFrame([], columns=PROJECTION)
    rows.append(_fit("latency and bandwidth", "latency", transfer.alpha, "ns", transfer.error))
    bandwidth = 1 / transfer.beta if transfer.beta else None
    rows.append(_fit("latency and bandwidth", "bandwidth", bandwidth, "GB/s", transfer.error))
    laws = {name: growth(ranks, table[name].to_numpy(float)) for name in ("calls", "wire_bytes")}
    rows += [
        _fit("growth", name, None, law, _growth_error(ranks, table[name], rule)) for name, (law, rule) in laws.items()
    ]
    projection = _projected(table, work, transfer, {name: rule for name, (_, rule) in laws.items()})
    return pd.DataFrame(rows, columns=COLUMNS), projection


def _work(table: pd.DataFrame) -> Array:
    """Of a step, in units of the first run's."""
    tokens = table["tokens_per_step"]
    known: Array = (
        (tokens.astype(float) / float(tokens.iloc[0])).to_numpy() if tokens.notna().all() else np.ones(len(table))
    )
    return known


def _fit(model: str, parameter: str, value: float | None, unit: str, error: float | None) -> dict[str, Any]:
    return {"model": model, "parameter": parameter, "value": value, "unit": unit, "error": error}


def _growth_error(ranks: Array, values: pd.Series[Any], rule: Callable[[float], float]) -> float | None:
    known = [(rule(float(n)), float(value)) for n, value in zip(ranks, values, strict=True) if n > 1 and value]
    return max((abs(told / value - 1) for told, value in known), default=None) if len(known) > 1 else None


def _projected(
    table: pd.DataFrame, work: Array, transfer: Hockney, rules: dict[str, Callable[[float], float]]
) -> pd.DataFrame:
    """Of a step as large as that of the run with the most ranks, or, where steps grow with the ranks, growing on."""
    ranks = table["ranks"].to_numpy(float)
    grows = work[-1] / work[0] * ranks[0] / ranks[-1] > 0.5 and work[-1] != work[0]  # weak scaling
    compute = division(ranks, table["compute_ns"].to_numpy(float) / work)
    moved = table["calls"] * transfer.alpha + table["wire_bytes"] * transfer.beta
    late = float(table["late_ns"].iloc[-1] / moved.iloc[-1]) if moved.iloc[-1] else 0.0
    rows = []
    for n in [*dict.fromkeys(ranks), *(ranks[-1] * more for more in FURTHER)]:
        at = np.flatnonzero(ranks == n)
        load = float(work[at[0]]) if len(at) else float(work[-1] * (n / ranks[-1] if grows else 1))
        latency = rules["calls"](n) * transfer.alpha
        bandwidth = rules["wire_bytes"](n) * transfer.beta
        parts = {
            "compute_ns": compute(n) * load,
            "latency_ns": latency,
            "bandwidth_ns": bandwidth,
            "late_ns": late * (latency + bandwidth),
        }
        measured = float(table["step_ns"].iloc[at[0]]) if len(at) else None
        rows.append({"ranks": int(n), "load": load, "step_ns": sum(parts.values()), "measured_ns": measured, **parts})
    result = pd.DataFrame(rows)
    if float((result["step_ns"] / result["measured_ns"] - 1).abs().max()) > GOOD_FIT:
        result = result.loc[result["measured_ns"].notna()]
    rate = result["load"] / result["step_ns"]
    speedup = rate / rate.iloc[0]
    return result.assign(speedup=speedup, efficiency=speedup * ranks[0] / result["ranks"])[PROJECTION]
