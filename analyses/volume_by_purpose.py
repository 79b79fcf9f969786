"""Volume by purpose, parallel dimension and operation: of the whole run, and of the typical step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from commtrace.reading.labels import NOT_RECORDED
from commtrace.reading.recorded_run import RecordedRun

from .compare import step_by_purpose
from .compare.own_calls import ACTIVITY_NAMES
from .fold_engine import Analysis, NamedTables
from .grouping import merge_sums
from .record_blocks import RecordBlock, known_total, mask_unknown_sizes, table_by
from .sections import Block, Report, Section, ShownTable
from .steps import SUMS, is_complete, ranks_seen
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, bytes_column, count, text_column

_KEYS: Final = ["purpose", "role", "op"]
_PER_RANK: Final = {name: f"{name}_per_rank" for name in ("calls", "payload_bytes", "wire_bytes")}

VOLUME_BY_PURPOSE: Final = TableSpec("volume_by_purpose", "Volume by purpose",
    "A row per purpose, dimension and operation, the largest payload first.", (
    text_column("purpose", "purpose",
        'Why the library made the calls; "the program\'s own": no library did; "not recorded": the log is of an older '
        "commtrace, the calls are of a library without hooks for purposes, or call sites are off.", shortenable=True),
    shared.ROLE, shared.OP,
    count("calls_per_rank", "calls/step",
        "Calls per recorded rank, median of the training steps without an activity such as a checkpoint; missing for "
        "activities and without training steps."),
    bytes_column("payload_bytes_per_rank", "payload/step", "Their payload, likewise."),
    bytes_column("wire_bytes_per_rank", "wire (min)/step", "Their wire bytes, likewise."),
    shared.CALLS, shared.PAYLOAD, shared.WIRE, replace(shared.PAYLOAD_SHARE, optional=True),
), {"terminal": "purpose role op calls_per_rank payload_bytes_per_rank payload_share"},
)  # fmt: skip


PURPOSES_BY_STEP: Final = TableSpec("purposes_by_step", "Volume of each step by purpose",
    "A row per step, purpose, dimension and operation.", (
    shared.STEP, VOLUME_BY_PURPOSE.column("purpose"), shared.ROLE, shared.OP, *shared.PER_RANK,
))  # fmt: skip


def _partial(block: RecordBlock) -> pd.DataFrame:
    calls = block.distinct_calls_by("step")
    return table_by(calls, ("step", *_KEYS), calls.volumes)


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    totals = table.groupby(_KEYS, as_index=False)[SUMS].sum()
    total = known_total(totals)
    shares = totals["payload_bytes"] / total if total else float("nan")
    result = mask_unknown_sizes(totals).assign(payload_share=shares)
    result = result.merge(_typical_step(table, run), on=_KEYS, how="left")
    order = result.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable", ignore_index=True)
    return {"volume_by_purpose": order[list(VOLUME_BY_PURPOSE.column_names)]}


def _typical_step(table: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    """Return the median of the typical steps for each key, per recorded rank; a step without calls counts as 0.

    Typical are training steps without an activity such as a checkpoint, or all of them if there are no others.
    """
    training = table.loc[is_complete(table["step"], run) & run.select_steps(table["step"].to_numpy())]
    with_activity = training.loc[training["purpose"].isin(ACTIVITY_NAMES), "step"]
    typical = training.loc[~training["step"].isin(with_activity)]
    training = typical if len(typical) else training
    if not len(training):
        return pd.DataFrame(columns=[*_KEYS, *_PER_RANK.values()])
    by_step = mask_unknown_sizes(training).set_index([*_KEYS, "step"])[[*_PER_RANK]].unstack("step")
    absent = by_step["calls"].isna().to_numpy()
    medians = {
        column: np.median(np.where(absent, 0, by_step[name].to_numpy(float)), axis=1) / ranks_seen(run)
        for name, column in _PER_RANK.items()
    }
    return pd.DataFrame(medians, index=by_step.index).reset_index()


def _finish_by_step(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    result = mask_unknown_sizes(table.loc[run.select_steps(table["step"].to_numpy())]).reset_index(drop=True)
    for name, column in _PER_RANK.items():
        result[column] = result[name] / ranks_seen(run)
    return {"purposes_by_step": result[list(PURPOSES_BY_STEP.column_names)]}


BY_STEP: Final = Analysis("purposes_by_step", _partial, merge_sums("step", *_KEYS), _finish_by_step, reads_cells=True)
BY_PURPOSE: Final = Analysis("volume_by_purpose", _partial, merge_sums("step", *_KEYS), _finish, reads_cells=True)


def _show(report: Report) -> Iterator[Block]:
    rows = report.rows(VOLUME_BY_PURPOSE)
    if report.sections_chosen or (rows["purpose"] != NOT_RECORDED).any():
        yield ShownTable(VOLUME_BY_PURPOSE, rows)
        yield from step_by_purpose.show(report)


PURPOSES_SECTION: Final = Section(
    "purposes",
    "By purpose",
    (VOLUME_BY_PURPOSE, step_by_purpose.STEP_BY_PURPOSE, step_by_purpose.STEP_BY_PLACE),
    (BY_PURPOSE,),
    details=((PURPOSES_BY_STEP, BY_STEP),),
    blocks=_show,
    look_for="Why the calls were made, as the libraries that made them know it.",
)
