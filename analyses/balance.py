"""Calls and volume of each rank, and how the ranks compare. Columns: `table_specs`."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.recorded_run import RecordedRun

from .fold_engine import Analysis, NamedTables, RecordBlock, mask_unknown_wire, merge_sums


def _partial(block: RecordBlock) -> pd.DataFrame:
    rows = block.distinct
    training = (rows["step"] >= 0).astype(np.int64)
    values = {
        "calls": rows.calls,
        **rows.volumes,
        "training_calls": training * rows.calls,
        "training_payload_bytes": training * rows.volumes["payload_bytes"],
    }
    sums = {name: value.sum(keepdims=True)[: len(rows)] for name, value in values.items()}
    return pd.DataFrame({"rank": np.full(min(len(rows), 1), block.labels.rank, np.int64), **sums})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    ranks = pd.DataFrame({"rank": sorted({process.rank for process in run.processes})}, dtype=np.int64)
    # A rank without records is known to have none in the log, so 0 is its value.
    filled = ranks.merge(table, on="rank", how="left").fillna(0).astype(table.dtypes.to_dict())
    median = filled["training_payload_bytes"].median()
    share = filled["training_payload_bytes"] / median if median else np.nan
    return {"ranks": mask_unknown_wire(filled).assign(payload_of_median=share)}


ANALYSIS: Final = Analysis("balance", _partial, merge_sums("rank"), _finish)
