"""What stops the scaling, in sentences: each from numbers of the tables, none without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import NamedTables, rows_of
from commtrace.formatting import format_bandwidth, format_bytes, format_duration, format_plural, format_share, is_known

PARTS: Final = {
    "compute_ns": "computation that does not shrink with the ranks",
    "transfer_ns": "communication",
    "late_ns": "waiting for ranks that are late",
}

COMPUTATION: Final = "computation that shrinks with the ranks"


def sentences(tables: NamedTables) -> list[str]:
    """Beginning with what must be known before any number is believed."""
    table = tables["scaling"]
    left_out = [f"Left out: {row.reason}." for row in rows_of(tables["scaling_left_out"])]
    return [*left_out, *_warnings(table), *_losses(table), *_growth(table), *_amdahl(tables), *_ahead(tables)]


def _warnings(table: pd.DataFrame) -> Iterator[str]:
    for row in rows_of(table.loc[table["shared_cores"] != ""]):
        yield (
            f"{row.run}: {row.shared_cores} of a host. They take turns in computing, and a rank whose turn it is not "
            "keeps the others waiting: its times say nothing of the network."
        )
    unmarked = table.loc[table["steps"] == 0, "run"]
    if len(unmarked):
        yield f"{', '.join(unmarked)}: no training steps are marked, so all that was recorded counts as one step."
    if table["tokens_per_step"].isna().any():
        yield "Steps of all runs count as the same work; --tokens says how many tokens each has."
    device = table.loc[table["compute_ns"].isna(), "run"]
    if len(device):
        yield f"{', '.join(device)}: ends of calls are of a device's clock, so the host's computing time is not known."
    partly = table.loc[(table["late_known"] < 0.99) & (table["blocked_ns"] > 0)]
    for row in rows_of(partly):
        yield (
            f"{row.run}: who was late is known for {format_share(row.late_known)} of the time in calls (ranks of "
            "one host, "
            "all of them in the log)."
        )


def _losses(table: pd.DataFrame) -> Iterator[str]:
    """Where the time beyond a perfect division of the first run's work went."""
    parts = table.assign(transfer_ns=table["blocked_ns"] - table["late_ns"])
    first, counted = parts.iloc[0], table["tokens_per_step"].notna().all()
    for _, row in parts.iloc[1:].iterrows():
        if not is_known(row["compute_ns"]) or not is_known(first["compute_ns"]):
            continue
        load = row["tokens_per_step"] / first["tokens_per_step"] if counted else 1.0
        fair = load * first["ranks"] / row["ranks"]
        beyond = {name: float(row[name] - fair * first[name]) for name in PARTS}
        lost = float(row["step_ns"] - fair * first["step_ns"])
        if lost <= 0:
            yield f"{_name(row)}: {format_duration(-lost)} a step faster than a perfect division of the work."
            continue
        named = sorted(((ns, PARTS[name]) for name, ns in beyond.items() if ns > 0), reverse=True)
        told = ", ".join(f"{format_duration(ns)} {words}" for ns, words in named)
        yield (
            f"{_name(row)}: {format_duration(lost)} a step over a perfect division of the work: {told}. "
            "Communication and waiting "
            f"are {format_share(row['blocked_ns'] / row['step_ns'])} of a step."
        )


def _name(row: Any) -> str:
    return f"{row['run']} ({format_plural(int(row['ranks']), 'rank')})"


def _growth(table: pd.DataFrame) -> Iterator[str]:
    sent = table.loc[(table["wire_bytes"] > 0) & (table["ranks"] > 1)]
    if len(sent) < 2:
        return
    few, many = sent.iloc[0], sent.iloc[-1]
    change = float(many["wire_bytes"] / few["wire_bytes"])
    work = float(few["ranks"] / many["ranks"])
    if table["tokens_per_step"].notna().all():
        work *= float(many["tokens_per_step"] / few["tokens_per_step"])
    changes = "stays as it is" if abs(work - 1) < 0.005 else f"changes by a factor of {work:.3g}"
    stays = "stays at" if abs(change - 1) < 0.005 else f"goes from {format_bytes(few['wire_bytes'])} to"
    yield (
        f"From {int(few['ranks'])} to {int(many['ranks'])} ranks what a rank must send in a step {stays} "
        f"{format_bytes(many['wire_bytes'])}, while its share of the work {changes}: communication per "
        f"computation is {change / work:.3g} times what it was."
    )


def _amdahl(tables: NamedTables) -> Iterator[str]:
    fits = tables["scaling_fits"]
    found = fits.loc[fits["parameter"] == "most speedup over one rank"]
    for row in rows_of(found):
        if is_known(row.error):
            yield (
                f"Amdahl's law through these runs (it misses none by more than {format_share(row.error)}): at most "
                f"{row.value:.1f} times the speed of one rank, however many there are."
            )
        else:
            yield (
                f"Amdahl's law through two points, which it always meets: at most {row.value:.1f} times the speed of "
                "one rank. A third run would show whether it holds."
            )


def _ahead(tables: NamedTables) -> Iterator[str]:
    projection, fits = tables["scaling_projection"], tables["scaling_fits"]
    if not len(projection):
        return
    ran = projection.dropna(subset="measured_ns")
    miss = float(((ran["step_ns"] / ran["measured_ns"]) - 1).abs().max())
    link = fits.loc[fits["model"] == "latency and bandwidth"].set_index("parameter")
    width = link.loc["bandwidth", "value"]
    told = f"{format_duration(link.loc['latency', 'value'])} a call" + (
        f" and {format_bandwidth(width)} GB/s" if is_known(width) else ""
    )
    yield (
        f"Calls take {told} (mean difference {format_share(link.loc['latency', 'error'])}); with computation and "
        "waiting, "
        f"that gives the measured steps within {format_share(miss)}."
    )
    ahead = projection.loc[projection["measured_ns"].isna()]
    if not len(ahead):
        yield "That is too far off to look ahead by."
        return
    further = ahead.iloc[0]
    costs = {
        COMPUTATION: float(further["compute_ns"] - _divided_further(tables, ran.iloc[-1], further)),
        "half as many calls, or half the latency": float(further["latency_ns"]) / 2,
        "half the bytes, or twice the bandwidth": float(further["bandwidth_ns"]) / 2,
        "ranks that are never late": float(further["late_ns"]),
    }
    best = max(costs, key=lambda name: costs[name])
    saved = further["step_ns"] / (further["step_ns"] - costs[best]) if costs[best] > 0 else 1.0
    change = f" What would change most there: {best}, {saved:.2f} times as fast." if saved > 1.02 else ""
    alone = " No two runs have different numbers of ranks above one, so a rank's calls and bytes are taken to stay."
    assumed = alone if tables["scaling"]["ranks"].loc[tables["scaling"]["ranks"] > 1].nunique() == 1 else ""
    yield (
        f"With {int(further['ranks'])} ranks (not run): an efficiency of about "
        f"{format_share(further['efficiency'])}.{change}"
        f"{assumed}"
    )


def _divided_further(tables: NamedTables, last: Any, further: Any) -> float:
    """Ns that a rank would compute for, if the last run's computation were divided perfectly from there on."""
    work = further["speedup"] * further["step_ns"] / (last["speedup"] * last["step_ns"])
    return float(tables["scaling"]["compute_ns"].iloc[-1] * work * last["ranks"] / further["ranks"])
