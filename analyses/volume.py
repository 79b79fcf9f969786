"""Volume by operation, parallel dimension, phase, call site and rank, and of the whole job.

See `table_specs` for the columns. `whole_job` scales a dry run of some ranks up to the job: a call counts once for each
rank that its rank represents. The table has no rows if the run is real, or if the simulated ranks do not represent
every rank of the job.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.summary_reader import MIXED

from .fold_engine import Analysis, NamedTables
from .grouping import group_rows, merge_sums, sum_groups
from .record_blocks import EVALUATION, RecordBlock, mask_unknown_wire, steps_of, table_by
from .steps import SUMS

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "volume_by_operation": ("op",),
    "volume_by_role": ("role",),
    "volume_by_role_and_operation": ("role", "op"),
    "volume_by_phase": ("phase",),
    "volume_by_site": ("site", "op"),
}


def _partial(keys: tuple[str, ...], block: RecordBlock) -> pd.DataFrame:
    return table_by(block.distinct_calls, keys, block.distinct_calls.volumes)


def _finish(name: str, table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    total = table["payload_bytes"].sum()
    shares = table["payload_bytes"] / total if total else float("nan")
    result = mask_unknown_wire(table).assign(payload_share=shares)
    return {name: result.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable", ignore_index=True)}


ANALYSES: Final = tuple(
    Analysis(name, partial(_partial, keys), merge_sums(*keys), partial(_finish, name), reads_cells=True)
    for name, keys in KEYS.items()
)


def _partial_by_rank(block: RecordBlock) -> pd.DataFrame:
    rows = block.distinct_calls_by_step
    first, ranks = group_rows([rows["rank"]])
    training = ((steps_of(rows) >= 0) | (steps_of(rows) == MIXED)).astype(np.int64)
    values = {
        "calls": rows.calls,
        **rows.volumes,
        "training_calls": training * rows.calls,
        "training_payload_bytes": training * rows.volumes["payload_bytes"],
    }
    sums = {name: sum_groups(value, ranks, len(first)) for name, value in values.items()}
    return pd.DataFrame({"rank": rows["rank"][first], **sums})


def _finish_by_rank(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    ranks = pd.DataFrame({"rank": sorted({process.rank for process in run.processes})}, dtype=np.int64)
    # The values of a rank without records are 0, not missing: the log has no call of it.
    filled = ranks.merge(table, on="rank", how="left").fillna(0).astype(table.dtypes.to_dict())
    median = filled["training_payload_bytes"].median()
    share = filled["training_payload_bytes"] / median if median else np.nan
    return {"ranks": mask_unknown_wire(filled).assign(payload_of_median=share)}


BY_RANK: Final = Analysis("balance", _partial_by_rank, merge_sums("rank"), _finish_by_rank, reads_cells=True)


def _partial_of_job(block: RecordBlock) -> pd.DataFrame:
    table = table_by(block.distinct_calls_by_step, ("process", "step", "op"), block.distinct_calls_by_step.volumes)
    return table.assign(part=np.clip(table.pop("step"), EVALUATION, 0))


def _covers_whole_job(run: RecordedRun) -> bool:
    return run.simulated and sum(run.stands_for.values()) == run.world_size


def _finish_of_job(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    table = table.assign(part=table["part"].map({EVALUATION: "evaluations", -1: "start-up", 0: "training steps"}))
    if not _covers_whole_job(run):
        table = table.iloc[:0]
    ranks = table["process"].map({at: process.tables.stands_for[1] for at, process in enumerate(run.processes)})
    sums = table.assign(**{name: table[name] * ranks.astype(np.int64) for name in SUMS})
    result = mask_unknown_wire(sums.groupby(["part", "op"], as_index=False)[SUMS].sum())
    return {"whole_job": result.sort_values(["part", "payload_bytes"], ascending=[True, False], ignore_index=True)}


WHOLE_JOB: Final = Analysis(
    "whole_job", _partial_of_job, merge_sums("process", "part", "op"), _finish_of_job, _covers_whole_job
)
