"""Volume of each training step, times of its calls, and the typical step. See `table_specs` for the columns."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.durations import MEASURES, durations
from commtrace.reading.recorded_run import RecordedRun

from .fold_engine import Analysis, NamedTables
from .grouping import merge_sums
from .record_blocks import RecordBlock, mask_unknown_wire, table_by
from .table_specs import TABLES

ALL: Final = "all"
SUMS: Final = ["calls", "payload_bytes", "wire_bytes", "wire_unknown"]


def _partial(block: RecordBlock) -> pd.DataFrame:
    return table_by(block.distinct_calls_by_step, ("step", "op"), block.distinct_calls_by_step.volumes)


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    table = _selected(table, run)
    steps = table.groupby("step", as_index=False)[SUMS].sum()
    training = steps.loc[steps["step"] >= 0].assign(op=ALL)
    # The sum comes first, so that the stable sort below keeps it before the operation of a run that has only one.
    all_and_each = pd.concat([training, table.loc[table["step"] >= 0]]) if len(training) else training
    rows = [
        _steady(str(op), rows, training["step"], ranks_seen(run)) for op, rows in all_and_each.groupby("op", sort=False)
    ]
    steady = pd.DataFrame(rows, columns=TABLES["steady_step"].column_names)
    return {
        "volume_by_step": mask_unknown_wire(steps),
        "steady_step": steady.sort_values("payload_bytes_max", ascending=False, kind="stable", ignore_index=True),
    }


def _selected(table: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    """Return the rows of selected steps. The log may have calls of other steps that were in flight at its end."""
    return table.loc[run.select_steps(table["step"].to_numpy())]


def ranks_seen(run: RecordedRun) -> int:
    """Return the number of ranks to divide by: those that left a log, at least 1."""
    return max(1, len({process.rank for process in run.processes}))


def _steady(op: str, rows: pd.DataFrame, steps: pd.Series[int], ranks: int) -> dict[str, object]:
    by_step = rows.set_index("step")[SUMS].reindex(steps, fill_value=0)
    median = by_step.median()
    differs = (by_step["calls"] != median["calls"]) | (by_step["payload_bytes"] != median["payload_bytes"])
    return {
        "op": op,
        "calls_per_rank": median["calls"] / ranks,
        "payload_bytes_per_rank": median["payload_bytes"] / ranks,
        "wire_bytes_per_rank": np.nan if by_step["wire_unknown"].any() else median["wire_bytes"] / ranks,
        "payload_bytes_min": by_step["payload_bytes"].min(),
        "payload_bytes_max": by_step["payload_bytes"].max(),
        "steps": len(steps),
        "differing_steps": int(differs.sum()),
    }


ANALYSIS: Final = Analysis("steps", _partial, merge_sums("step", "op"), _finish, reads_cells=True)


def _partial_by_operation(block: RecordBlock) -> pd.DataFrame:
    values = dict(block.volumes)
    for measure in MEASURES:
        times = durations(measure, block)
        values[f"{measure}_ns"] = np.maximum(times, 0)
        values[f"{measure}_known"] = (times >= 0).astype(np.int64)
    return table_by(block, ("step", "op"), values)


def _finish_by_operation(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    ranks = ranks_seen(run)
    sums = mask_unknown_wire(_selected(table, run))
    result = sums[["step", "op"]]
    for column in ("calls", "payload_bytes", "wire_bytes"):
        result[f"{column}_per_rank"] = sums[column] / ranks
    for measure in MEASURES:
        result[f"{measure}_ns_per_rank"] = (sums[f"{measure}_ns"] / ranks).where(sums[f"{measure}_known"] > 0)
    return {"steps_by_operation": result}


BY_OPERATION: Final = Analysis(
    "steps_by_operation", _partial_by_operation, merge_sums("step", "op"), _finish_by_operation
)
