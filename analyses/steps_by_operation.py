"""What each training step takes of volume and of the host's time, operation by operation.

`steps_by_operation`, a row per step (-1: start-up) and operation, sums over the calls divided by the ranks seen:

    calls_per_rank, payload_bytes_per_rank, wire_bytes_per_rank
    in_call_ns_per_rank, waiting_ns_per_rank, to_completion_ns_per_rank    the measures of `host_time`, over the calls
                                                       whose time is known (missing: none is); calls that overlap are
                                                       each counted in full
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .call_times import MEASURES, durations
from .engine import Analysis, Block, NamedTables, known_wire, merge_sums, table_by


def _partial(block: Block) -> pd.DataFrame:
    values = dict(block.volumes)
    for measure in MEASURES:
        times = durations(measure, block)
        values[f"{measure}_ns"] = np.maximum(times, 0)
        values[f"{measure}_known"] = (times >= 0).astype(np.int64)
    return table_by(block, ("step", "op"), values)


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    ranks = max(1, len({process.rank for process in run.processes}))
    result = known_wire(table)[["step", "op"]]
    for column in ("calls", "payload_bytes", "wire_bytes"):
        result[f"{column}_per_rank"] = known_wire(table)[column] / ranks
    for measure in MEASURES:
        known = table[f"{measure}_known"] > 0
        result[f"{measure}_ns_per_rank"] = (table[f"{measure}_ns"] / ranks).where(known)
    return {"steps_by_operation": result}


ANALYSIS: Final = Analysis("steps_by_operation", _partial, merge_sums("step", "op"), _finish)
