"""Predicted volumes of a job that has not run: the closed form and every call, as rows of tables.

Volumes are bytes, of one rank and of all ranks together. Payload is nccl-tests' size S, counted once on every rank that
takes part. Wire bytes are the fewest bytes that ranks can send (`commtrace.volume`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.configs.job_plan import plan_job
from commtrace.theory.configs.plan_options import DEFAULT_OPTIONS, JobPlan, PlanError, PlanOptions
from commtrace.theory.expected_calls import total_wire_bytes

START: Final = "start-up"


@dataclass(frozen=True)
class Forecast:
    """What every rank of a planned job will communicate."""

    plan: JobPlan
    predictions: tuple[Prediction, ...]
    """One prediction, or one for each pipeline stage; all stages have equal numbers of ranks."""

    @property
    def prediction(self) -> Prediction:
        """The prediction for a rank; in a pipeline, for a rank of the first stage."""
        return self.predictions[0]

    @property
    def has_stages(self) -> bool:
        """Whether the job is a pipeline of several stages."""
        return len(self.predictions) > 1

    @property
    def ranks_per_prediction(self) -> int:
        """Number of ranks for which each of `predictions` holds."""
        return self.plan.layout.world_size // len(self.predictions)


def forecast(files: Sequence[str], world: int, options: PlanOptions = DEFAULT_OPTIONS) -> Forecast:
    """Predict what a job will communicate from its configuration files; arguments as in `plan_job`.

    Raises:
        PlanError: If the files and options do not describe a valid job, or there are no rules for it.
    """
    try:
        plan = plan_job(files, world, options)
        return Forecast(plan, tuple(predict(row) for row in plan.rows))
    except NotPredictedError as error:
        raise PlanError(f"{', '.join(files)}: not predicted: {error}") from error


def periods(prediction: Prediction) -> Iterator[tuple[str, tuple[ExpectedCall, ...]]]:
    """Yield the name and calls of each period: start-up, each step that differs from later ones, and later steps."""
    yield START, prediction.start
    for number in range(prediction.steady):
        yield f"step {number}", prediction.step(number)
    yield f"steps from {prediction.steady}", prediction.step(prediction.steady)


def period_groups(
    job: Forecast,
) -> Iterator[tuple[dict[str, Any], Prediction, dict[tuple[str, str], list[ExpectedCall]]]]:
    """Yield the first cells of a period's rows, its prediction, and its calls by role and operation."""
    for stage, prediction in enumerate(job.predictions):
        for name, calls in periods(prediction):
            groups = defaultdict[tuple[str, str], list[ExpectedCall]](list)
            for call in calls:
                groups[call.role, call.op].append(call)
            yield {**_stage_cell(job, stage), "when": name}, prediction, dict(sorted(groups.items()))


def _stage_cell(job: Forecast, stage: int) -> dict[str, Any]:
    return {"stage": stage} if job.has_stages else {}


def volume_rows(job: Forecast) -> Iterator[dict[str, Any]]:
    """Yield a row for each period, role and operation, and a total ("all") for each period.

    In a pipeline there are such rows for each `stage`; columns `all_ranks_...` are sums over the ranks of the stage.
    """
    for cells, prediction, groups in period_groups(job):
        for (role, op), calls in groups.items():
            yield {**cells, "role": role, "op": op, **_volume(job, prediction, calls)}
        total = [call for calls in groups.values() for call in calls]
        yield {**cells, "role": "all", "op": "all", **_volume(job, prediction, total)}


def _volume(job: Forecast, prediction: Prediction, calls: Sequence[ExpectedCall]) -> dict[str, Any]:
    has_bounds = any(call.max_calls is not None for call in calls)
    max_calls = sum(call.calls if call.max_calls is None else call.max_calls for call in calls)
    payload = sum(call.bytes for call in calls)
    wire = sum((total_wire_bytes([call], prediction.ranks_of(call.role)) for call in calls), Fraction(0))
    return {
        "calls": sum(call.calls for call in calls),
        "calls_max": max_calls if has_bounds else None,
        "payload_bytes": payload,
        "wire_bytes": number(wire),
        "all_ranks_payload_bytes": payload * job.ranks_per_prediction,
        "all_ranks_wire_bytes": number(wire * job.ranks_per_prediction),
    }


def size_rows(job: Forecast) -> Iterator[dict[str, Any]]:
    """Yield a row for each role, operation and message size of a rank in a steady step; in a pipeline, by stage."""
    for stage, prediction in enumerate(job.predictions):
        counts = Counter[tuple[str, str, int]]()
        for call in prediction.step(prediction.steady):
            counts[call.role, call.op, call.payload] += call.calls
        for (role, op, payload), calls in sorted(counts.items()):
            sizes = {"payload_bytes": payload, "calls": calls, "sum_bytes": payload * calls}
            yield {**_stage_cell(job, stage), "role": role, "op": op, **sizes}


def size_bin_rows(job: Forecast) -> Iterator[dict[str, Any]]:
    """Yield `size_rows` by powers of two: sizes from `from_bytes` up to, but not including, `below_bytes`.

    Messages without payload are in the bin from 0 to 1.
    """
    calls, total = Counter[tuple[int, str, str, int]](), Counter[tuple[int, str, str, int]]()
    for row in size_rows(job):
        low = 1 << (row["payload_bytes"].bit_length() - 1) if row["payload_bytes"] else 0
        key = (row.get("stage", 0), row["role"], row["op"], low)
        calls[key] += row["calls"]
        total[key] += row["sum_bytes"]
    for key in sorted(calls):
        stage, role, op, low = key
        sizes = {"from_bytes": low, "below_bytes": low * 2 or 1, "calls": calls[key], "sum_bytes": total[key]}
        yield {**_stage_cell(job, stage), "role": role, "op": op, **sizes}


def waterfall_rows(job: Forecast) -> Iterator[dict[str, Any]]:
    """Yield a row for each bar from the closed form to the wire bytes of a step; in a pipeline, by stage."""
    for stage, prediction in enumerate(job.predictions):
        for position, bar in enumerate((prediction.closed_form, *prediction.bars)):
            if bar.bytes or not position:
                cells = {"stage": stage, "role": bar.role if position else "all"} if job.has_stages else {}
                yield {**cells, "label": bar.label, "wire_bytes": number(bar.bytes)}


def number(value: Fraction) -> int | float:
    """Return an int where the value is a whole number."""
    return int(value) if value.denominator == 1 else float(value)


def json_document(job: Forecast) -> dict[str, Any]:
    """Return the forecast as `commtrace theory --json` prints it."""
    layout, form = job.plan.layout, job.prediction.closed_form
    elements = [row.elements for row in job.plan.rows]
    pipeline = {"pipeline_stages": len(elements), "stage_parameters": elements} if job.has_stages else {}
    return {
        "scheme": job.prediction.scheme,
        "world_size": layout.world_size,
        "data_parallel_size": layout.data_parallel_size,
        "tensor_parallel_size": layout.tensor_parallel_size,
        **pipeline,
        "sequence_parallel_size": layout.sequence_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "parameters": sum(elements),
        "assumed": [*job.plan.assumed],
        "closed_form": {
            "label": form.label,
            "wire_bytes": number(form.bytes),
            "all_ranks_wire_bytes": number(form.bytes * layout.world_size),
        },
        "waterfall": [*waterfall_rows(job)],
        "volumes": [*volume_rows(job)],
        "message_sizes": [*size_rows(job)],
        "message_size_bins": [*size_bin_rows(job)],
    }
