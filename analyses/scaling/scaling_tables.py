"""Runs by number of ranks, as tables.

`scaling`, a row per run, by ranks. Times are ns of one training step; those of a run are its slowest rank's `step_ns`,
and means over its ranks for the parts:

    run, ranks, hosts, steps        steps that were measured; 0: the program marks none, and all of it counts as one
    step_ns                         mean duration
    tokens_per_step, tokens_per_s   of the whole job, missing where neither the log nor the user says
    speedup, efficiency             against the run with the fewest ranks, per token; as if each step had the same work
                                    where tokens are not known
    compute_ns                      the step without `blocked_ns`; missing where a device's clock saw ends
    blocked_ns, late_ns, in_flight_ns    `commtrace.analyses.scaling.step_times`; late is a part of blocked
    calls, payload_bytes, wire_bytes     of a rank and step, means; the payload of a message counts where it is sent
    expected_wire_bytes, closed_form_bytes    of a step of the lowest rank, where theory has rules for its job
    communication_per_compute       blocked_ns / compute_ns
    late_known                      share of the time in calls for which it is known who was late
    shared_cores                    "4 ranks on 2 cores" where ranks of a host take turns, else ""

`scaling_ranks`, a row per run and rank: the same times and volumes.

`scaling_fits`, a row per fitted number: `model`, `parameter`, `value`, `unit`, `error` (largest relative difference
between the model and what was measured; missing where there are no more runs than parameters).

`scaling_left_out`: `run`, `reason`.

`scaling_projection`, rows for the measured numbers of ranks and, where the model meets those within GOOD_FIT, for 2, 4
and 8 times the most: `ranks`, `step_ns`,
`measured_ns` (missing: not run), `speedup`, `efficiency`, and the parts `compute_ns`, `latency_ns`, `bandwidth_ns`,
`late_ns`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd

from commtrace.analyses.engine import NamedTables
from commtrace.errors import CommtraceError, LogError
from commtrace.formatting import parse_ranks
from commtrace.reading.run import RecordedRun
from commtrace.reading.table_reader import integer_or_none
from commtrace.theory import NotPredictedError, predict

from .fits import fitted
from .step_times import StepTimes, step_times

PARTS: Final = ["step_ns", "blocked_ns", "late_ns", "in_flight_ns", "calls", "payload_bytes", "wire_bytes"]


def scaling(runs: Mapping[str, RecordedRun], tokens: Sequence[int] | None = None) -> NamedTables:
    """The tables of these runs. `tokens`: of a step of the whole job, for each run or one number for all.

    Raises CommtraceError for fewer than two numbers of ranks, or where a log has no times.
    """
    given = _given(runs, tokens)
    measured, left_out = _measured(runs)
    runs = {name: runs[name] for name in measured}
    ranks = pd.concat(
        [
            one.steps.groupby("rank", as_index=False)[PARTS].mean().assign(run=name)
            for name, one in measured.items()
        ],
        ignore_index=True,
    )  # fmt: skip
    told = [_row(name, run, measured[name], ranks.loc[ranks["run"] == name], given) for name, run in runs.items()]
    table = pd.DataFrame(told).sort_values("ranks", kind="stable", ignore_index=True)
    if table["ranks"].nunique() < 2:
        raise CommtraceError(
            "scaling compares runs of different numbers of ranks; "
            + ", ".join([*(f"{row['run']} has {row['ranks']}" for row in told), *left_out.values()])
        )
    table = _compared(table)
    models, projection = fitted(table, pd.concat([one.messages.assign(run=name) for name, one in measured.items()]))
    first = ["run", "rank"]
    return {
        "scaling": table,
        "scaling_ranks": ranks[[*first, *PARTS]].assign(
            compute_ns=(ranks["step_ns"] - ranks["blocked_ns"]).mask(ranks["run"].map(_on_device(measured)))
        ),
        "scaling_fits": models,
        "scaling_projection": projection,
        "scaling_left_out": pd.DataFrame(left_out.items(), columns=["run", "reason"], dtype=object),
    }


def _measured(runs: Mapping[str, RecordedRun]) -> tuple[dict[str, StepTimes], dict[str, str]]:
    """What was measured of each run, and why nothing was of the others."""
    measured, left_out = {}, {}
    for name, run in runs.items():
        try:
            measured[name] = step_times(run)
        except LogError as reason:
            left_out[name] = str(reason)
    if not measured:
        raise CommtraceError("; ".join(left_out.values()))
    return measured, left_out


def _on_device(measured: Mapping[str, StepTimes]) -> dict[str, bool]:
    return {name: one.on_device for name, one in measured.items()}


def _given(runs: Mapping[str, RecordedRun], tokens: Sequence[int] | None) -> dict[str, int | None]:
    if not tokens:
        return {name: tokens_of(run) for name, run in runs.items()}
    if len(tokens) not in (1, len(runs)):
        raise CommtraceError(f"--tokens: {len(tokens)} numbers for {len(runs)} runs; give one, or one for each")
    return dict(zip(runs, tokens if len(tokens) > 1 else [*tokens] * len(runs), strict=True))


def tokens_of(run: RecordedRun) -> int | None:
    """Of a step of the whole job, where the captured job has its model's shape."""
    job: Mapping[str, Any] = run.job or {}
    model = job.get("model")
    if not isinstance(model, Mapping):
        return None
    names = ("train_micro_batch_size_per_gpu", "seq_length", "gradient_accumulation_steps")
    found = [integer_or_none(model.get(name)) for name in names] + [_samples_of_their_own(run, job, model)]
    product = 1
    for number in found:
        if not number:
            return None
        product *= number
    return product


def _samples_of_their_own(run: RecordedRun, job: Mapping[str, Any], model: Mapping[str, Any]) -> int | None:
    """Ranks that get samples of their own. To DDP and DeepSpeed those that share sequences in a ring are such, too."""
    told = integer_or_none(job.get("data_parallel_size"))
    if not told or run.world_size is None:
        return told
    shared = integer_or_none(job.get("pipeline_stages")) or 1
    for name in ("model_parallel_size", "sequence_parallel_size", "context_parallel_size"):
        shared *= integer_or_none(model.get(name)) or 1
    return min(told, run.world_size // shared)


def _row(
    name: str, run: RecordedRun, times: StepTimes, ranks: pd.DataFrame, tokens: Mapping[str, int | None]
) -> dict[str, object]:
    means = ranks[PARTS].mean()
    slowest = float(ranks["step_ns"].max())
    work = tokens[name]
    compute = None if times.on_device else float(means["step_ns"] - means["blocked_ns"])
    return {
        "run": name,
        "ranks": run.world_size or len(run.ranks),
        "hosts": len({process.host for process in run.processes}),
        "steps": times.steps["step"].nunique() if times.marked else 0,
        "step_ns": slowest,
        "tokens_per_step": work,
        "tokens_per_s": None if work is None else work / slowest * 1e9,
        "compute_ns": compute,
        **{part: float(means[part]) for part in PARTS[1:]},
        **_expected(run),
        "communication_per_compute": None if not compute else float(means["blocked_ns"]) / compute,
        "late_known": times.late_known,
        "shared_cores": shared_cores(run),
    }


def _expected(run: RecordedRun) -> dict[str, object]:
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


def shared_cores(run: RecordedRun) -> str:
    """Ranks that must take turns on their host's cores, in words; "" where none must, or where the log has no cores."""
    bound: dict[str, Counter[str]] = defaultdict(Counter)
    for process in run.processes:
        bound[process.host][str(process.tables.process.get("cores") or "")] += 1
    for sets in bound.values():
        if "" in sets:
            continue
        everywhere = parse_ranks(",".join(sets))
        crowded = [
            (sum(sets.values()), len(everywhere)),
            *((ranks, len(parse_ranks(text))) for text, ranks in sets.items()),
        ]
        for ranks, cores in crowded:
            if ranks > cores:
                return f"{ranks} ranks on {cores} {'core' if cores == 1 else 'cores'}"
    return ""


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    """With speedup and efficiency against the first row."""
    known = table["tokens_per_step"].notna().all()
    work = table["tokens_per_step"].astype(float) if known else pd.Series(1.0, index=table.index)
    rate = work / table["step_ns"]
    speedup = rate / rate.iloc[0]
    at = list(table.columns).index("compute_ns")
    result = table.copy()
    result.insert(at, "speedup", speedup)
    result.insert(at + 1, "efficiency", speedup * table["ranks"].iloc[0] / table["ranks"])
    return result
