"""Volume of each training step, times of its calls, and the typical step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

from commtrace.durations import MEASURES, durations
from commtrace.formatting import format_bytes, format_plural, format_share
from commtrace.reading.recorded_run import RecordedRun

from . import timeline
from .fold_engine import Analysis, NamedTables
from .grouping import merge_sums, rows_of
from .record_blocks import EVALUATION, RecordBlock, mask_unknown_sizes, table_by
from .sections import Block, Paragraph, Report, Section, ShownTable, Tables
from .table_specs import shared_columns as shared
from .table_specs.spec import TableSpec, bytes_column, count, duration

ALL: Final = "all"
SUMS: Final = ["calls", "payload_bytes", "wire_bytes", "payload_unknown", "wire_unknown"]

VOLUME_BY_STEP: Final = TableSpec("volume_by_step", "Volume by step", "A row per step, ascending.", (
    shared.STEP, shared.CALLS, shared.PAYLOAD, shared.WIRE,
))  # fmt: skip
STEADY_STEP: Final = TableSpec("steady_step", "A training step",
    'A row for "all", then one per operation, by payload. Steps in which a process ended, or runs, do not count. No '
    "rows if the log has no other training step.", (
    shared.OP,
    count("calls_per_rank", "calls", "Calls of the median step, per recorded rank."),
    bytes_column("payload_bytes_per_rank", "payload", "Payload of the median step, per recorded rank."),
    bytes_column("wire_bytes_per_rank", "wire (min)", "Wire bytes of the median step, per recorded rank."),
    bytes_column("payload_bytes_min", "", "Payload of the smallest step, summed over the recorded ranks."),
    bytes_column("payload_bytes_max", "", "Payload of the largest step, summed over the recorded ranks."),
    count("steps", "steps", "Training steps in the log."),
    count("differing_steps", "", "Steps whose calls or payload differ from the median.", optional=True),
), {"terminal": "op calls_per_rank payload_bytes_per_rank wire_bytes_per_rank differing_steps"})  # fmt: skip
STEPS_BY_OPERATION: Final = TableSpec("steps_by_operation", "Volume and time of each step",
    "A row per step and operation.", (
    shared.STEP, shared.OP, *shared.PER_RANK,
    duration("in_call_ns_per_rank", "in calls",
        "Time inside calls, per recorded rank, overlaps counted in full; missing if not known."),
    duration("waiting_ns_per_rank", "waiting", "Time waiting for ends, per recorded rank."),
    duration("to_completion_ns_per_rank", "to completion", "Time from calls to their ends, per recorded rank."),
))  # fmt: skip


def _partial(block: RecordBlock) -> pd.DataFrame:
    calls = block.distinct_calls_by("step")
    return table_by(calls, ("step", "op"), calls.volumes)


def _finish(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    table = _selected(table, run)
    steps = table.groupby("step", as_index=False)[SUMS].sum()
    # A step in which a process ended may lack calls.
    training = steps.loc[is_complete(steps["step"], run)].assign(op=ALL)
    # The sum comes first, so that the stable sort below keeps it before the operation of a run that has only one.
    all_and_each = pd.concat([training, table.loc[is_complete(table["step"], run)]]) if len(training) else training
    rows = [
        _steady(str(op), rows, training["step"], ranks_seen(run)) for op, rows in all_and_each.groupby("op", sort=False)
    ]
    steady = pd.DataFrame(rows, columns=STEADY_STEP.column_names)
    return {
        "volume_by_step": mask_unknown_sizes(steps),
        "steady_step": steady.sort_values("payload_bytes_max", ascending=False, kind="stable", ignore_index=True),
    }


def _selected(table: pd.DataFrame, run: RecordedRun) -> pd.DataFrame:
    """Return the rows of selected steps. The log may have calls of other steps that were in flight at its end."""
    return table.loc[run.select_steps(table["step"].to_numpy())]


def is_complete(steps: pd.Series[int], run: RecordedRun) -> pd.Series[bool]:
    """Return whether steps are training steps that every process completed, shape (n,)."""
    return (steps >= 0) & (steps < (np.iinfo(np.int64).max if run.cut_step is None else run.cut_step))


def ranks_seen(run: RecordedRun) -> int:
    """Return the number of ranks to divide by: those that left a log, at least 1."""
    return max(1, len({process.rank for process in run.processes}))


def _steady(op: str, rows: pd.DataFrame, steps: pd.Series[int], ranks: int) -> dict[str, object]:
    by_step = rows.set_index("step")[SUMS].reindex(steps, fill_value=0)
    median = by_step.median()
    known_payload = np.nan if by_step["payload_unknown"].any() else 1
    differs = (by_step["calls"] != median["calls"]) | (by_step["payload_bytes"] != median["payload_bytes"])
    return {
        "op": op,
        "calls_per_rank": median["calls"] / ranks,
        "payload_bytes_per_rank": known_payload * median["payload_bytes"] / ranks,
        "wire_bytes_per_rank": np.nan if by_step["wire_unknown"].any() else median["wire_bytes"] / ranks,
        "payload_bytes_min": known_payload * by_step["payload_bytes"].min(),
        "payload_bytes_max": known_payload * by_step["payload_bytes"].max(),
        "steps": len(steps),
        "differing_steps": int(differs.sum()),
    }


ANALYSIS: Final = Analysis("steps", _partial, merge_sums("step", "op"), _finish, reads_cells=True)


def _partial_by_operation(block: RecordBlock) -> pd.DataFrame:
    values = dict(block.volumes)
    for measure in MEASURES:
        times = durations(measure, block)
        values[f"{measure}_ns"] = np.maximum(times, 0)
        values[f"{measure}_known"] = (times >= 0).astype(np.int64)
    return table_by(block, ("step", "op"), values)


def _finish_by_operation(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    ranks = ranks_seen(run)
    sums = mask_unknown_sizes(_selected(table, run))
    result = sums[["step", "op"]]
    for column in ("calls", "payload_bytes", "wire_bytes"):
        result[f"{column}_per_rank"] = sums[column] / ranks
    for measure in MEASURES:
        result[f"{measure}_ns_per_rank"] = (sums[f"{measure}_ns"] / ranks).where(sums[f"{measure}_known"] > 0)
    return {"steps_by_operation": result}


BY_OPERATION: Final = Analysis(
    "steps_by_operation", _partial_by_operation, merge_sums("step", "op"), _finish_by_operation
)


def _show(report: Report) -> Iterator[Block]:
    steps, steady = report.tables["volume_by_step"], report.tables["steady_step"]
    if not len(steady):
        cut = steps.loc[steps["step"] >= 0, "step"]
        if len(cut):
            step = int(cut.min())
            yield Paragraph(f"The log has no complete training step: a process ended, or still runs, in step {step:,}.")
        else:
            yield Paragraph("The log has no training step: all calls belong to start-up or evaluations.")
        return
    number, differing = int(steady["steps"].iloc[0]), int(steady["differing_steps"].max())
    basis = (
        f"median of {number:,} steps, {differing:,} of them different"
        if differing
        else f"all {number:,} steps identical"
    )
    basis = "the only step" if number == 1 else basis
    yield ShownTable(STEADY_STEP, report.rows(STEADY_STEP), f"A training step, mean per recorded rank: {basis}")
    for step, name in ((-1, "Start-up, before the first step"), (EVALUATION, "Evaluations, outside of steps")):
        rows = steps.loc[steps["step"] == step]
        if len(rows) or step == -1:
            calls, payload = format_plural(int(rows["calls"].sum()), "call"), format_bytes(rows["payload_bytes"].sum())
            yield Paragraph(f"{name}: {calls}, payload {payload}, over all ranks.")


_NOT_SENT: Final = " The recorded ranks send none of it."


def _largest_operations(tables: Tables) -> Iterator[str]:
    steady = tables["steady_step"]
    total = float(steady.loc[steady["op"] == ALL, "payload_bytes_per_rank"].sum())
    if total:
        largest = steady.loc[steady["op"] != ALL].nlargest(3, "payload_bytes_per_rank")
        shares = [(row.payload_bytes_per_rank / total, row.op) for row in rows_of(largest)]
        operations = ", ".join(f"{format_share(share)} {op}" for share, op in shares if share >= 0.01)
        unsent = not steady["wire_bytes_per_rank"].any()
        yield f"A training step moves {format_bytes(total)} per rank: {operations}.{_NOT_SENT if unsent else ''}"


STEPS_SECTION: Final = Section(
    "steps",
    "By step",
    (STEADY_STEP, VOLUME_BY_STEP),
    (ANALYSIS,),
    details=((STEPS_BY_OPERATION, BY_OPERATION), (timeline.TIMELINE, timeline.ANALYSIS)),
    blocks=_show,
    findings=_largest_operations,
)
