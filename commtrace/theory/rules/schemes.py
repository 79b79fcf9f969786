"""Selection of rules: which module predicts a job, and which one adds the calls of another parallel dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from commtrace.job_row import JobRow
from commtrace.theory.expected_calls import Prediction
from commtrace.theory.job import Job, NotPredictedError, reading_job

from .deepspeed import engine, experts, pipeline, zero3, zero12
from .megatron import gpt_neox, sequence_parallel, tensor_parallel
from .torch import ddp, fsdp

SCHEMES: Final[dict[tuple[str | None, str | None, int | None], Callable[[Job], Prediction]]] = {
    ("ddp", "DistributedDataParallel", None): ddp.predict,
    ("fsdp", "fully_shard", None): fsdp.predict,
    ("deepspeed", "DeepSpeedEngine", 0): engine.predict,
    ("deepspeed", "DeepSpeedEngine", 1): zero12.predict,
    ("deepspeed", "DeepSpeedEngine", 2): zero12.predict,
    ("deepspeed", "DeepSpeedEngine", 3): zero3.predict,
    ("deepspeed", "PipelineEngine", 0): pipeline.predict,
    ("deepspeed", "PipelineEngine", 1): pipeline.predict,
}
"""Functions that predict a job, by its source, engine and ZeRO stage."""


EXTENSIONS: Final[dict[str, Callable[[Job, Prediction], Prediction]]] = {
    "tensor and sequence": sequence_parallel.extend_prediction,
    "tensor": tensor_parallel.extend_prediction,
}
"""Functions that add the calls of another parallel dimension to the data-parallel prediction of a job.

The remaining dimensions have rules only for particular programs, which add them here, as `examples.gpt_neox.theory`
does.
"""

_HINT: Final = "compare with a dry run (commtrace check DIR --dryrun -- CMD) or with a baseline"


def extended_dimension(job: Job) -> str | None:
    """Return a job's key in EXTENSIONS, or None. A combination of dimensions has a key of its own, or no rules."""
    if job.row.source == "fsdp" and job.row.has(JobRow.tensor_plan):
        return "DTensor"
    if job.row.source in ("fsdp", "dtensor") or job.has_pipeline_engine:
        return None  # their own rules cover all parallel dimensions
    if job.tensor > 1:
        along_sequence = job.declares_architecture and job.model.sequence_parallel
        return "tensor and sequence" if along_sequence else "tensor"
    sizes = {"sequence": job.sequence > 1, "context": job.context > 1, "expert": job.has_experts}
    return next((dimension for dimension, is_used in sizes.items() if is_used), None)


def predict(row: JobRow | Mapping[str, Any]) -> Prediction:
    """Predict what one rank of a job communicates.

    Args:
        row: A row of the log's `job` table (docs/reference/log-format.md), or one from `commtrace.theory.configs`.

    Raises:
        NotPredictedError: With the reason, if there are no rules for the job, or its row lacks what they need.
    """
    with reading_job():
        return _predict(Job(row if isinstance(row, JobRow) else JobRow.read(row)))


def predict_parameters(row: JobRow) -> Prediction:
    """Predict what one rank of a job sends of parameters and gradients in a step, and of other tensors if it can.

    Unlike `predict`, it predicts jobs whose tokens for experts no rule has. Their prediction has no calls with tokens,
    and its waterfall is that of data parallelism.

    Raises:
        NotPredictedError: As `predict`.
    """
    with reading_job():
        job = Job(row)
        tokens_unknown = extended_dimension(job) == experts.ROLE and experts.ROLE not in EXTENSIONS
        return experts.extend_parameters(job, _predict_data(job)) if tokens_unknown else _predict(job)


def _predict_data(job: Job) -> Prediction:
    """Predict the calls among data-parallel ranks, and all others that the rules of the engine have."""
    row = job.row
    stage = row.get(JobRow.zero_stage, None)
    if (row.source, row.engine, stage) not in SCHEMES:
        zero = "" if stage is None else f" with ZeRO stage {stage}"
        raise NotPredictedError(f"there are no rules for {row.source} {row.engine}{zero}; {_HINT}")
    if job.is_gpt_neox:
        gpt_neox.check(job)
    return SCHEMES[row.source, row.engine, stage](job)


def _predict(job: Job) -> Prediction:
    prediction = _predict_data(job)
    dimension = extended_dimension(job)
    if dimension is not None:
        if dimension not in EXTENSIONS:
            raise NotPredictedError(f"there are no rules for {dimension} parallelism; {_HINT}")
        if prediction.has_special_steps:
            raise NotPredictedError(f"steps that differ have no rules for {dimension} parallelism; {_HINT}")
        prediction = EXTENSIONS[dimension](job, prediction)
    return gpt_neox.extend_prediction(job, prediction) if job.is_gpt_neox else prediction
