"""Which message sizes each operation has.

`message_sizes`: `op`, `payload_bytes` (of one call), `calls`, `sum_bytes`.
`message_size_bins`: the same by powers of two: `op`, `from_bytes` (inclusive), `below_bytes`, `calls`, `sum_bytes`;
calls without payload are the bin from 0 below 1.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .engine import Analysis, Array, Block, NamedTables, merge_sums, table_by


def exponents(payload: Array) -> Array:
    """E of the power of two 2**e at or below each size in bytes, -1 for 0."""
    # size = m * 2**e with 0.5 <= m < 1, so the power of two at or below it is 2**(e - 1).
    result: Array = np.frexp(np.maximum(payload, 0).astype(float))[1].astype(np.int64) - 1
    return result


def power_bins(exponent: pd.Series[int]) -> dict[str, Array]:
    """`from_bytes` and `below_bytes` of the bins with these exponents; -1 is the bin from 0 below 1."""
    numbers = exponent.to_numpy()
    low = np.where(numbers >= 0, np.int64(1) << np.maximum(numbers, 0), 0)
    return {"from_bytes": low, "below_bytes": np.where(low > 0, low * 2, 1)}


def _partial(block: Block) -> pd.DataFrame:
    return table_by(block.cells, ("op", "payload_bytes"), {})


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    sizes = table.assign(sum_bytes=table["payload_bytes"] * table["calls"])
    both = sizes.assign(exponent=exponents(sizes["payload_bytes"].to_numpy()))
    sums = both.groupby(["op", "exponent"], as_index=False)[["calls", "sum_bytes"]].sum()
    bins = sums.assign(**power_bins(sums["exponent"]))[["op", "from_bytes", "below_bytes", "calls", "sum_bytes"]]
    return {"message_sizes": sizes, "message_size_bins": bins}


ANALYSIS: Final = Analysis("sizes", _partial, merge_sums("op", "payload_bytes"), _finish)
