"""Tables of runs by number of ranks."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd

from commtrace.analyses.analysed_run import AnalysedRun
from commtrace.analyses.fold_engine import NamedTables
from commtrace.errors import CommtraceError, LogError
from commtrace.formatting import format_plural
from commtrace.job_facts import known
from commtrace.job_row import JobRow, ModelSettings
from commtrace.rank_ranges import parse_ranks
from commtrace.theory import NotPredictedError, predict

from .fits import fit_runs
from .scaling_specs import SCALING_SETTINGS
from .setup_differences import setup_differences
from .step_times import StepTimes, step_times

MEANS: Final = ["step_ns", "blocked_ns", "late_ns", "in_flight_ns", "calls", "payload_bytes", "wire_bytes"]


def scaling(runs: Mapping[str, AnalysedRun], tokens: Sequence[int] | None = None) -> NamedTables:
    """Return the tables of these runs.

    Args:
        runs: The runs by name.
        tokens: Tokens of a step of the whole job, for each run or one number for all. None: those in the log.

    Raises:
        CommtraceError: The runs have fewer than two different numbers of ranks, or no log has times.
    """
    tokens_of = _tokens_by_run(runs, tokens)
    measured, left_out = {}, {}
    for name, run in runs.items():
        try:
            measured[name] = step_times(run)
        except LogError as reason:
            left_out[name] = str(reason)
    if not measured:
        raise CommtraceError("; ".join(left_out.values()))
    ranks = pd.concat(
        [
            times.steps.groupby("rank", as_index=False)[MEANS].mean().assign(run=name, on_device=times.on_device)
            for name, times in measured.items()
        ],
        ignore_index=True,
    )  # fmt: skip
    ranks["compute_ns"] = (ranks["step_ns"] - ranks["blocked_ns"]).mask(ranks["on_device"])
    rows = [
        _row(name, runs[name], times, ranks.loc[ranks["run"] == name], tokens_of[name])
        for name, times in measured.items()
    ]
    table = pd.DataFrame(rows).sort_values("ranks", kind="stable", ignore_index=True)
    if table["ranks"].nunique() < 2:
        raise CommtraceError(
            "scaling compares runs with different numbers of ranks; "
            + ", ".join([*(f"{row['run']} has {row['ranks']}" for row in rows), *left_out.values()])
        )
    known = table["tokens_per_step"].notna().all()
    rate = (table["tokens_per_step"].astype(float) if known else 1.0) / table["step_ns"]
    table["speedup"] = rate / rate.iloc[0]
    table["efficiency"] = table["speedup"] * table["ranks"].iloc[0] / table["ranks"]
    fits, projection = fit_runs(table, pd.concat([times.messages.assign(run=name) for name, times in measured.items()]))
    return {
        "scaling": table,
        "scaling_ranks": ranks[["run", "rank", *MEANS, "compute_ns"]],
        "scaling_fits": fits,
        "scaling_projection": projection,
        "scaling_left_out": pd.DataFrame(left_out.items(), columns=["run", "reason"], dtype=object),
        "scaling_settings": pd.DataFrame(
            setup_differences({name: runs[name] for name in table["run"]}),
            columns=SCALING_SETTINGS.column_names,
            dtype=object,
        ),
    }


def _tokens_by_run(runs: Mapping[str, AnalysedRun], tokens: Sequence[int] | None) -> dict[str, int | None]:
    if not tokens:
        return {name: tokens_per_step(run) for name, run in runs.items()}
    if len(tokens) not in (1, len(runs)):
        raise CommtraceError(f"--tokens: {len(tokens)} numbers for {len(runs)} runs; give one, or one for each")
    return dict(zip(runs, tokens if len(tokens) > 1 else [*tokens] * len(runs), strict=True))


def tokens_per_step(run: AnalysedRun) -> int | None:
    """Return the tokens of a step of the whole job, None if the captured job does not have its model's shape."""
    job = JobRow.read(run.job or {})
    return known(lambda: _tokens_of_batch(job.model) * _data_replicas(run, job)) or None


def _tokens_of_batch(model: ModelSettings) -> int:
    return model.train_micro_batch_size_per_gpu * model.seq_length * model.gradient_accumulation_steps


def _data_replicas(run: AnalysedRun, job: JobRow) -> int:
    """Return how many ranks have their own samples.

    The data-parallel size of DDP and DeepSpeed includes ranks that share sequences in a ring.
    """
    replicas, model = job.data_parallel_size, job.model
    if not replicas or run.world_size is None:
        return replicas
    sharing = (
        (known(lambda: job.pipeline_stages) or 1)
        * (known(lambda: model.model_parallel_size) or 1)
        * (known(lambda: model.sequence_parallel_size) or 1)
        * (known(lambda: model.context_parallel_size) or 1)
    )
    return min(replicas, run.world_size // sharing)


def _row(name: str, run: AnalysedRun, times: StepTimes, ranks: pd.DataFrame, tokens: int | None) -> dict[str, object]:
    means = ranks[[*MEANS, "compute_ns"]].mean()
    slowest = float(ranks["step_ns"].max())
    compute = None if times.on_device else float(means["compute_ns"])
    return {
        "run": name,
        "ranks": run.world_size or len(run.ranks),
        "hosts": len({process.host for process in run.processes}),
        "steps": times.steps["step"].nunique() if times.marked else 0,
        "step_ns": slowest,
        "tokens_per_step": tokens,
        "tokens_per_s": None if tokens is None else tokens / slowest * 1e9,
        "speedup": None,
        "efficiency": None,
        "compute_ns": compute,
        **{part: float(means[part]) for part in MEANS[1:]},
        **_expected(run),
        "communication_per_compute": None if not compute else float(means["blocked_ns"]) / compute,
        "late_known": times.late_known,
        "shared_cores": shared_cores(run),
    }


def _expected(run: AnalysedRun) -> dict[str, object]:
    jobs = next((process.tables.jobs for process in run.processes if process.tables.jobs), {})
    try:
        if len(jobs) != 1:
            raise NotPredictedError(f"{len(jobs)} models")
        prediction = predict(next(iter(jobs.values())))
    except NotPredictedError:
        return {"closed_form_bytes": None, "expected_wire_bytes": None}
    form = prediction.closed_form.bytes
    expected = form + sum(bar.bytes for bar in prediction.bars)
    return {"closed_form_bytes": round(form), "expected_wire_bytes": round(expected)}


def shared_cores(run: AnalysedRun) -> str:
    """Return "4 ranks on 2 cores" if ranks of a host share cores; "" if none do, or if their cores are not known."""
    ranks_by_host: dict[str, Counter[str]] = defaultdict(Counter)
    for process in run.processes:
        ranks_by_host[process.host][str(process.tables.process.get("cores") or "")] += 1
    for ranks_by_cores in ranks_by_host.values():
        if "" in ranks_by_cores:
            continue
        for cores, ranks in {",".join(ranks_by_cores): sum(ranks_by_cores.values()), **ranks_by_cores}.items():
            with contextlib.suppress(ValueError):  # cores of a damaged log may not parse
                if ranks > len(parse_ranks(cores)):
                    return f"{ranks} ranks on {format_plural(len(parse_ranks(cores)), 'core')}"
    return ""
