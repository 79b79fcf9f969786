"""Steps of jobs that have not run, from dry runs, a described or measured network, and the speed of their computation.

Each dry run is one layout: a world size, parallel dimensions, sizes of buckets, types. What a rank computes in a step
follows from its floating-point operations at one rate for all layouts: a stated one, the one with which the first
layout computes as long as stated, or that of a recorded run. The step lies between two bounds (`layout_graph`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.across_ranks.matching import MatchedCalls
from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.grouping import Array, group_rows, rows_of
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, column, count, duration, share, text_column
from commtrace.errors import CommtraceError, LogError
from commtrace.network import NetworkError
from commtrace.network.networks import Network, open_network
from commtrace.schema import ROLES

from .changed_run import ReplayedRun, replayed_run
from .critical_parts import critical_parts, largest_parts
from .layout_graph import LayoutGraph, bounds
from .recorded_graph import Part
from .simulated_step import SimulatedStep

LAYOUTS: Final = TableSpec("layouts", "Steps of layouts", "A row per dry run, the shortest step for equal batches "
    "first, by the middle of its bounds.", (
    shared.RUN,
    count("ranks", "ranks", "World size.", optional=True),
    count("simulated_ranks", "", "Ranks that were simulated.", optional=True),
    column("ratio", lambda ratio: f"{ratio:.3g}x", "batch", "batch",
        "What a step trains on, relative to the first dry run: by the floating-point operations of forward."),
    duration("computation_ns", "computation", "Computation of a step, of the simulated rank that computes longest."),
    duration("transfer_ns", "transfers", "Sum of the transfers of a rank in a step, of the rank with the largest sum."),
    duration("low_ns", "step from", "Duration of a step if all is hidden that dependencies allow; measured networks: "
        "with transfers shorter by the error of the fit."),
    duration("high_ns", "to", "Duration if nothing is hidden, likewise longer."),
    share("exposed_low", "exposed from", "Part of the first of these steps that would be saved if transfers took no "
        "time."),
    share("exposed_high", "to", "Part of the second one likewise."),
    text_column("limits", "limited by", "Largest parts of the critical path, if all is hidden that can be; then, if "
        "nothing is.", shortenable=True),
))  # fmt: skip
LAYOUT_TRANSFERS: Final = TableSpec("layout_transfers", "Transfers of layouts",
    "A row per dry run, dimension and purpose, the longest transfers first.", (
    shared.RUN, shared.ROLE,
    text_column("purpose", "purpose", "Why the library made the calls.", shortenable=True),
    count("calls_per_rank", "calls/step", "Calls of a step per simulated rank."),
    duration("transfer_ns", "transfers", "Sum of their transfers per simulated rank; missing unless the network "
        "predicts all of them."),
    duration("exposed_low_ns", "exposed from", "What the step would save without them, if all is hidden that "
        "dependencies allow."),
    duration("exposed_high_ns", "to", "What it would save if nothing is hidden."),
))  # fmt: skip
TABLES: Final = (LAYOUTS, LAYOUT_TRANSFERS)

VALIDATED_RANKS: Final = 4
"""World size up to which predictions were held to real runs (docs/explanation/replay.md)."""
NOT_SIMULATED: Final = "Ranks that were not simulated count as the simulated ones of their groups."
_EQUAL_BATCH: Final = 1.02
"""Ratio of operations of forward up to which batches count as equal."""


@dataclass(frozen=True)
class Rate:
    """Floating-point operations of a rank by second, and a sentence on where they come from."""

    flops_per_s: float
    source: str


def networks_of(texts: Sequence[str]) -> dict[str, Network]:
    """Return the network of each dimension, "": of all others, from texts such as "ib.json" and "tensor:450GB/s+2us".

    Raises:
        CommtraceError: A text is no network, or that of all others is missing.
    """
    networks: dict[str, Network] = {}
    for text in texts:
        role, _, name = text.partition(":")
        role, name = (role, name) if name and role in ROLES else ("", text)
        if role in networks:
            raise CommtraceError(f"--network {text}: another network is given for {role or 'all dimensions'}")
        try:
            networks[role] = open_network(name)
        except NetworkError as error:
            raise CommtraceError(str(error)) from None
    if "" not in networks:
        raise CommtraceError("the network is missing: --network NET, such as --network 100GB/s+5us")
    return networks


def stated_rate(
    steps: Sequence[SimulatedStep],
    rate: float | None,
    computation_s: float | None,
    calibrate: AnalysedRun | None,
) -> Rate:
    """Return how fast ranks compute, from one of three statements; the others are None.

    Args:
        steps: Steps of dry runs.
        rate: Floating-point operations by second that a rank reaches.
        computation_s: Seconds for which a rank of the first dry run computes in a step.
        calibrate: A recorded run of the layout of one of the dry runs, whose rate is measured.

    Raises:
        CommtraceError: Not exactly one is given, it is not above 0, or the run is of another layout.
    """
    if sum(value is not None for value in (rate, computation_s, calibrate)) != 1:
        raise CommtraceError("dry runs: state how fast ranks compute, by one of rate, computation_s and calibrate")
    if calibrate is not None:
        return rate_of_run(replayed_run(calibrate), steps)
    if rate is not None:
        if not rate > 0:
            raise CommtraceError(f"dry runs: a rate of {rate:g} operations by second; it must be above 0")
        return Rate(rate, "as stated")
    if not (computation_s or 0) > 0:
        raise CommtraceError(f"dry runs: a computation of {computation_s:g} s; it must be above 0")
    return rate_of_computation(steps[0], float(computation_s or 0))


def rate_of_computation(step: SimulatedStep, seconds: float) -> Rate:
    """Return the rate with which the rank of a step that computes most takes so many seconds."""
    rate = max(step.flops_of_ranks.values()) / seconds
    return Rate(rate, f"a rank of the first dry run computes for {seconds * 1e3:g} ms in a step")


def rate_of_run(recorded: ReplayedRun, steps: Sequence[SimulatedStep]) -> Rate:
    """Return the rate of a recorded run, whose layout is that of one of the dry runs.

    Raises:
        LogError: No dry run makes its calls.
    """
    path, replay = recorded.run.log.path, recorded.replay
    step = next((step for step in steps if _has_layout_of(step, recorded)), None)
    if step is None:
        raise LogError(
            f"{path}: no dry run makes the calls of its steps; add a dry run of the same program, world size and "
            "options, from which its floating-point operations are known"
        )
    edges = recorded.gaps.edges[recorded.gaps.gap]
    sums = np.zeros((len(replay.paths.processes), len(replay.paths.steps)))
    np.add.at(sums, (replay.process[edges], replay.step[edges]), replay.delays[edges].clip(min=0))
    median_ns = dict(zip(recorded.ranks(), np.median(sums, axis=1).tolist(), strict=True))
    flops = step.flops_of_ranks
    seconds = sum(median_ns[rank] for rank in flops) / 1e9
    if seconds <= 0:
        raise LogError(f"{path}: its ranks do not compute between their calls")
    return Rate(sum(flops.values()) / seconds, f"measured in {path.name} between the calls of a step")


def _has_layout_of(step: SimulatedStep, recorded: ReplayedRun) -> bool:
    """Return whether the ranks of a dry run make the calls of the last replayed step of a run."""
    run, paths = recorded.run, recorded.replay.paths
    if step.run.world_size != run.world_size:
        return False
    own = {process.rank: number for number, process in enumerate(run.processes)}
    calls = paths.calls.rows(np.flatnonzero(paths.calls["step"] == paths.steps[-1]))
    return all(
        _counted(calls, own[process.rank]) == _counted(step.calls, number)
        for number, process in enumerate(step.run.processes)
    )


def _counted(calls: MatchedCalls, process: int) -> Counter[tuple[str, int]]:
    own = calls.of_process(process)
    return Counter(zip(calls.text("op", own).tolist(), calls["payload"][own].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class _Layout:
    """A step of a dry run with its delays: computation and transfers of calls, ns, shape (calls,)."""

    name: str
    step: SimulatedStep
    graphs: tuple[LayoutGraph, LayoutGraph]
    computation: Array
    transfer: Array
    factors: tuple[float, float]
    """Of transfers, in the two bounds: 1 unless a network has an error."""
    groups: Array
    """Number of each call's dimension and purpose."""
    examples: Array
    """A call of each."""

    def per_process(self, values: Array) -> Array:
        """Return the sum over the calls of each process, shape (processes,)."""
        return np.bincount(self.step.calls["process"], values)


def predicted_layouts(
    steps: Mapping[str, SimulatedStep], networks: Mapping[str, Network], rate: Rate
) -> dict[str, pd.DataFrame]:
    """Return the tables `layouts` and `layout_transfers`.

    Args:
        steps: The step of each layout, by name.
        networks: Network of each dimension (`networks_of`).
        rate: Speed of the computation of a rank.

    Raises:
        LogError: The ranks of a layout wait for each other in a circle.
    """
    layouts = [_layout(name, step, networks, rate) for name, step in steps.items()]
    first_forward = layouts[0].step.forward_flops_of_job
    found = sorted((_rows(layout, first_forward) for layout in layouts), key=lambda rows: _middle(rows[0]))
    return {
        LAYOUTS.name: pd.DataFrame([row for row, _ in found], columns=LAYOUTS.column_names),
        LAYOUT_TRANSFERS.name: pd.DataFrame(
            [row for _, rows in found for row in rows], columns=LAYOUT_TRANSFERS.column_names
        ),
    }


def _layout(name: str, step: SimulatedStep, networks: Mapping[str, Network], rate: Rate) -> _Layout:
    examples, groups = group_rows([step.calls["role"], step.calls["purpose"]])
    margin = max((network.held_out_error or 0.0 for network in networks.values()), default=0.0)
    return _Layout(
        name, step, bounds(step), step.flops / rate.flops_per_s * 1e9, step.transfer_ns(networks),
        (max(0.0, 1 - margin), 1 + margin), groups, examples,
    )  # fmt: skip


def _middle(row: Mapping[str, Any]) -> float:
    """Return the middle of the bounds of a layout's step, for equal batches."""
    return float(row["low_ns"] + row["high_ns"]) / float(row["batch"])


def _rows(layout: _Layout, first_forward: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row of a layout, and those of its dimensions and purposes."""
    step, calls = layout.step, layout.step.calls
    transfer = np.nan_to_num(layout.transfer)
    kinds = len(layout.examples)
    # As it is, without all transfers, without those of each dimension and purpose.
    none, every = np.zeros(len(calls), bool), np.ones(len(calls), bool)
    free = [none, every, *(layout.groups == kind for kind in range(kinds))]
    durations, limits = [], []
    for graph, factor in zip(layout.graphs, layout.factors, strict=True):
        delays = [graph.delays(layout.computation, np.where(own, 0, transfer * factor)) for own in free]
        times = [graph.graph.times(own) for own in delays]
        durations.append([float(graph.step_ns(own)) for own in times])
        limits.append(_limits(layout, graph, delays[0], times[0]))
    low, high = durations
    processes = len(np.unique(calls["process"]))
    sums = np.bincount(layout.groups, transfer, kinds) / processes
    known = np.bincount(layout.groups, np.isnan(layout.transfer), kinds) == 0
    by_purpose = [
        {
            "run": layout.name,
            "role": str(calls.text("role", layout.examples[kind])),
            "purpose": str(calls.text("purpose", layout.examples[kind])),
            "calls_per_rank": int((layout.groups == kind).sum()) / processes,
            "transfer_ns": float(sums[kind]) if known[kind] else None,
            "exposed_low_ns": low[0] - low[2 + kind] if known[kind] else None,
            "exposed_high_ns": high[0] - high[2 + kind] if known[kind] else None,
        }
        for kind in np.argsort(-sums, kind="stable").tolist()
    ]
    return {
        "run": layout.name,
        "ranks": step.run.world_size,
        "simulated_ranks": processes,
        "batch": step.forward_flops_of_job / first_forward,
        "computation_ns": float(layout.per_process(layout.computation).max()),
        "transfer_ns": float(layout.per_process(transfer).max()),
        "low_ns": low[0],
        "high_ns": high[0],
        "exposed_low": 1 - low[1] / low[0],
        "exposed_high": 1 - high[1] / high[0],
        "limits": "; ".join(limits),
    }, by_purpose


def _limits(layout: _Layout, graph: LayoutGraph, delays: Array, times: Array) -> str:
    """Return the largest parts of the critical path of the last copies of the step."""
    calls, sums = layout.step.calls, defaultdict[str, float](float)
    last = int(graph.ends[int(times[graph.ends[:, -1]].argmax()), -1])
    for edge, ns in critical_parts(graph.graph, delays, times, last, float(graph.begin_ns(times))):
        call = np.array(graph.call[edge])
        name = "computation" if graph.part[edge] == Part.COMPUTATION else ""
        if graph.part[edge] == Part.TRANSFER:
            name = f"{calls.text('role', call)} {calls.text('op', call)}"
        sums[name] += ns
    return largest_parts(sums, sum(sums.values()))


def rate_sentence(rate: Rate) -> str:
    """Return what computation is assumed to take, without the full stop."""
    return (
        f"Computation: {rate.flops_per_s / 1e12:.4g} TFLOP/s a rank, {rate.source}. Counted are matrix products, "
        "convolutions and attention; everything else a rank computes is in this rate"
    )


def sentences(tables: Mapping[str, pd.DataFrame], networks: Mapping[str, Network], rate: Rate) -> Iterator[str]:
    """Yield what the predictions assume, and which order of the layouts is certain."""
    table = tables[LAYOUTS.name]
    rows = [*rows_of(table)]
    if len(rows) > 1:
        slower = [row.run for row in rows[1:] if row.low_ns / row.batch > rows[0].high_ns / rows[0].batch]
        if len(slower) == len(rows) - 1:
            yield f"{rows[0].run} is the fastest whatever is hidden: its upper bound is below all other lower bounds."
        else:
            others = ", ".join(row.run for row in rows[1:] if row.run not in slower)
            yield f"Whether {rows[0].run} is faster than {others} depends on what is hidden: their bounds overlap."
    if table["batch"].max() > _EQUAL_BATCH * table["batch"].min():
        yield "The steps do not train on batches of one size: the order is that for equal ones, by duration / batch."
    yield f"{rate_sentence(rate)}, which is one for all layouts."
    for role, network in networks.items():
        where = f" ({role})" if role else ""
        known = network.held_out_error
        error = "its error is not known; real calls take longer" if known is None else f"error of its fit {known:.0%}"
        yield f"Network{where}: {network.name}, {', '.join(network.about)}; {error}."
    yield (
        "The bounds are those of overlap: from all hidden that dependencies allow, to nothing hidden. They do not "
        "cover errors of the rate or of a described network, late ranks, or memory."
    )
    if table["ranks"].max() > VALIDATED_RANKS:
        yield f"Such predictions were compared with real runs of up to {VALIDATED_RANKS} ranks over gloo only."
    unknown = tables[LAYOUT_TRANSFERS.name]["transfer_ns"].isna()
    if unknown.any():
        purposes = ", ".join(dict.fromkeys(tables[LAYOUT_TRANSFERS.name].loc[unknown, "purpose"]))
        yield f"The network predicts no time for some calls, which count as none: {purposes}."
    if (table["simulated_ranks"] < table["ranks"]).any():
        yield NOT_SIMULATED
