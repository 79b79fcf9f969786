"""Bandwidth that hides communication, from the bytes of a step and its computation alone: for dry runs.

With C seconds of computation and W wire bytes in a step, transfers take t = W / B + calls * latency at bandwidth B. How
much of them a job overlaps with computation is not known, so there are two bounds for an exposed share s of a step:

    all of it overlaps   (t - C) / t <= s         t <= C / (1 - s)
    nothing overlaps     t / (C + t) <= s         t <= C s / (1 - s)

Wire bytes are the least that any algorithm must send (`commtrace.volume`); a bandwidth is that of one rank.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import fold
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.table_specs import shared_columns as shared
from commtrace.analyses.table_specs.spec import TableSpec, bytes_column, column, count
from commtrace.analyses.volume_by_purpose import BY_PURPOSE
from commtrace.errors import LogError
from commtrace.formatting import format_count, is_known

EXPOSED_TARGETS: Final = (0.2, 0.1, 0.05)
ALL: Final = "all"
BEST, WORST = "best", "worst"


def _name(bound: str, share: float) -> str:
    return f"{bound}_{round(100 * share)}_gb_per_s"


def format_bandwidth(gb_per_s: float) -> str:
    """Format GB/s with three digits; "-" if not known."""
    return f"{gb_per_s:.3g}" if is_known(gb_per_s) else "-"


BANDWIDTH_BOUNDS: Final = TableSpec("bandwidth_bounds", "Bandwidth of a rank that hides communication, GB/s",
    "A row per dimension, and one for all of them. For each exposed share of a step, the bandwidth in the best case "
    "(all transfers overlap with computation), and in the worst (none does); missing if latency alone takes too long, "
    "or if a size is not known.", (
    shared.ROLE,
    count("calls_per_rank", "calls/step", "Calls per recorded rank in a typical step.", optional=True),
    bytes_column("wire_bytes_per_rank", "wire (min)/step", "Their wire bytes; missing unless known for every call."),
    *(
        column("GB/s", format_bandwidth, _name(bound, share), f"{share:.0%} {bound}",
            f"For {share:.0%} exposed if {meaning}.", optional=share == min(EXPOSED_TARGETS))
        for share in EXPOSED_TARGETS
        for bound, meaning in ((BEST, "all transfers overlap"), (WORST, "no transfer overlaps"))
    ),
))  # fmt: skip


def bandwidth_bounds(run: AnalysedRun, computation_s: float, latency_s: float = 0.0) -> pd.DataFrame:
    """Return the table `bandwidth_bounds` of a run, whose times do not count.

    Args:
        run: A recorded run or a dry run.
        computation_s: Computation of a rank in a step, s.
        latency_s: Latency of a call, s.

    Raises:
        LogError: The run has no complete training step.
    """
    table = fold(run, [BY_PURPOSE])["volume_by_purpose"]
    table = table.loc[table["calls_per_rank"] > 0, ["role", "calls_per_rank", "wire_bytes_per_rank"]]
    if not len(table):
        raise LogError(f"{run.log.path}: no training step is complete; record or simulate at least two")
    sums = table.astype(dict.fromkeys(table.columns[1:], float)).groupby("role", as_index=False).sum(min_count=1)
    unknown = table.loc[table["wire_bytes_per_rank"].isna(), "role"]
    sums.loc[sums["role"].isin(unknown), "wire_bytes_per_rank"] = np.nan
    sums = sums.sort_values("wire_bytes_per_rank", ascending=False, kind="stable")
    if len(sums) > 1:
        total = sums[["calls_per_rank", "wire_bytes_per_rank"]].sum(skipna=False)
        sums = pd.concat([pd.DataFrame([{"role": ALL, **total}]), sums])
    rows = []
    for row in rows_of(sums):
        bounds = {}
        for share in EXPOSED_TARGETS:
            for bound, longest_s in ((BEST, 1 / (1 - share)), (WORST, share / (1 - share))):
                seconds = longest_s * computation_s - row.calls_per_rank * latency_s
                possible = seconds > 0 and is_known(row.wire_bytes_per_rank)
                bounds[_name(bound, share)] = row.wire_bytes_per_rank / seconds / 1e9 if possible else None
        rows.append({**row._asdict(), **bounds})
    return pd.DataFrame(rows, columns=BANDWIDTH_BOUNDS.column_names)


def sentence(computation_s: float, latency_s: float) -> str:
    """Return what the bounds assume."""
    return (
        f"Computation of a step: {format_count(round(computation_s * 1e3, 3))} ms; latency of a call: "
        f"{format_count(round(latency_s * 1e6, 3))} us. Each bandwidth is of one rank in one direction, and reached by "
        "all calls; real libraries send more than the least bytes."
    )
