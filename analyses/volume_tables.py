"""Volume by operation, parallel dimension, phase, call site and rank, and of the whole job.

`whole_job` scales a dry run of some ranks up to the job: a call counts once for each rank that its rank represents. The
table has no rows if the run is real, or if the simulated ranks do not represent every rank of the job.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import pandas as pd

from commtrace.formatting import format_bytes, format_plural, format_share, is_known
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.summary_reader import MIXED

from .fold_engine import Analysis, NamedTables
from .grouping import group_rows, merge_sums, sum_groups
from .record_blocks import EVALUATION, RecordBlock, known_total, mask_unknown_sizes, steps_of, table_by
from .sections import Block, Paragraph, Report, Section, ShownTable, Tables, first_of
from .steps import SUMS
from .table_specs import shared_columns as shared
from .table_specs.equivalent_ranks import ALIKE
from .table_specs.spec import TableSpec, bytes_column, count, ratio, word_column

SHOWN_RANKS: Final = 16
"""Ranks shown one by one."""

_BY_PAYLOAD: Final = "A row per {}, the largest payload first."

VOLUME_BY_OPERATION: Final = TableSpec("volume_by_operation", "Volume by operation", _BY_PAYLOAD.format("operation"), (
    shared.OP, *shared.VOLUME,
))  # fmt: skip
VOLUME_BY_ROLE: Final = TableSpec("volume_by_role", "Volume by parallel dimension", _BY_PAYLOAD.format("dimension"), (
    shared.ROLE, *shared.VOLUME,
))  # fmt: skip
VOLUME_BY_ROLE_AND_OPERATION: Final = TableSpec("volume_by_role_and_operation",
    "Volume by parallel dimension and operation", _BY_PAYLOAD.format("dimension and operation"), (
    shared.ROLE, shared.OP, *shared.VOLUME,
))  # fmt: skip
VOLUME_BY_PHASE: Final = TableSpec("volume_by_phase", "Volume by phase", _BY_PAYLOAD.format("phase"), (
    shared.PHASE, *shared.VOLUME,
))  # fmt: skip
VOLUME_BY_SITE: Final = TableSpec("volume_by_site", "Volume by call site",
    _BY_PAYLOAD.format("call site and operation"), (
    shared.SITE, shared.OP, shared.CALLS, shared.PAYLOAD,
    replace(shared.WIRE, optional=True),
    replace(shared.PAYLOAD_SHARE, head="share"),
))  # fmt: skip
WHOLE_JOB: Final = TableSpec("whole_job", "Volume of the whole job, of a dry run",
    "A row per part and operation. Calls of a rank that ran count for all ranks that it represents. No rows "
    "unless the ranks that ran represent all ranks of the job.", (
    word_column("part", "part", '"start-up", "training steps" or "evaluations".'),
    shared.OP,
    count("calls", "calls", "Calls of all ranks of the job."),
    bytes_column("payload_bytes", "payload", "Their payload."),
    bytes_column("wire_bytes", "wire (min)", "Wire bytes of all ranks."),
))  # fmt: skip
RANKS: Final = TableSpec("ranks", "Load balance across ranks", "A row per rank that left a log, ascending.", (
    shared.RANK,
    count("calls", "calls", "Its calls."),
    bytes_column("payload_bytes", "payload", "Its payload."),
    bytes_column("wire_bytes", "wire (min)", "Wire bytes."),
    count("training_calls", "", "Its calls in training steps."),
    bytes_column("training_payload_bytes", "in training steps", "Its payload in training steps."),
    ratio("payload_of_median", "x median", "training_payload_bytes / that of the median rank."),
), {"terminal": "rank calls payload_bytes wire_bytes training_payload_bytes payload_of_median"},
    merge_by="rank")  # fmt: skip


def _partial(keys: tuple[str, ...], block: RecordBlock) -> pd.DataFrame:
    return table_by(block.distinct_calls, keys, block.distinct_calls.volumes)


def _finish(name: str, table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    total = known_total(table)
    shares = table["payload_bytes"] / total if total else float("nan")
    result = mask_unknown_sizes(table).assign(payload_share=shares)
    return {name: result.sort_values(["payload_bytes", "calls"], ascending=False, kind="stable", ignore_index=True)}


def _by(spec: TableSpec, *keys: str) -> Analysis:
    """Return the analysis that sums calls and volumes by the key columns of a table."""
    return Analysis(
        spec.name, partial(_partial, keys), merge_sums(*keys), partial(_finish, spec.name), reads_cells=True
    )


BY_OPERATION: Final = _by(VOLUME_BY_OPERATION, "op")
BY_ROLE: Final = _by(VOLUME_BY_ROLE, "role")
BY_ROLE_AND_OPERATION: Final = _by(VOLUME_BY_ROLE_AND_OPERATION, "role", "op")
BY_PHASE: Final = _by(VOLUME_BY_PHASE, "phase")
BY_SITE: Final = _by(VOLUME_BY_SITE, "site", "op")
ANALYSES: Final = (BY_OPERATION, BY_ROLE, BY_ROLE_AND_OPERATION, BY_PHASE, BY_SITE)


def _partial_by_rank(block: RecordBlock) -> pd.DataFrame:
    rows = block.distinct_calls_by("process", "step")
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
    if (filled["payload_unknown"] > 0).any():
        filled = filled.assign(
            training_payload_bytes=filled["training_payload_bytes"].mask(filled["payload_unknown"] > 0)
        )
    median = filled["training_payload_bytes"].median()
    share = filled["training_payload_bytes"] / median if median else np.nan
    return {"ranks": mask_unknown_sizes(filled).assign(payload_of_median=share)}


BY_RANK: Final = Analysis("balance", _partial_by_rank, merge_sums("rank"), _finish_by_rank, reads_cells=True)


def _partial_of_job(block: RecordBlock) -> pd.DataFrame:
    rows = block.distinct_calls_by("process", "step")
    table = table_by(rows, ("process", "step", "op"), rows.volumes)
    return table.assign(part=np.clip(table.pop("step"), EVALUATION, 0))


def _covers_whole_job(run: RecordedRun) -> bool:
    return run.simulated and sum(run.stands_for.values()) == run.world_size


def _finish_of_job(table: pd.DataFrame, run: RecordedRun) -> NamedTables:
    table = table.assign(part=table["part"].map({EVALUATION: "evaluations", -1: "start-up", 0: "training steps"}))
    if not _covers_whole_job(run):
        table = table.iloc[:0]
    ranks = table["process"].map({at: process.tables.stands_for[1] for at, process in enumerate(run.processes)})
    sums = table.assign(**{name: table[name] * ranks.astype(np.int64) for name in SUMS})
    result = mask_unknown_sizes(sums.groupby(["part", "op"], as_index=False)[SUMS].sum())
    return {"whole_job": result.sort_values(["part", "payload_bytes"], ascending=[True, False], ignore_index=True)}


OF_WHOLE_JOB: Final = Analysis(
    "whole_job", _partial_of_job, merge_sums("process", "part", "op"), _finish_of_job, _covers_whole_job
)


def _only_role(tables: Tables) -> str:
    roles = tables["volume_by_role"]["role"]
    return str(roles.iloc[0]) if len(roles) == 1 else ""


def _show_operations(report: Report) -> Iterator[Block]:
    if not len(report.tables["volume_by_operation"]):
        return
    role = _only_role(report.tables)
    title = "By operation, totals over the recorded ranks" + (f"; parallel dimension: {role}" if role else "")
    yield ShownTable(VOLUME_BY_OPERATION, report.rows(VOLUME_BY_OPERATION), title)


def _show_dimensions(report: Report) -> Iterator[Block]:
    if report.sections_chosen or not _only_role(report.tables):
        yield ShownTable(VOLUME_BY_ROLE_AND_OPERATION, report.rows(VOLUME_BY_ROLE_AND_OPERATION))


def _show_sites(report: Report) -> Iterator[Block]:
    table = report.tables["volume_by_site"]
    shown = table.head(report.sites) if report.sites else table
    yield ShownTable(VOLUME_BY_SITE, shown, "By call site" + first_of(len(shown), len(table)))


def _largest_site(tables: Tables) -> Iterator[str]:
    sites = tables["volume_by_site"]
    if len(sites) and is_known(sites["payload_share"].iloc[0]) and sites["payload_bytes"].iloc[0]:
        site = sites["site"].iloc[0] or "which was not recorded"
        yield f"{format_share(sites['payload_share'].iloc[0])} of the payload comes from one call site, {site}."


def _show_ranks(report: Report) -> Iterator[Block]:
    table = report.tables["ranks"]
    if len(table) > 1 and all(table[column].nunique() == 1 for column in ("calls", "payload_bytes")):
        calls = format_plural(int(table["calls"].iloc[0]), "call")
        payload = format_bytes(table["payload_bytes"].iloc[0])
        yield Paragraph(f"All {len(table):,} recorded ranks are identical: {calls} and a payload of {payload} each.")
        return
    rows = report.rows(RANKS)
    if len(table) <= SHOWN_RANKS or ALIKE in rows:
        yield ShownTable(RANKS, rows)
        return
    half = SHOWN_RANKS // 2
    ordered = table.sort_values("payload_bytes", kind="stable")
    yield ShownTable(RANKS, pd.concat([ordered.head(half), ordered.tail(half)]))
    yield Paragraph(f"The {half} ranks with the least payload and the {half} with the most, of {len(table):,}.")


OPERATIONS_SECTION: Final = Section(
    "operations",
    "By operation",
    (VOLUME_BY_OPERATION,),
    (BY_OPERATION,),
    blocks=_show_operations,
    absent="The log has no calls.",
)
WHOLE_JOB_SECTION: Final = Section(
    "whole-job",
    "The whole job (simulated): each rank that ran counts for all ranks that it represents",
    (WHOLE_JOB,),
    (OF_WHOLE_JOB,),
)
DIMENSIONS_SECTION: Final = Section(
    "dimensions",
    "By parallel dimension",
    (VOLUME_BY_ROLE, VOLUME_BY_ROLE_AND_OPERATION),
    (BY_ROLE, BY_ROLE_AND_OPERATION),
    blocks=_show_dimensions,
)
PHASES_SECTION: Final = Section("phases", "By phase of the step", (VOLUME_BY_PHASE,), (BY_PHASE,))
SITES_SECTION: Final = Section(
    "call-sites",
    "By call site",
    (VOLUME_BY_SITE,),
    (BY_SITE,),
    blocks=_show_sites,
    look_for="Lines of code that made the calls, outside of the wrappers of torch and DeepSpeed. Sums over the ranks.",
    findings=_largest_site,
)
RANKS_SECTION: Final = Section("ranks", "Load balance across ranks", (RANKS,), (BY_RANK,), blocks=_show_ranks)
