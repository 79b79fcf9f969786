"""What the paper has no figure of: larger scales, whether ranks are alike, every point, times on a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import rows_of
from commtrace.formatting import format_duration, format_plural
from commtrace.network.networks import Network, open_network, shipped_networks
from examples.paper_study.parts import Section

from . import figures
from .data_parallel import against_formula
from .model_parallel import between_stages, within_layers
from .results import Recorded
from .tables import Results, by_role, points
from .words import COMMAND, between, listed

_MESSAGES: Final = ("send", "recv")


def sections(results: Results) -> Iterator[Section]:
    """Scales, ranks that are alike, every point, networks."""
    scaled = results.of([*results.plan.node, *results.plan.sizes, *results.plan.scaled])
    if results.of(results.plan.scaled):
        yield _scales(results, scaled)
    combined = results.of(results.plan.combined)
    if combined:
        yield _combined(results, combined)
    yield _every(results)
    yield from _networks(results)


# ---- more ranks ------------------------------------------------------------------------------------------------------


def _scales(results: Results, some: list[Recorded]) -> Section:
    table = against_formula(some).sort_values("ranks", kind="stable", ignore_index=True)
    largest = int(table["ranks"].max())
    told = []
    for name, part in table.groupby("name", sort=False):
        known = part.loc[part["ranks"] == largest, "times"].dropna()
        if len(known):
            told.append(f"{name} {between(known, 'times')}")
    return Section(
        "",
        f"On up to {largest:,} ranks",
        [
            f"What a rank sends in a step approaches a bound: the formulas have (d-1)/d in them. Recorded by closed "
            f"form on {largest:,} ranks: {'; '.join(told)}.",
            f"{int((table['equal'] == 'yes').sum())} of {format_plural(len(table), 'point')} equal the exact "
            "expectation.",
        ],
        figures={"scale": figures.by_ranks(table, "What a rank sends in a step, by ranks", "bytes sent")},
        tables={"scale": table},
        commands=[COMMAND],
        missing=results.missing(results.plan.scaled),
        look_for="Lines are recorded, rings the exact expectation, dotted the closed form.",
    )


def _combined(results: Results, some: list[Recorded]) -> Section:
    staged, shared = between_stages(some), within_layers(some)
    table = pd.concat([staged.assign(role="pipeline"), shared.assign(role="tensor")], ignore_index=True)
    world = max(one.run.world for one in some)
    wrong = [one.run.label for one in some if not one.equal]
    return Section(
        "",
        f"Stages, tensor parallelism and data parallelism together: {world:,} ranks",
        [
            f"{format_plural(len(some), 'layout')} of {listed(one.run.name for one in some)}: "
            f"{'every call of the ranks that were run is as expected' if not wrong else 'unlike ' + listed(wrong)}.",
        ],
        figures={"combined": figures.totals(by_role(some), "What a rank sends in a step, by dimension", "bytes sent")},
        tables={"combined": table},
        commands=[COMMAND],
        missing=results.missing(results.plan.combined),
        look_for="Mean over the ranks of the job.",
    )


# ---- every point -----------------------------------------------------------------------------------------------------


def _every(results: Results) -> Section:
    table = points(results.recorded.values())
    equal = int((table["equal"] == "yes").sum())
    compared = "all" if equal == len(table) else f"{equal:,}"
    runs, calls = len(results.recorded), int(table["calls"].sum())
    texts = [
        f"{format_plural(runs, 'dry run')}, {format_plural(len(table), 'rank')} run, {calls:,} calls. For "
        f"{compared} of these ranks "
        "every call, from start-up to the last step, is the one that theory expects, in operation, size, number and "
        "group (`commtrace check`)."
    ]
    wrong = table.loc[table["equal"] != "yes"]
    texts += [
        f"Not equal: {row.model} {row.division} on {row.ranks} ranks, rank {row.rank}: {row.difference}"
        for row in rows_of(wrong.head(20))
    ]
    texts += [f"Cannot be read: {run.label}: {why}" for run, why in results.failed.items()]
    texts += [*_alike(results)]
    return Section(
        "",
        "Every point",
        texts,
        tables={"points": table},
        commands=["commtrace check DIR/volume/EXPERIMENT", "commtrace report DIR/volume/EXPERIMENT"],
        missing=results.missing(results.plan.all),
        look_for="Payload of all calls of a rank, recorded and expected; then, of the first rank, what it sends in a "
        "step, what it should, what the closed form says, and why that is something else.",
    )


def _alike(results: Results) -> Iterator[str]:
    """Whether ranks of a stage communicate alike."""
    told: list[str] = []
    unlike: list[str] = []
    for one in results.of(results.plan.alike):
        kinds: dict[int, dict[int, frozenset[Any]]] = {}
        size_of_stage = one.run.world // one.run.pipeline
        for rank, part in one.calls.groupby("rank"):
            sums = part.groupby(["step", "role", "op", "size", "group_size"])["calls"].sum()
            number = int(str(rank))
            kinds.setdefault(number // size_of_stage, {})[number] = frozenset(sums.items())
        same = all(len({*of.values()}) == 1 for of in kinds.values())
        (told if same else unlike).append(
            f"{one.run.division} ({format_plural(len(one.run.run), 'rank')} of {one.run.world})"
        )
    if told:
        yield f"Ranks of a stage communicate alike, so one of each stands for the others: checked for {listed(told)}."
    if unlike:
        yield f"Ranks of a stage do not communicate alike: {listed(unlike)}."


# ---- a network -------------------------------------------------------------------------------------------------------


def _networks(results: Results) -> Iterator[Section]:
    names = shipped_networks() if results.options.network is None else [results.options.network]
    some = results.of([*results.plan.scaled, *results.plan.combined] or [*results.plan.node, *results.plan.divided])
    most = max((one.run.world for one in some), default=0)
    chosen = [one for one in some if one.run.world == most or not results.plan.scaled]
    for name in names:
        network = open_network(name)
        table = times_on(network, chosen)
        if len(table):
            yield _network(network, table, most if results.plan.scaled else 0)


def times_on(network: Network, some: Sequence[Recorded]) -> pd.DataFrame:
    """Return the expected times of the rank that communicates longest in a step, as if calls ran one after the other.

    Columns: `model`, `name`, `ranks`, `op`, `calls`, `calls_without_time`, `latency_us`, `bandwidth_us`, `time_us`,
    `how`.
    """
    parts = []
    for one in some:
        rows = [_time(network, row) for row in rows_of(one.steady)]
        if not rows:
            continue
        each = pd.DataFrame(rows).groupby(["rank", "op"], as_index=False).agg(
            calls=("calls", "sum"), calls_without_time=("calls_without_time", "sum"), latency_us=("latency_us", "sum"),
            bandwidth_us=("bandwidth_us", "sum"), time_us=("time_us", "sum"), how=("how", "max"),
        )  # fmt: skip
        longest = each.groupby("rank")["time_us"].sum().idxmax()
        mine = each.loc[each["rank"] == longest]
        parts.append(mine.assign(model=one.run.name, name=one.run.division, ranks=one.run.world))
    columns = [
        "model", "name", "ranks", "rank", "op", "calls", "calls_without_time", "latency_us", "bandwidth_us", "time_us",
        "how",
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _time(network: Network, row: Any) -> dict[str, object]:
    members = [int(row.rank), int(row.peer)] if row.op in _MESSAGES else _members(str(row.group_ranks))
    hosts = len({member // network.ranks_per_node for member in members})
    expected = network.expected(str(row.op), int(row.size), len(members), hosts)
    told = {"rank": int(row.rank), "op": str(row.op), "calls": int(row.calls)}
    if expected is None:
        nothing = {"latency_us": 0.0, "bandwidth_us": 0.0, "time_us": 0.0, "how": ""}
        return {**told, "calls_without_time": int(row.calls), **nothing}
    latency, bandwidth = expected.latency_us * row.calls, expected.bandwidth_us * row.calls
    return {
        **told,
        "calls_without_time": 0,
        "latency_us": latency,
        "bandwidth_us": bandwidth,
        "time_us": latency + bandwidth,
        "how": expected.how,
    }


def _members(compact: str) -> list[int]:
    """Return the ranks of "0-3,8" as a list."""
    spans = [span.split("-") for span in compact.split(",")]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def _network(network: Network, table: pd.DataFrame, ranks: int) -> Section:
    sums = table.groupby(["model", "name"], sort=False)["time_us"].sum()
    told = []
    for model in table["model"].drop_duplicates():
        mine = {str(name): float(value) for name, value in sums[model].items()}
        order = sorted(mine, key=lambda name: mine[name])
        told.append(
            f"{model}: from {format_duration(mine[order[0]] * 1e3)} ({order[0]}) to "
            f"{format_duration(mine[order[-1]] * 1e3)} ({order[-1]})"
        )
    without = int(table["calls_without_time"].sum())
    gaps = (
        f" {format_plural(without, 'call')} without a time are left out: the file has nothing of them."
        if without
        else ""
    )
    where = f" on {ranks:,} ranks" if ranks else ""
    return Section(
        "",
        f"Predicted communication time{where}: {network.name}",
        [
            "What the recorded calls of a step should take, of the rank for which it is longest; a sum, as if no call "
            f"overlapped another or the computation. Ranks fill nodes of {network.ranks_per_node}. "
            f"{'. '.join(network.about)}.",
            f"{'; '.join(told)}.{gaps}",
        ],
        figures={f"network-{network.name}": figures.times_of(table, f"A step on {network.name}")},
        tables={f"network-{network.name}": table},
        commands=[f"commtrace study DIR --part volume --network {network.name}"],
    )
