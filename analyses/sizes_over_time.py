"""Which message sizes the run has when.

`sizes_over_time`: `from_s` and `below_s` (seconds since the run's first call began, by the hosts' wall clocks), `op`,
`from_bytes`, `below_bytes` (powers of two; calls without payload are the bin from 0 below 1), `calls`, `sum_bytes`.
Times are cut into at most MOST equal spans. Calls of a process that tells no wall-clock time are left out.

A span is 2**shift ns long and begins at a multiple of that, so that two neighbours make one of the next length: parts
of a log can be binned before anybody knows how long the run is, and come out as if it had been known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.run import RecordedRun

from .engine import Analysis, Array, Block, NamedTables, grouped, merge_by, summed
from .message_sizes import exponents, power_bins

MOST: Final = 160
"""Spans of time."""

_KEYS: Final = ("shift", "span", "op", "exponent")


def _partial(block: Block) -> pd.DataFrame:
    offset = block.labels.unix_minus_mono_ns
    use = np.flatnonzero(block["t_begin"] > 0) if offset is not None else np.zeros(0, np.int64)
    times = block["t_begin"][use] + np.int64(offset or 0)
    shift = _shift(times)
    payload, kinds = block["payload"][use], block["kind"][use]
    columns = [times >> shift, kinds, exponents(payload)]
    first, groups = grouped(columns)
    spans, kinds, powers = (column[first] for column in columns)
    return pd.DataFrame(
        {
            "shift": np.full(len(first), shift, np.int64),
            "span": spans,
            "op": block.labels.text("op", kinds),
            "exponent": powers,
            "calls": np.bincount(groups, minlength=len(first)),
            "sum_bytes": summed(payload, groups, len(first)),
        }
    )


def _shift(times: Array) -> int:
    """The shortest span, as a power of two of ns, of which MOST reach from the first time to the last."""
    shift = 0
    while len(times) and (int(times.max()) >> shift) - (int(times.min()) >> shift) >= MOST:
        shift += 1
    return shift


def _merge(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    both = pd.concat([table for table in tables if len(table)] or [tables[0]], ignore_index=True)
    if len(both):
        shift = int(both["shift"].max())
        spans = both["span"].to_numpy() >> (shift - both["shift"].to_numpy())
        more = _shift(spans)
        both = both.assign(shift=shift + more, span=spans >> more)
    return merge_by(_KEYS, {}, [both])


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    length = 1 << int(table["shift"].max()) if len(table) else 1
    begin = (table["span"] - (table["span"].min() if len(table) else 0)) * length / 1e9
    sizes = power_bins(table["exponent"])
    result = table.assign(from_s=begin, below_s=begin + length / 1e9, **sizes)
    columns = ["from_s", "below_s", "op", "from_bytes", "below_bytes", "calls", "sum_bytes"]
    return {"sizes_over_time": result[columns].sort_values(["from_s", "op", "from_bytes"], ignore_index=True)}


ANALYSIS: Final = Analysis("sizes_over_time", _partial, _merge, _finish)
