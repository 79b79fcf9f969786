"""How much is communicated in each training step, and whether the steps are alike.

`volume_by_step`: `step` (-1: start-up), `calls`, `payload_bytes`, `wire_bytes`, summed over the ranks.

`steady_step`, a row per operation and one for "all": what a training step takes. A step without the operation counts 0.

    calls_per_rank, payload_bytes_per_rank, wire_bytes_per_rank    median of the steps' sums, divided by the ranks seen
    payload_bytes_min, payload_bytes_max                           smallest and largest step, summed over the ranks
    steps                                                          training steps in the log
    differing_steps                                                those whose calls or payload are not the median ones
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .engine import Analysis, Block, NamedTables, known_wire, merge_sums, table_by

ALL: Final = "all"

_SUMS: Final = ["calls", "payload_bytes", "wire_bytes", "wire_unknown"]


def _partial(block: Block) -> pd.DataFrame:
    return table_by(block.cells, ("step", "op"), block.cells.volumes)


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    steps = table.groupby("step", as_index=False)[_SUMS].sum()
    training = steps.loc[steps["step"] >= 0].assign(op=ALL)
    # The sum first, so that the stable sort below keeps it before an operation that is all there is.
    parts = pd.concat([training, table.loc[table["step"] >= 0]]) if len(training) else training
    ranks = len({process.rank for process in run.processes})
    rows = [_steady(str(op), part, training["step"], ranks) for op, part in parts.groupby("op", sort=False)]
    steady = pd.DataFrame(rows, columns=[*STEADY])
    return {
        "volume_by_step": known_wire(steps),
        "steady_step": steady.sort_values("payload_bytes_max", ascending=False, kind="stable", ignore_index=True),
    }


STEADY: Final = (
    "op",
    "calls_per_rank",
    "payload_bytes_per_rank",
    "wire_bytes_per_rank",
    "payload_bytes_min",
    "payload_bytes_max",
    "steps",
    "differing_steps",
)


def _steady(op: str, part: pd.DataFrame, steps: pd.Series[int], ranks: int) -> dict[str, object]:
    every = part.set_index("step")[_SUMS].reindex(steps, fill_value=0)
    middle = every.median()
    differs = (every["calls"] != middle["calls"]) | (every["payload_bytes"] != middle["payload_bytes"])
    wire = np.nan if every["wire_unknown"].any() else middle["wire_bytes"] / ranks
    return {
        "op": op,
        "calls_per_rank": middle["calls"] / ranks,
        "payload_bytes_per_rank": middle["payload_bytes"] / ranks,
        "wire_bytes_per_rank": wire,
        "payload_bytes_min": every["payload_bytes"].min(),
        "payload_bytes_max": every["payload_bytes"].max(),
        "steps": len(steps),
        "differing_steps": int(differs.sum()),
    }


ANALYSIS: Final = Analysis("steps", _partial, merge_sums("step", "op"), _finish)
