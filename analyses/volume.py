"""Volume by operation, parallel dimension, phase and call site. Columns: `table_specs`."""

from __future__ import annotations

from functools import partial
from typing import Final

import pandas as pd

from commtrace.reading.recorded_run import RecordedRun

from .fold_engine import Analysis, NamedTables, RecordBlock, mask_unknown_wire, merge_sums, table_by

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "volume_by_operation": ("op",),
    "volume_by_role": ("role",),
    "volume_by_role_and_operation": ("role", "op"),
    "volume_by_phase": ("phase",),
    "volume_by_site": ("site", "op"),
}


def _partial(keys: tuple[str, ...], block: RecordBlock) -> pd.DataFrame:
    return table_by(block.distinct, keys, block.distinct.volumes)


def _finish(name: str, table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    total = table["payload_bytes"].sum()
    shares = table["payload_bytes"] / total if total else float("nan")
    result = mask_unknown_wire(table).assign(payload_share=shares)
    return {name: result.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable", ignore_index=True)}


ANALYSES: Final = tuple(
    Analysis(name, partial(_partial, keys), merge_sums(*keys), partial(_finish, name)) for name, keys in KEYS.items()
)
