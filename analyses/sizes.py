"""Which message sizes each operation has.

`message_sizes`: `op`, `payload_bytes` (of one call), `calls`, `sum_bytes`.
`message_size_bins`: the same by powers of two: `op`, `from_bytes` (inclusive), `below_bytes`, `calls`, `sum_bytes`;
calls without payload are the bin from 0 below 1.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import Run

from .fold import Analysis, Block, NamedTables, merge_sums, table_by


def _partial(block: Block) -> pd.DataFrame:
    return table_by(block, ("op", "payload_bytes"), {})


def _finish(table: pd.DataFrame, run: Run) -> NamedTables:
    sizes = table.assign(sum_bytes=table["payload_bytes"] * table["calls"])
    # size = m * 2**e with 0.5 <= m < 1, so the power of two at or below it is 2**(e - 1).
    exponents = np.frexp(sizes["payload_bytes"].clip(lower=0).to_numpy(float))[1].astype(np.int64)
    bins = sizes.assign(from_bytes=np.where(exponents > 0, np.int64(1) << np.maximum(exponents - 1, 0), 0))
    bins = bins.groupby(["op", "from_bytes"], as_index=False)[["calls", "sum_bytes"]].sum()
    bins.insert(2, "below_bytes", np.where(bins["from_bytes"] > 0, bins["from_bytes"] * 2, 1))
    return {"message_sizes": sizes, "message_size_bins": bins}


ANALYSIS: Final = Analysis("sizes", _partial, merge_sums("op", "payload_bytes"), _finish)
