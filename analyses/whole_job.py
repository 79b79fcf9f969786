"""What the whole job communicates, where a dry run ran some of its ranks in place of all.

`whole_job`, a row per operation in `start-up` and in the training steps together: `part`, `op`, `calls`,
`payload_bytes`, `wire_bytes`, each call of a rank counted as often as there are ranks that it was run for. Without rows
where the ranks that were run do not stand for every rank of the job, and where the run is real.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .engine import Analysis, Block, NamedTables, known_wire, merge_sums, table_by

START_UP: Final = "start-up"
TRAINING: Final = "training steps"

_SUMS: Final = ["calls", "payload_bytes", "wire_bytes", "wire_unknown"]


def _partial(block: Block) -> pd.DataFrame:
    table = table_by(block.cells, ("step", "op"), block.cells.volumes)
    table["process"] = np.full(len(table), block.labels.number, np.int64)
    table["part"] = np.where(table.pop("step") < 0, START_UP, TRAINING).astype(object)
    return table


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    counts = {number: process.tables.stands_for[1] for number, process in enumerate(run.processes)}
    if not run.simulated or sum(run.stands_for.values()) != run.world_size:
        table = table.iloc[:0]
    times = table["process"].map(counts).astype(np.int64)
    sums = {name: table[name] * times for name in _SUMS}
    found = table.assign(**sums).groupby(["part", "op"], as_index=False)[_SUMS].sum()
    result = known_wire(found).sort_values(["part", "payload_bytes"], ascending=[True, False], ignore_index=True)
    return {"whole_job": result}


ANALYSIS: Final = Analysis("whole_job", _partial, merge_sums("process", "part", "op"), _finish)
