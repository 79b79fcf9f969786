"""Findings on what limits the scaling, each derived from numbers in the tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.grouping import rows_of
from commtrace.formatting import format_bandwidth, format_bytes, format_duration, format_plural, format_share, is_known

PARTS: Final = {
    "compute_ns": "computation that does not shrink with the ranks",
    "transfer_ns": "communication",
    "late_ns": "waiting for ranks that are late",
}


def sentences(tables: NamedTables) -> list[str]:
    """Return the findings from the tables of `scaling_tables.scaling`, caveats first."""
    table = tables["scaling"]
    left_out = [f"Left out: {row.reason}." for row in rows_of(tables["scaling_left_out"])]
    settings = _differing_settings(tables["scaling_settings"])
    return [
        *left_out,
        *settings,
        *_warnings(table),
        *_losses(table),
        *_growth(table),
        *_amdahl(tables),
        *_projection(tables),
    ]


def _differing_settings(settings: pd.DataFrame) -> Iterator[str]:
    for name, rows in settings.groupby("name", sort=False):
        runs_by_value = rows.groupby("value", sort=False)["run"].agg(", ".join)
        values = "; ".join(f"{value} ({runs})" for value, runs in runs_by_value.items())
        yield f"The runs differ in more than their size: {name}: {values}."


def _warnings(table: pd.DataFrame) -> Iterator[str]:
    for row in rows_of(table.loc[table["shared_cores"] != ""]):
        yield (
            f"{row.run}: {row.shared_cores} of a host. They take turns in computing, and a rank waiting for its turn "
            "delays the others: the times do not describe the network."
        )
    unmarked = table.loc[table["steps"] == 0, "run"]
    if len(unmarked):
        yield f"{', '.join(unmarked)}: no training steps are marked, so the whole log counts as one step."
    if table["tokens_per_step"].isna().any():
        yield "Steps of all runs count as the same work; give the tokens of each with --tokens."
    on_device = table.loc[table["compute_ns"].isna(), "run"]
    if len(on_device):
        yield f"{', '.join(on_device)}: ends of calls were observed on a device, so the computation time is not known."
    for row in rows_of(table.loc[(table["late_known"] < 0.99) & (table["blocked_ns"] > 0)]):
        yield (
            f"{row.run}: which rank was late is known for {format_share(row.late_known)} of the time in calls (calls "
            "whose ranks are all in the log, on one host or on hosts whose clocks the calls bound)."
        )


def _losses(table: pd.DataFrame) -> Iterator[str]:
    """Attribute the time beyond ideal scaling of the first run."""
    parts = table.assign(transfer_ns=table["blocked_ns"] - table["late_ns"])
    first, counted = parts.iloc[0], table["tokens_per_step"].notna().all()
    for _, row in parts.iloc[1:].iterrows():
        if not is_known(row["compute_ns"]) or not is_known(first["compute_ns"]):
            continue
        name = f"{row['run']} ({format_plural(int(row['ranks']), 'rank')})"
        load = row["tokens_per_step"] / first["tokens_per_step"] if counted else 1.0
        perfect = load * first["ranks"] / row["ranks"]
        lost = float(row["step_ns"] - perfect * first["step_ns"])
        if lost <= 0:
            yield f"{name}: a step is {format_duration(-lost)} faster than with ideal scaling."
            continue
        losses = {text: float(row[part] - perfect * first[part]) for part, text in PARTS.items()}
        largest_first = sorted(((ns, text) for text, ns in losses.items() if ns > 0), reverse=True)
        yield (
            f"{name}: a step is {format_duration(lost)} slower than with ideal scaling: "
            f"{', '.join(f'{format_duration(ns)} {text}' for ns, text in largest_first)}. Communication and waiting "
            f"are {format_share(row['blocked_ns'] / row['step_ns'])} of a step."
        )


def _growth(table: pd.DataFrame) -> Iterator[str]:
    sending = table.loc[(table["wire_bytes"] > 0) & (table["ranks"] > 1)]
    if len(sending) < 2:
        return
    first, last = sending.iloc[0], sending.iloc[-1]
    growth = float(last["wire_bytes"] / first["wire_bytes"])
    work = float(first["ranks"] / last["ranks"])
    if table["tokens_per_step"].notna().all():
        work *= float(last["tokens_per_step"] / first["tokens_per_step"])
    work_changes = "is the same" if abs(work - 1) < 0.005 else f"changes by a factor of {work:.3g}"
    changes = "stay at" if abs(growth - 1) < 0.005 else f"change from {format_bytes(first['wire_bytes'])} to"
    yield (
        f"From {int(first['ranks'])} to {int(last['ranks'])} ranks, the wire bytes of a rank's step "
        f"{changes} {format_bytes(last['wire_bytes'])}, while its share of the work {work_changes}: communication per "
        f"computation changes by a factor of {growth / work:.3g}."
    )


def _amdahl(tables: NamedTables) -> Iterator[str]:
    fits = tables["scaling_fits"]
    for row in rows_of(fits.loc[fits["parameter"] == "most speedup over one rank"]):
        limit = f"at most {row.value:.1f} times the speed of one rank on any number of ranks."
        if is_known(row.error):
            yield f"Amdahl's law, fitted with differences of at most {format_share(row.error)}: {limit}"
        else:
            yield f"Amdahl's law through two points, which always fit: {limit} A third run would show whether it holds."


def _projection(tables: NamedTables) -> Iterator[str]:
    projection, fits = tables["scaling_projection"], tables["scaling_fits"]
    if not len(projection):
        return
    measured = projection.dropna(subset="measured_ns")
    error = float(((measured["step_ns"] / measured["measured_ns"]) - 1).abs().max())
    network = fits.loc[fits["model"] == "latency and bandwidth"].set_index("parameter")
    bandwidth = network.loc["bandwidth", "value"]
    cost = format_duration(network.loc["latency", "value"])
    cost += f" plus bytes at {format_bandwidth(bandwidth)} GB/s" if is_known(bandwidth) else ""
    yield (
        f"A call takes {cost} (mean difference {format_share(network.loc['latency', 'error'])}); with computation and "
        f"waiting, this model reproduces the measured steps within {format_share(error)}."
    )
    ahead = projection.loc[projection["measured_ns"].isna()]
    if not len(ahead):
        yield "That is not accurate enough for a projection to more ranks."
        return
    further = ahead.iloc[0]
    savings = {
        "computation that shrinks with the ranks": float(
            further["compute_ns"] - _perfect_compute_ns(tables, measured.iloc[-1], further)
        ),
        "half as many calls, or half the latency": float(further["latency_ns"]) / 2,
        "half the bytes, or twice the bandwidth": float(further["bandwidth_ns"]) / 2,
        "ranks that are never late": float(further["late_ns"]),
    }
    best = max(savings, key=lambda name: savings[name])
    speedup = further["step_ns"] / (further["step_ns"] - savings[best]) if savings[best] > 0 else 1.0
    change = f" The largest gain there: {best}, {speedup:.2f} times as fast." if speedup > 1.02 else ""
    several = tables["scaling"]["ranks"].loc[tables["scaling"]["ranks"] > 1].nunique() > 1
    assumption = "" if several else " This assumes a rank's calls and bytes are as in the only run with several ranks."
    yield (
        f"With {int(further['ranks'])} ranks (not run): an efficiency of about "
        f"{format_share(further['efficiency'])}.{change}{assumption}"
    )


def _perfect_compute_ns(tables: NamedTables, last: Any, further: Any) -> float:
    """Return the computation time of a rank if computation scaled ideally from the last run on."""
    work = further["speedup"] * further["step_ns"] / (last["speedup"] * last["step_ns"])
    return float(tables["scaling"]["compute_ns"].iloc[-1] * work * last["ranks"] / further["ranks"])
