"""Bandwidth and latency that hide communication, for dry runs: before a job has run, and without a network.

In the graphs of both bounds of a step (`layout_graph`), the transfers of a row of the table take what a described
network predicts for them, and all others take no time. The exposed share is the part of the step by which it exceeds
the step without transfers. A step is the maximum over paths of sums of delays, hence convex and piecewise linear in the
time for a byte and in the latency: Newton's method finds where a share is reached.

Wire bytes are the least that any algorithm must send (`commtrace.volume`); a bandwidth is that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import (
    TableSpec,
    bytes_column,
    column,
    count,
    duration,
    share,
    text_column,
    word_column,
)
from commtrace.formatting import format_count, is_known
from commtrace.network.algorithms import CARRIED_OUT_AS, IF_ONE_IS_LATE
from commtrace.network.networks import open_network

from .changed_run import REMARKS, wire_bytes_of_calls
from .layout_graph import LayoutGraph, bounds
from .layouts import NOT_SIMULATED, Rate, rate_sentence, stated_rate
from .simulated_step import SimulatedStep, simulated_step

EXPOSED_TARGETS: Final = (0.2, 0.1, 0.05)
ALL: Final = "all"
BEST, WORST = "best", "worst"
_LATENCY: Final = "latency_ns"
_SHOWN_LATENCY: Final = 0.1
"""The exposed share whose latencies are printed."""
_SPEEDS: Final = np.logspace(-6, 8, 113, base=2)
"""Bandwidths of a curve, as multiples of the one with which the longest transfers of a rank take the whole step."""
_AT_ONCE: Final = 8
"""Bandwidths whose events are computed at a time: they limit memory."""
_MOST: Final = 1e18
"""ns for a byte, or of latency, above which none is too long."""
_CHORD: Final = 1e-6
_PRECISION: Final = 1e-9
_MAX_ITERATIONS: Final = 200


def _name(bound: str, share: float, unit: str = "gb_per_s") -> str:
    return f"{bound}_{round(100 * share)}_{unit}"


def format_bandwidth(gb_per_s: float) -> str:
    """Format GB/s with three digits; "-" if not known."""
    return f"{gb_per_s:.3g}" if is_known(gb_per_s) else "-"


_BOUNDS: Final = ((BEST, "all is hidden that dependencies allow"), (WORST, "nothing is hidden"))
_COLUMNS: Final = (
    shared.ROLE,
    text_column("purpose", "purpose", 'Why the library made the calls; "all": for any.', shortenable=True),
    count("calls_per_rank", "calls/step", "Calls of a step per simulated rank.", optional=True),
    bytes_column("wire_bytes_per_rank", "wire (min)/step", "Their wire bytes; missing unless known for every call."),
    *(
        column("GB/s", format_bandwidth, _name(bound, target), f"{target:.0%} {bound}",
            f"For {target:.0%} exposed if {meaning}.", optional=target == min(EXPOSED_TARGETS))
        for target in EXPOSED_TARGETS
        for bound, meaning in _BOUNDS
    ),
    *(
        duration(_name(bound, target, _LATENCY), f"latency {target:.0%} {bound}",
            f"Latency of a message with which {target:.0%} is exposed at unlimited bandwidth, if {meaning}; missing if "
            "no latency is too long.", optional=True)
        for target in EXPOSED_TARGETS
        for bound, meaning in _BOUNDS
    ),
)  # fmt: skip
BANDWIDTH_BOUNDS: Final = TableSpec("bandwidth_bounds", "Bandwidth of a rank that hides communication, GB/s",
    "A row for each dimension and each of its purposes, and for all of them. For each exposed share of a step, the "
    "bandwidth in the best case (all is hidden that dependencies allow), and in the worst (nothing is), if all other "
    "transfers took no time; missing if latency alone takes too long, or if a size is not known.", _COLUMNS,
    views=dict.fromkeys(("terminal", "page"), " ".join(own.name for own in _COLUMNS
        if not own.name.endswith(_LATENCY) or f"_{round(100 * _SHOWN_LATENCY)}_" in own.name)),
)  # fmt: skip
EXPOSED_BY_BANDWIDTH: Final = TableSpec("exposed_by_bandwidth", "Exposed share by bandwidth",
    "Rows for each dimension, and for all of them.", (
    word_column("dimension", "dimension", 'Parallel dimension; "all": of all dimensions at once.'),
    column("GB/s", format_bandwidth, "gb_per_s", "GB/s", "Bandwidth of a rank for these transfers."),
    share("exposed_low", "exposed from", "Part of the step that they then are, if all is hidden that dependencies "
        "allow."),
    share("exposed_high", "to", "The same if nothing is hidden."),
))  # fmt: skip


def required_bandwidth(
    run: AnalysedRun,
    *,
    rate: float | None = None,
    computation_s: float | None = None,
    calibrate: AnalysedRun | None = None,
    latency_s: float = 0.0,
) -> dict[str, pd.DataFrame]:
    """Return the tables `bandwidth_bounds` and `exposed_by_bandwidth` of a dry run.

    Args:
        run: The dry run.
        rate: Floating-point operations by second that a rank reaches.
        computation_s: Instead: seconds for which a rank computes in a step.
        calibrate: Instead: a recorded run of this layout, whose rate is measured.
        latency_s: Latency of a message, s.

    Returns:
        The tables; `attrs["remarks"]` of the first has sentences on what they assume.

    Raises:
        CommtraceError: It is no dry run, lacks a complete step, or not exactly one of the speeds is given.
    """
    step = simulated_step(run)
    speed = stated_rate([step], rate, computation_s, calibrate)
    graphs = bounds(step)
    computation = step.flops / speed.flops_per_s * 1e9
    at_1_gb_per_s, with_latency = (
        step.transfer_ns({"": open_network(f"1GB/s+{latency}us")}) for latency in (0, 1)
    )  # fmt: skip
    messages = (with_latency - at_1_gb_per_s) / 1e3
    wire = wire_bytes_of_calls(run, step.calls, np.arange(len(step.calls)), step.calls["payload"])
    rows, curves = [], []
    for role, purpose, own in _groups(step):
        is_known_time = not np.isnan(at_1_gb_per_s[own]).any()
        row: dict[str, Any] = {
            "role": role, "purpose": purpose, "calls_per_rank": int(own.sum()) / len(run.processes),
            "wire_bytes_per_rank": float(wire[own].sum()) / len(run.processes),
        }  # fmt: skip
        if is_known_time:
            parts = (np.where(own, values, 0.0) for values in (at_1_gb_per_s, messages))
            transfers = _Transfers(step, graphs, computation, *parts)
            row |= transfers.required(latency_s * 1e9)
            curves += [transfers.curve(role, latency_s * 1e9)] if purpose == ALL else []
        rows.append(row)
    table = pd.DataFrame(rows, columns=BANDWIDTH_BOUNDS.column_names)
    table.attrs[REMARKS] = [*_sentences(step, speed, latency_s)]
    columns = EXPOSED_BY_BANDWIDTH.column_names
    curve = pd.concat(curves, ignore_index=True) if curves else pd.DataFrame([], columns=columns)
    return {BANDWIDTH_BOUNDS.name: table, EXPOSED_BY_BANDWIDTH.name: curve[columns]}


def _groups(step: SimulatedStep) -> Iterator[tuple[str, str, Array]]:
    """Yield dimension, purpose and calls of each row, the largest payload first; purposes if there are several."""
    calls = step.calls
    roles, purposes = (calls.text(column).astype(str) for column in ("role", "purpose"))
    sums = pd.Series(calls["payload"].astype(float)).groupby([roles, purposes]).sum()
    sums = sums.sort_values(ascending=False, kind="stable")
    of_roles = sums.groupby(level=0).sum().sort_values(ascending=False, kind="stable")
    if len(of_roles) > 1:
        yield ALL, ALL, np.ones(len(calls), bool)
    for role in of_roles.index:
        yield str(role), ALL, roles == role
        of_role = [purpose for other, purpose in sums.index if other == role]
        for purpose in of_role * (len(of_role) > 1):
            yield str(role), purpose, (roles == role) & (purposes == purpose)


@dataclass(frozen=True, eq=False)
class _Transfers:
    """A step with the transfers of a row alone.

    Attributes:
        step: The step.
        graphs: Its bounds.
        computation_ns: Computation before each call, shape (calls,).
        ns_at_1_gb_per_s: Time of each transfer for its bytes, ns, shape (calls,).
        messages: Latencies of messages that each one has, shape (calls,).
    """

    step: SimulatedStep
    graphs: tuple[LayoutGraph, LayoutGraph]
    computation_ns: Array
    ns_at_1_gb_per_s: Array
    messages: Array

    def step_ns(self, graph: LayoutGraph, ns_per_byte: Array, latency_ns: Array) -> Array:
        """Return the duration of a step, ns, shape (n,), for times of a byte and latencies of shape (n,)."""
        parts = []
        for first in range(0, len(ns_per_byte), _AT_ONCE):
            of_byte, latency = (values[first : first + _AT_ONCE, None] for values in (ns_per_byte, latency_ns))
            transfers = self.ns_at_1_gb_per_s * of_byte + self.messages * latency
            parts.append(graph.step_ns(graph.graph.times(graph.delays(self.computation_ns, transfers))))
        return np.concatenate(parts)

    def alone_ns(self, graph: LayoutGraph) -> float:
        """Return the duration of a step without transfers, ns."""
        return float(self.step_ns(graph, np.zeros(1), np.zeros(1))[0])

    def required(self, latency_ns: float) -> dict[str, float | None]:
        """Return the columns of bandwidths and latencies of the row."""
        row: dict[str, float | None] = {}
        for (bound, _), graph in zip(_BOUNDS, self.graphs, strict=True):
            by_byte = partial(self._by_byte, graph, latency_ns)
            by_latency = partial(self._by_latency, graph)
            alone_ns = self.alone_ns(graph)
            for target in EXPOSED_TARGETS:
                longest_ns = alone_ns / (1 - target)
                ns_per_byte, latency = largest(by_byte, longest_ns), largest(by_latency, longest_ns)
                row[_name(bound, target)] = None if ns_per_byte is None else 1 / ns_per_byte
                row[_name(bound, target, _LATENCY)] = latency if latency is not None and latency < np.inf else None
        return row

    def _by_byte(self, graph: LayoutGraph, latency_ns: float, ns_per_byte: Array) -> Array:
        return self.step_ns(graph, ns_per_byte, np.full(len(ns_per_byte), latency_ns))

    def _by_latency(self, graph: LayoutGraph, latency_ns: Array) -> Array:
        return self.step_ns(graph, np.zeros(len(latency_ns)), latency_ns)

    def curve(self, role: str, latency_ns: float) -> pd.DataFrame:
        """Return the rows of `exposed_by_bandwidth` of a dimension."""
        transfers = np.bincount(self.step.calls["process"], self.ns_at_1_gb_per_s).max()
        gb_per_s = _SPEEDS * transfers / self.alone_ns(self.graphs[0])
        gb_per_s = gb_per_s[gb_per_s > 0]
        low, high = (
            1 - self.alone_ns(graph) / self._by_byte(graph, latency_ns, 1 / gb_per_s) for graph in self.graphs
        )  # fmt: skip
        return pd.DataFrame({"dimension": role, "gb_per_s": gb_per_s, "exposed_low": low, "exposed_high": high})


def largest(step_ns: Callable[[Array], Array], longest_ns: float) -> float | None:
    """Return the largest x >= 0 with step_ns(x) <= longest_ns; None: there is none, infinity: all of them.

    Args:
        step_ns: Convex, piecewise linear and not falling, for x of shape (n,).
        longest_ns: A value of it.
    """
    high = 1.0
    at_zero, at_high = step_ns(np.array([0.0, high]))
    if at_zero > longest_ns:
        return None
    while at_high <= longest_ns:
        high *= 4
        if high > _MOST:
            return float("inf")
        (at_high,) = step_ns(np.array([high]))
    x = high
    # Right of the solution, the next x of Newton's method is not left of it, but for the length of the chord that is
    # taken for the tangent.
    for _ in range(_MAX_ITERATIONS):
        before = _CHORD * x
        left, here = step_ns(np.array([x - before, x]))
        if here <= longest_ns * (1 + _PRECISION):
            break
        x -= (here - longest_ns) * before / (here - left)
    return float(x)


def _sentences(step: SimulatedStep, rate: Rate, latency_s: float) -> Iterator[str]:
    yield (
        f"Latency of a message: {format_count(round(latency_s * 1e6, 3))} us. Each bandwidth is of one rank in one "
        "direction, and reached by all calls; real libraries send more than the least bytes. A row is for its own "
        "transfers, as if all others took no time."
    )
    made = {*zip(step.calls.text("op").astype(str), step.calls.per_call(step.calls.expected).tolist(), strict=True)}
    for (backend, op), carried_out in CARRIED_OUT_AS.items():
        if step.backend == backend and op in {own for own, _ in made}:
            yield f"{backend} sends a {op} as an {carried_out}; the wire bytes are the least possible ones."
    for (backend, op, ranks), factor in IF_ONE_IS_LATE.items():
        if step.backend == backend and (op, ranks) in made:
            yield f"{backend}'s {op} among {ranks} ranks takes {factor:g} times as long as its bytes, as one is late."
    yield f"{rate_sentence(rate)}."
    if len(step.run.processes) < (step.run.world_size or 0):
        yield NOT_SIMULATED
