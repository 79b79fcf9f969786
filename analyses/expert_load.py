"""Load of experts: tokens that each expert-parallel rank computes, and their imbalance.

A rank sends back, in the call that combines the results, one row for each token that its experts computed. The payload
of these calls (purpose "tokens combined from experts") is therefore the load of the rank, and their module the layer.
Repeated forward passes and backward passes are not counted. Results that are padded to the capacity of experts
(DeepSpeed) do not show the load, and are left out.

The imbalance is the largest load among the ranks of a group, divided by their mean: the step takes as long as the rank
with the most tokens, and the others wait for it in the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.labels import RunLabels
from commtrace.reading.recorded_run import RecordedRun
from commtrace.schema import Purpose

from .fold_engine import Analysis, NamedTables
from .grouping import group_rows, merge_sums, sum_groups
from .record_blocks import RecordBlock, steps_of
from .sections import Section, Tables
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, bytes_column, count, duration, ratio, text_column

EXPERT_STEPS: Final = TableSpec("expert_steps", "Imbalance of experts by step",
    "A row per training step with tokens for experts, ascending.", (
    shared.STEP,
    ratio("imbalance", "max/mean", "Largest load of a rank, over all layers, divided by the mean of its group."),
    shared.RANK,
    ratio("worst_imbalance", "worst layer's", "The same for the layer where it is largest."),
    text_column("layer", "worst layer", "That layer.", shortenable=True),
    count("worst_rank", "its rank", "The rank with the most tokens in that layer."),
))  # fmt: skip
EXPERT_LOAD: Final = TableSpec("expert_load", "Load of experts by layer and rank",
    "A row per layer and rank, in the order of the layers' names; the rank with the most bytes first.", (
    text_column("layer", "layer", "Name of the module with the experts.", shortenable=True),
    shared.RANK,
    count("tokens", "tokens/step", "Tokens that its experts compute, median of the training steps; missing where the "
        "size of a token is not known."),
    bytes_column("bytes", "bytes/step", "Bytes of their results, likewise."),
    ratio("load", "load/mean", "Its bytes divided by the mean of the ranks of its group, likewise."),
    ratio("most", "largest", "The largest of these ratios of a step."),
    count("steps_first", "most in steps", "Steps in which it has the most bytes of its group."),
    duration("time_ns", "time in combine/step", "Time in the calls that send the results back, median of the training "
        "steps. Ranks with fewer tokens wait in them for those with more."),
), {"terminal": "layer rank tokens bytes load most steps_first time_ns"})  # fmt: skip

_KEYS: Final = ("step", "rank", "group", "site_id")
_IN_GROUP: Final = ["step", "layer", "group"]
_NOTABLE: Final = 1.1
"""Imbalance from which on the report mentions it."""


def _layers(labels: RunLabels) -> dict[int, dict[str, str | int]]:
    """Return the facts of each call site of a purpose that shows the load, by id."""
    return {
        number: dict(site.purpose.facts)
        for number, site in labels.sites.items()
        if site.purpose is not None
        and site.purpose.name == Purpose.EXPERT_COMBINE.value
        and "padded" not in dict(site.purpose.facts)
    }


def _partial(block: RecordBlock) -> pd.DataFrame:
    rows = block.rows(np.flatnonzero(np.isin(block["site"], [*_layers(block.labels)])))
    keys = steps_of(rows), rows["rank"], rows["group"], rows["site"]
    first, groups = group_rows(keys)
    timed = rows["t_end"] > rows["t_begin"]
    values = {
        "bytes": rows["payload"],
        "time_ns": np.where(timed, rows["t_end"] - rows["t_begin"], 0),
        "untimed": (~timed).astype(np.int64),
    }
    columns = {name: key[first].astype(np.int64) for name, key in zip(_KEYS, keys, strict=True)}
    return pd.DataFrame({**columns, **{name: sum_groups(value, groups, len(first)) for name, value in values.items()}})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    table = table[table["step"].to_numpy() >= 0]
    if table.empty:  # as in most runs
        return {spec.name: pd.DataFrame(columns=[*spec.column_names]) for spec in (EXPERT_STEPS, EXPERT_LOAD)}
    facts = _layers(run.labels)
    sites = table["site_id"].map(facts)
    table = table.assign(
        layer=[str(of_site.get("module", "")) for of_site in sites],
        tokens=[
            size / int(of_site["token_bytes"]) if of_site.get("token_bytes") else np.nan
            for size, of_site in zip(table["bytes"], sites, strict=True)
        ],
        time_ns=table["time_ns"].mask(table["untimed"] > 0).astype(float),
    )
    sums = table.groupby([*_IN_GROUP, "rank"], as_index=False)[["bytes", "tokens", "time_ns"]].sum(min_count=1)
    in_group = sums.groupby(_IN_GROUP)["bytes"]
    # A rank without any token makes the call, too: with a payload of 0.
    sums["load"] = sums["bytes"] / in_group.transform("mean").where(lambda mean: mean > 0)
    sums["first"] = sums["bytes"] == in_group.transform("max")
    return {"expert_steps": _by_step(sums), "expert_load": _by_rank(sums)}


def _by_rank(sums: pd.DataFrame) -> pd.DataFrame:
    keys = sums.groupby(["layer", "rank"], as_index=False)
    loads = keys.agg(
        tokens=("tokens", "median"),
        bytes=("bytes", "median"),
        load=("load", "median"),
        most=("load", "max"),
        steps_first=("first", "sum"),
        time_ns=("time_ns", "median"),
    )
    loads = loads.sort_values(["layer", "bytes", "rank"], ascending=[True, False, True], ignore_index=True)
    return loads[list(EXPERT_LOAD.column_names)]


def _by_step(sums: pd.DataFrame) -> pd.DataFrame:
    worst = _largest(sums)
    total = sums.groupby(["step", "group", "rank"], as_index=False)[["bytes"]].sum()
    mean = total.groupby(["step", "group"])["bytes"].transform("mean")
    total["load"] = total["bytes"] / mean.where(mean > 0)
    steps = _largest(total)[["step", "load", "rank"]].rename(columns={"load": "imbalance"})
    worst = worst[["step", "load", "layer", "rank"]].rename(columns={"load": "worst_imbalance", "rank": "worst_rank"})
    return steps.merge(worst, on="step")[list(EXPERT_STEPS.column_names)]


def _largest(loads: pd.DataFrame) -> pd.DataFrame:
    """Return the row with the largest load of each step."""
    order = loads.dropna(subset=["load"]).sort_values(["step", "load"], ascending=[True, False], kind="stable")
    return order.drop_duplicates("step", ignore_index=True)


def _findings(tables: Tables) -> Iterator[str]:
    steps = tables["expert_steps"]
    median = float(steps["imbalance"].median()) if len(steps) else math.nan
    if not median >= _NOTABLE:  # NaN: not known
        return
    worst = steps.iloc[int(steps["worst_imbalance"].argmax())]
    yield (
        f"Experts: the rank with the most tokens has {median:.2f} times the mean of its group (median step). "
        f"Most uneven: layer {worst['layer'] or 'unknown'} in step {worst['step']}, {worst['worst_imbalance']:.2f} "
        f"times on rank {worst['worst_rank']}."
    )


EXPERTS: Final = Analysis("experts", _partial, merge_sums(*_KEYS), _finish)
EXPERTS_SECTION: Final = Section(
    "experts",
    "Experts",
    (EXPERT_STEPS, EXPERT_LOAD),
    (EXPERTS,),
    findings=_findings,
    look_for="Ranks whose experts get more tokens than others, which wait for them.",
)
