"""Whether the ranks communicate alike.

`ranks`, a row per rank that left a log: `rank`, `calls`, `payload_bytes`, `wire_bytes`, then the same for the training
steps alone, without start-up (`training_calls`, `training_payload_bytes`), and `payload_of_median`, this rank's
training payload as a multiple of the median rank's.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .engine import Analysis, Block, NamedTables, known_wire, merge_sums, summed


def _partial(block: Block) -> pd.DataFrame:
    cells = block.cells
    training = (cells["step"] >= 0).astype(np.int64)
    values = {
        "calls": cells.calls,
        **cells.volumes,
        "training_calls": training * cells.calls,
        "training_payload_bytes": training * cells.volumes["payload_bytes"],
    }
    everything = np.zeros(len(training), np.int64)
    size = min(len(training), 1)
    sums = {name: summed(value, everything, size) for name, value in values.items()}
    return pd.DataFrame({"rank": np.full(size, block.labels.rank, np.int64), **sums})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    ranks = pd.DataFrame({"rank": sorted({process.rank for process in run.processes})}, dtype=np.int64)
    # A rank without records is known to have none in the log: 0 is true.
    both = known_wire(ranks.merge(table, on="rank", how="left").fillna(0).astype(table.dtypes.to_dict()))
    median = both["training_payload_bytes"].median()
    return {"ranks": both.assign(payload_of_median=both["training_payload_bytes"] / median if median else np.nan)}


ANALYSIS: Final = Analysis("balance", _partial, merge_sums("rank"), _finish)
