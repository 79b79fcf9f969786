"""Runs side by side.

`runs`, a row per run: `run` (the name it was given), `path`, `id`, `job`, `ranks_seen`, `world_size`, `steps`, then of
a training step (`steady_step`) `calls_per_rank`, `payload_bytes_per_rank`, `wire_bytes_per_rank`, `differing_steps`,
and `tracing_share` (mean over the processes that tell) of the run's time.

`runs_by_operation`, a row per run, `part` ("whole run", start-up included, or "training step") and `op`:
`calls_per_rank`, `payload_bytes_per_rank`, `wire_bytes_per_rank`.

`runs_predicted`, a row per run: `predicted_bytes` and `measured_bytes`, what one rank sends in a training step, at
least, by the closed form and in the log; missing where there is no prediction.

`runs_by_role`, a row per run and parallel dimension (`role`): `payload_bytes_per_rank` and `wire_bytes_per_rank` of the
whole run, mean over its ranks.

`runs_predicted_by_role`, a row per run and `role` that has a formula of its own: `form`, `predicted_bytes` and
`measured_bytes` of a training step, as the formula counts: of one rank, but of a pipeline what all of its stages send
to each other (tensor-parallel ranks of a stage added up, replicas of the pipeline not).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd

from commtrace.run import Run

from .engine import NamedTables
from .report.preface import job_line
from .steps import ALL

WHOLE, STEP = "whole run", "training step"

_VOLUMES: Final = ["calls_per_rank", "payload_bytes_per_rank", "wire_bytes_per_rank"]


def compare(runs: Mapping[str, Run], tables: Mapping[str, NamedTables] | None = None) -> NamedTables:
    """The tables of these runs, by the names they are given. `tables`: those of each run, where they are at hand."""
    told = {name: run.tables() for name, run in runs.items()} if tables is None else tables
    return {
        "runs": pd.DataFrame([_run(name, run, told[name]) for name, run in runs.items()]),
        "runs_by_operation": pd.concat(
            [_operations(name, run, told[name]) for name, run in runs.items()], ignore_index=True
        ),
        "runs_predicted": pd.DataFrame([_predicted(name, told[name]) for name in runs]).astype(
            {"predicted_bytes": float, "measured_bytes": float}
        ),
        "runs_by_role": pd.concat([_roles(name, run, told[name]) for name, run in runs.items()], ignore_index=True),
        "runs_predicted_by_role": pd.DataFrame(
            [row for name, run in runs.items() for row in _predicted_by_role(name, run, told[name])],
            columns=["run", "role", "form", "predicted_bytes", "measured_bytes"],
        ),
    }


def names_of(paths: Sequence[Path]) -> dict[str, Path]:
    """The paths by names as short as tell them apart: their last parts, numbered where two paths are the same."""
    parts = [path.absolute().parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len({*parts}):
        length += 1
    names = ["/".join(part[-length:]) for part in parts]
    numbered = [
        name if names.count(name) == 1 else f"{name} ({names[: at + 1].count(name)})" for at, name in enumerate(names)
    ]
    return dict(zip(numbered, paths, strict=True))


def _run(name: str, run: Run, tables: NamedTables) -> dict[str, object]:
    steady = tables["steady_step"]
    step = next((row for _, row in steady.loc[steady["op"] == ALL].iterrows()), None)
    coverage = tables["coverage"].iloc[0]
    return {
        "run": name,
        "path": str(run.log.path),
        "id": run.id,
        "job": job_line(run),
        "ranks_seen": coverage["ranks_seen"],
        "world_size": coverage["world_size"],
        "steps": 0 if step is None else int(step["steps"]),
        **{column: None if step is None else step[column] for column in (*_VOLUMES, "differing_steps")},
        "tracing_share": tables["tracing_cost"]["share"].mean(),
    }


def _operations(name: str, run: Run, tables: NamedTables) -> pd.DataFrame:
    ranks = max(1, len({process.rank for process in run.processes}))
    whole = tables["volume_by_operation"]
    steady = tables["steady_step"]
    columns: dict[str, Any] = {
        f"{column}_per_rank": whole[column] / ranks for column in ("calls", "payload_bytes", "wire_bytes")
    }
    parts = [
        whole[["op"]].assign(part=WHOLE, **columns),
        steady.loc[steady["op"] != ALL, ["op", *_VOLUMES]].assign(part=STEP),
    ]
    both = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return both.assign(run=name)[["run", "part", "op", *_VOLUMES]]


def _predicted(name: str, tables: NamedTables) -> dict[str, object]:
    waterfall = tables.get("waterfall")
    told = {} if waterfall is None else waterfall.groupby("kind")["bytes"].sum().to_dict()
    return {"run": name, "predicted_bytes": told.get("closed form"), "measured_bytes": told.get("measured")}


def _roles(name: str, run: Run, tables: NamedTables) -> pd.DataFrame:
    ranks = max(1, len({process.rank for process in run.processes}))
    whole = tables["volume_by_role"]
    columns: dict[str, Any] = {
        f"{column}_per_rank": whole[column] / ranks for column in ("payload_bytes", "wire_bytes")
    }
    return whole[["role"]].assign(run=name, **columns)


def _predicted_by_role(name: str, run: Run, tables: NamedTables) -> Iterator[dict[str, object]]:
    parts = tables.get("waterfall_by_role")
    for role, rows in () if parts is None else parts.groupby("role", sort=False):
        form, measured = rows.iloc[0], rows.iloc[-1]
        if form["bytes"]:
            sent = _between_stages(run, tables) if role == "pipeline" else measured["bytes"]
            told = {"role": role, "form": form["label"], "predicted_bytes": float(form["bytes"])}
            yield {"run": name, **told, "measured_bytes": sent}


def _between_stages(run: Run, tables: NamedTables) -> float:
    """What the stages of one pipeline send to each other in the last step that all ranks have."""
    cells = tables["reconciliation"]
    step = cells.groupby("rank")["step"].max().min()
    sends = cells.loc[(cells["step"] == step) & (cells["role"] == "pipeline") & (cells["op"] == "send")]
    replicas = (run.job or {}).get("data_parallel_size") or 1
    return float(sends["measured_bytes"].sum()) / float(replicas)
