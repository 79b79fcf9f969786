"""Fits of latency and bandwidth to measured times: t = alpha + beta * bytes, for each operation and group.

**Bytes** are those of busbw (`bench_operations.bus_bytes`), so that 1 / beta is the bus bandwidth of large messages,
comparable between operations and group sizes (R. W. Hockney, The communication challenge for MPP, Parallel
Computing 20, 1994, for two processes; Thakur, Rabenseifner and Gropp 2005, doi:10.1177/1094342005051521, for many).

**Robustness.** The fit minimises squared relative residuals (fit / measured - 1) with Huber weights, so that outliers
count less. Residuals are relative because times span four orders of magnitude. Neither alpha nor beta is negative. The
median over rounds is fitted.

**Pieces.** Libraries switch protocols with the size, and messages outgrow caches. A fit has one piece (a latency and a
bandwidth, from some size on), or up to five if they lower the mean held-out error by at least a tenth of it and one
percentage point. Five pieces are enough for an eager and a rendezvous protocol and three levels of memory. The last
level may begin at 32 MiB and contain only two sizes, so a piece has at least two.

**Corrections.** No number of lines fits what a rate limiter with bursts does to small messages, or a library with many
protocols. Times between measured sizes are then those of the pieces, times the ratio of measured to fitted times at the
sizes next to them, interpolated linearly in the logarithms. A size is corrected only if that more than halves the
held-out error of it and its neighbors: noise of single sizes is not.

**Held-out error.** The error of a fit is measured on sizes that it was not fitted to: each size in turn is left out,
everything, including the bounds of the pieces, is fitted to the others, and the size that was left out is predicted.

The pieces are found by dynamic programming over sums for all ranges of sizes at once, in numpy. A general solver
(scipy's least_squares with its Huber loss) would fit one piece between given bounds, and need the same search around
it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .bench_operations import bus_bytes
from .measuring import BenchRow

Array = npt.NDArray[np.float64]

_MAX_PIECES: Final = 5
_MIN_PIECE_SIZES: Final = 2
"""Minimum number of sizes of a piece."""
_MAX_ERROR_RATIO: Final = 0.9
_MIN_ERROR_DECREASE: Final = 0.01
"""More pieces must lower the mean held-out error to this ratio, and by this difference."""
_MAX_CORRECTED_RATIO: Final = 0.4
"""A correction must lower the held-out error of a size and its neighbors to this ratio, and by the same difference."""
_HUBER_THRESHOLD: Final = 1.5
_ITERATIONS: Final = 4


@dataclass(frozen=True)
class Piece:
    """A piece of a fit, from a payload on: a latency, and microseconds per bus byte."""

    from_bytes: int
    alpha_us: float
    beta_us_per_byte: float


@dataclass(frozen=True)
class Fit:
    """The fit of one operation and group.

    `sizes` is the number of fitted sizes. The held-out errors are relative; None: too few sizes to leave one out.
    `corrections` has measured / fitted time of each payload, 1 where the pieces alone are as good; empty: all are.
    """

    op: str
    ranks: int
    hosts: int
    sizes: int
    least_bytes: int
    most_bytes: int
    pieces: tuple[Piece, ...]
    held_out_median: float | None
    held_out_worst: float | None
    held_out_worst_bytes: int | None
    corrections: tuple[tuple[int, float], ...] = ()

    def time_us(self, payload: int) -> float:
        """Return the expected microseconds of a call."""
        fitted = _time_of(self.pieces, payload, float(bus_bytes(self.op, payload, self.ranks)))
        return fitted * _correction(self.corrections, payload) if self.corrections else fitted

    @property
    def latency_us(self) -> float:
        """Latency of the smallest messages."""
        return self.pieces[0].alpha_us

    @property
    def busbw_gb_per_s(self) -> float | None:
        """Bus bandwidth of the largest messages; None if the time does not depend on the size."""
        beta = self.pieces[-1].beta_us_per_byte
        return None if not beta else 1e-3 / beta


def _piece_at(pieces: Sequence[Piece], payload: float) -> Piece:
    return next((piece for piece in reversed(pieces) if piece.from_bytes <= payload), pieces[0])


def _correction(corrections: Sequence[tuple[float, float]], payload: float) -> float:
    """Return the ratio at a payload; outside of the measured payloads, that of the nearest one."""
    sizes, ratios = np.array(corrections).T
    return float(np.exp(np.interp(np.log(max(payload, 1.0)), np.log(np.maximum(sizes, 1.0)), np.log(ratios))))


def fit_operations(rows: Iterable[BenchRow]) -> tuple[Fit, ...]:
    """Return a fit of each operation and group, in the order of the rows."""
    by_group: dict[tuple[str, int, int], dict[int, BenchRow]] = {}
    for row in rows:
        by_group.setdefault((row.op, row.ranks, row.hosts), {})[row.payload_bytes] = row
    return tuple(fit(op, ranks, hosts, [*by_size.values()]) for (op, ranks, hosts), by_size in by_group.items())


def fit(op: str, ranks: int, hosts: int, rows: Sequence[BenchRow]) -> Fit:
    """Fit the rows of one operation and group: one or more, of different sizes."""
    rows = sorted(rows, key=lambda row: row.payload_bytes)
    payload = np.array([row.payload_bytes for row in rows], float)
    bus = np.asarray(bus_bytes(op, payload, ranks), float)
    times = np.array([max(row.median_us, 1e-6) for row in rows])
    begin, end = int(payload[0]), int(payload[-1])
    if len(rows) < 3:  # too few to fit and leave one out
        return Fit(op, ranks, hosts, len(rows), begin, end, _fit_pieces(payload, bus, times, 1), None, None, None)
    pieces, (errors, corrected_errors) = 1, _held_out_errors(payload, bus, times, 1)
    for more_pieces in range(2, min(_MAX_PIECES, (len(rows) - 1) // _MIN_PIECE_SIZES) + 1):
        new_errors, new_corrected_errors = _held_out_errors(payload, bus, times, more_pieces)
        if _is_lower(new_errors, errors, _MAX_ERROR_RATIO):
            pieces, errors, corrected_errors = more_pieces, new_errors, new_corrected_errors
    fitted = _fit_pieces(payload, bus, times, pieces)
    corrections: list[tuple[int, float]] = []
    corrected = [
        _is_lower(corrected_errors[near], errors[near], _MAX_CORRECTED_RATIO) for near in _neighborhoods(len(rows))
    ]
    if any(corrected):
        errors = np.where(corrected, corrected_errors, errors)
        ratios = _corrections(fitted, payload, bus, times)
        corrections = [(int(size), ratio if own else 1.0) for own, (size, ratio) in zip(corrected, ratios, strict=True)]
    worst = int(errors.argmax())
    median, highest = float(np.median(errors)), float(errors[worst])
    return Fit(
        op, ranks, hosts, len(rows), begin, end, fitted, median, highest, int(payload[worst]), tuple(corrections)
    )  # fmt: skip


def _neighborhoods(count: int) -> Iterator[slice]:
    """Yield the positions of each size and its neighbors."""
    for at in range(count):
        yield slice(max(at - 1, 0), at + 2)


def _is_lower(errors: Array, than: Array, ratio: float) -> bool:
    """Return whether held-out errors are lower by enough to justify more numbers."""
    return bool(errors.mean() < min(ratio * than.mean(), than.mean() - _MIN_ERROR_DECREASE))


def _held_out_errors(payload: Array, bus: Array, times: Array, pieces: int) -> Array:
    """Return the relative errors of each size, predicted from the others: by the pieces, and corrected; (2, sizes)."""
    errors = np.empty((2, len(times)))
    for left_out in range(len(times)):
        kept = np.arange(len(times)) != left_out
        fitted = _fit_pieces(payload[kept], bus[kept], times[kept], pieces)
        time = _time_of(fitted, payload[left_out], bus[left_out])
        correction = _correction(_corrections(fitted, payload[kept], bus[kept], times[kept]), payload[left_out])
        errors[:, left_out] = abs(time / times[left_out] - 1), abs(time * correction / times[left_out] - 1)
    return errors


def _corrections(fitted: Sequence[Piece], payload: Array, bus: Array, times: Array) -> list[tuple[float, float]]:
    """Return measured / fitted time of each payload."""
    expected = (_time_of(fitted, size, own) for size, own in zip(payload, bus, strict=True))
    return [(float(size), float(time / of)) for size, time, of in zip(payload, times, expected, strict=True)]


def _time_of(fitted: Sequence[Piece], payload: float, bus: float) -> float:
    piece = _piece_at(fitted, payload)
    return float(max(piece.alpha_us + piece.beta_us_per_byte * bus, 1e-6))


def _fit_pieces(payload: Array, bus: Array, times: Array, pieces: int) -> tuple[Piece, ...]:
    """Fit pieces by least squares of relative residuals, with weights from the residuals of the previous fit."""
    weights = np.ones(len(times))
    fitted: tuple[Piece, ...] = ()
    for _ in range(_ITERATIONS):
        begins, alphas, betas = _optimal_pieces(bus, times, weights, pieces)
        number = np.searchsorted(begins, np.arange(len(times)), side="right") - 1
        residuals = (alphas[number] + betas[number] * bus) / times - 1
        fitted = tuple(
            Piece(int(payload[begin]), float(alpha), float(beta))
            for begin, alpha, beta in zip(begins, alphas, betas, strict=True)
        )
        scale = 1.4826 * statistics.median(abs(residuals))  # the standard deviation, for normally distributed residuals
        if scale < 1e-9:
            break
        weights = np.minimum(1.0, _HUBER_THRESHOLD * scale / np.maximum(abs(residuals), 1e-12))
    return fitted


def _optimal_pieces(bus: Array, times: Array, weights: Array, pieces: int) -> tuple[tuple[int, ...], Array, Array]:
    """Return the index of the first size, alpha and beta of each piece, with the least sum of squares."""
    alpha, beta, cost = _piece_costs(bus, times, weights)
    count = len(times)
    length = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None]
    cost = np.where(length >= (_MIN_PIECE_SIZES if pieces > 1 else 1), cost, np.inf)
    least, came_from = cost[0], []  # cost of the best pieces up to each size; one piece more in each iteration
    for _ in range(pieces - 1):
        through = least[:, None] + cost
        came_from.append(through.argmin(axis=0))
        least = through.min(axis=0)
    bounds = [count]
    for before in reversed(came_from):
        bounds.insert(0, int(before[bounds[0]]))
    begins = (0, *bounds[:-1])
    return begins, alpha[begins, bounds], beta[begins, bounds]


def _piece_costs(bus: Array, times: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Return alpha, beta and cost of a piece over sizes i to j - 1, as [i, j], for all i and j at once.

    The sum of w (alpha / t + beta b / t - 1)^2 is quadratic in both; sums over sizes are differences of running sums.
    """
    unit = max(float(bus.max()), 1.0)
    ones, slopes = 1 / times, bus / unit / times

    products = np.array([ones * ones, ones * slopes, slopes * slopes, ones, slopes, np.ones(len(times))])
    running = np.cumsum(np.pad(weights * products, ((0, 0), (1, 0))), axis=1)
    aa, ab, bb, a, b, n = running[:, None, :] - running[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = aa * bb - ab * ab
        alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        flat = ~np.isfinite(alpha) | ~np.isfinite(beta) | (determinant < 1e-9 * aa * bb) | (beta < 0)
        alpha, beta = np.where(flat, a / aa, alpha), np.where(flat, 0.0, beta)
        steep = alpha < 0
        alpha, beta = np.where(steep, 0.0, alpha), np.where(steep, b / bb, beta)
    cost = n - 2 * (alpha * a + beta * b) + alpha**2 * aa + 2 * alpha * beta * ab + beta**2 * bb
    return alpha, beta / unit, np.where(np.isfinite(cost), cost, np.inf)
