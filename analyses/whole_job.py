"""Calls and volume of the whole job, from a dry run of some of its ranks. Columns: `table_specs`.

A call of a simulated rank counts once for each rank of the job that the rank stands for. The table `whole_job` has no
rows if the run is real, or if the simulated ranks do not stand for every rank of the job.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.recorded_run import RecordedRun

from .fold_engine import Analysis, NamedTables, RecordBlock, mask_unknown_wire, merge_sums, table_by

START_UP: Final = "start-up"
TRAINING: Final = "training steps"

_SUMS: Final = ["calls", "payload_bytes", "wire_bytes", "wire_unknown"]


def _partial(block: RecordBlock) -> pd.DataFrame:
    table = table_by(block.distinct, ("step", "op"), block.distinct.volumes)
    part = np.where(table.pop("step") < 0, START_UP, TRAINING).astype(object)
    return table.assign(process=block.labels.number, part=part)


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    if not run.simulated or sum(run.stands_for.values()) != run.world_size:
        table = table.iloc[:0]
    ranks = table["process"].map({at: process.tables.stands_for[1] for at, process in enumerate(run.processes)})
    sums = table.assign(**{name: table[name] * ranks.astype(np.int64) for name in _SUMS})
    result = mask_unknown_wire(sums.groupby(["part", "op"], as_index=False)[_SUMS].sum())
    return {"whole_job": result.sort_values(["part", "payload_bytes"], ascending=[True, False], ignore_index=True)}


ANALYSIS: Final = Analysis("whole_job", _partial, merge_sums("process", "part", "op"), _finish)
