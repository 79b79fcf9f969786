"""Runs side by side: calls and volume of a training step of each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pandas as pd

from commtrace.formatting import format_small_share
from commtrace.job_facts import known
from commtrace.job_row import JobRow
from commtrace.run import Run

from .fold_engine import NamedTables
from .grouping import concat_tables
from .job_summary import summarize_job
from .steps import ALL, ranks_seen
from .table_specs.shared_columns import OP, PER_RANK, ROLE, RUN
from .table_specs.spec import TableSpec, bytes_column, column, count, text_column, word_column

RUNS: Final = TableSpec("runs", "Runs side by side", "A row per run, in the given order.", (
    RUN,
    text_column("path", "path", "Log directory."),
    word_column("id", "id", "Identifier of the run."),
    text_column("job", "job", 'What was trained; "" if it was not captured.'),
    count("ranks_seen", "ranks", "Ranks that left a log."),
    count("world_size", "world size", "Ranks of the job; missing if not known."),
    count("steps", "steps", "Training steps in the log."),
    *(replace(each, meaning=f"{each.meaning[:-1]}, in a training step.") for each in PER_RANK),
    count("differing_steps", "", "Steps whose calls or payload differ from the median."),
    column("fraction", format_small_share, "tracing_share", "tracing cost",
        "Share of the run's time that recording calls and writing took, mean over the processes.", optional=True),
), {
    "terminal": "run ranks_seen steps calls_per_rank payload_bytes_per_rank wire_bytes_per_rank tracing_share",
    "page": "run job ranks_seen steps calls_per_rank payload_bytes_per_rank wire_bytes_per_rank tracing_share",
})  # fmt: skip
RUNS_BY_OPERATION: Final = TableSpec("runs_by_operation", "Operations of runs side by side",
    "A row per run, part and operation.", (
    RUN,
    word_column("part", "part", '"whole run", start-up included, or "training step".'),
    OP, *PER_RANK,
))  # fmt: skip
RUNS_PREDICTED: Final = TableSpec("runs_predicted", "Wire bytes of the closed form, and recorded", "A row per run.", (
    RUN,
    bytes_column("predicted_bytes", "predicted", "Wire bytes of a rank's step by the closed form."),
    bytes_column("measured_bytes", "recorded", "Wire bytes of a rank's step in the log; missing if not predicted."),
))  # fmt: skip
RUNS_BY_ROLE: Final = TableSpec("runs_by_role", "Parallel dimensions of runs side by side",
    "A row per run and dimension, whole runs.", (
    ROLE, RUN, *PER_RANK[1:],
))  # fmt: skip
RUNS_PREDICTED_BY_ROLE: Final = TableSpec("runs_predicted_by_role",
    "Wire bytes of the closed form, and recorded, by parallel dimension",
    "A row per run and dimension that has a closed form.", (
    RUN, ROLE,
    text_column("form", "form", "The closed form."),
    bytes_column("predicted_bytes", "predicted",
        "Wire bytes of a step by the closed form: of one rank, or of all stages of a pipeline."),
    bytes_column("measured_bytes", "recorded", "Wire bytes of a step in the log, counted likewise."),
))  # fmt: skip
TABLES: Final = (RUNS, RUNS_BY_OPERATION, RUNS_PREDICTED, RUNS_BY_ROLE, RUNS_PREDICTED_BY_ROLE)

FULL_RUN, TRAINING_STEP = "whole run", "training step"

_VOLUMES: Final = ["calls_per_rank", "payload_bytes_per_rank", "wire_bytes_per_rank"]


def compare(runs: Mapping[str, Run], tables: Mapping[str, NamedTables] | None = None) -> NamedTables:
    """Compare runs.

    Args:
        runs: The runs by name, which the column `run` of the tables has.
        tables: The tables of each run, by the same names. None: compute them.

    Returns:
        The tables, by name.
    """
    tables = {name: run.tables() for name, run in runs.items()} if tables is None else tables
    arguments = [(name, run, tables[name]) for name, run in runs.items()]
    predicted = pd.DataFrame([_predicted_row(name, tables[name]) for name in runs])
    by_role = [row for run_arguments in arguments for row in _predicted_by_role(*run_arguments)]
    return {
        "runs": pd.DataFrame([_run_row(*run_arguments) for run_arguments in arguments]),
        "runs_by_operation": pd.concat([_operations(*run_arguments) for run_arguments in arguments], ignore_index=True),
        "runs_predicted": predicted.astype({"predicted_bytes": float, "measured_bytes": float}),
        "runs_by_role": pd.concat([_roles(*run_arguments) for run_arguments in arguments], ignore_index=True),
        "runs_predicted_by_role": pd.DataFrame(by_role, columns=RUNS_PREDICTED_BY_ROLE.column_names),
    }


def short_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the paths by short name: the fewest trailing parts that distinguish them. Equal paths are numbered."""
    components = [path.absolute().parts for path in paths]
    length = 1
    while len({path[-length:] for path in components}) < len({*components}):
        length += 1
    names = ["/".join(path[-length:]) for path in components]
    numbered = [
        name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
        for index, name in enumerate(names)
    ]
    return dict(zip(numbered, paths, strict=True))


def _run_row(name: str, run: Run, tables: NamedTables) -> dict[str, object]:
    steady = tables["steady_step"]
    step = next((row for _, row in steady.loc[steady["op"] == ALL].iterrows()), None)
    coverage = tables["coverage"].iloc[0]
    return {
        "run": name,
        "path": str(run.log.path),
        "id": run.id,
        "job": summarize_job(run),
        "ranks_seen": coverage["ranks_seen"],
        "world_size": coverage["world_size"],
        "steps": 0 if step is None else int(step["steps"]),
        **{column: None if step is None else step[column] for column in (*_VOLUMES, "differing_steps")},
        "tracing_share": tables["tracing_cost"]["share"].mean(),
    }


def _operations(name: str, run: Run, tables: NamedTables) -> pd.DataFrame:
    by_operation, steady = tables["volume_by_operation"], tables["steady_step"]
    per_rank = _per_rank(run, by_operation, "calls", "payload_bytes", "wire_bytes")
    frames = [
        by_operation[["op"]].assign(part=FULL_RUN, **per_rank),
        steady.loc[steady["op"] != ALL, ["op", *_VOLUMES]].assign(part=TRAINING_STEP),
    ]
    return concat_tables(frames).assign(run=name)[["run", "part", "op", *_VOLUMES]]


def _per_rank(run: Run, table: pd.DataFrame, *columns: str) -> dict[str, Any]:
    return {f"{column}_per_rank": table[column] / ranks_seen(run) for column in columns}


def _predicted_row(name: str, tables: NamedTables) -> dict[str, object]:
    waterfall = tables.get("waterfall")
    sums = {} if waterfall is None else waterfall.groupby("kind")["bytes"].sum().to_dict()
    return {"run": name, "predicted_bytes": sums.get("closed form"), "measured_bytes": sums.get("measured")}


def _roles(name: str, run: Run, tables: NamedTables) -> pd.DataFrame:
    table = tables["volume_by_role"]
    return table[["role"]].assign(run=name, **_per_rank(run, table, "payload_bytes", "wire_bytes"))


def _predicted_by_role(name: str, run: Run, tables: NamedTables) -> Iterator[dict[str, object]]:
    by_role = tables.get("waterfall_by_role")
    for role, rows in () if by_role is None else by_role.groupby("role", sort=False):
        form, measured = rows.iloc[0], rows.iloc[-1]
        if form["bytes"]:
            yield {
                "run": name,
                "role": role,
                "form": form["label"],
                "predicted_bytes": float(form["bytes"]),
                "measured_bytes": _sent_by_stages(run, tables) if role == "pipeline" else measured["bytes"],
            }


def _sent_by_stages(run: Run, tables: NamedTables) -> float:
    """Return the bytes that the stages of one pipeline send to each other in the last step that all ranks have."""
    cells = tables["reconciliation"]
    step = cells.groupby("rank")["step"].max().min()
    sends = cells.loc[(cells["step"] == step) & (cells["role"] == "pipeline") & (cells["op"] == "send")]
    job = JobRow.read(run.job or {})
    replicas = known(lambda: job.data_parallel_size) or 1
    return float(sends["measured_bytes"].sum()) / float(replicas)
