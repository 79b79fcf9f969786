"""Rules by kind of job: which module predicts which job, and what extends the prediction for other dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from commtrace.theory.expected_calls import Prediction
from commtrace.theory.job import Job, NotPredictedError

from .deepspeed import engine, experts, pipeline, ulysses, zero3, zero12
from .megatron import ring_attention, sequence_parallel, tensor_parallel
from .torch import ddp, dtensor, fsdp

SCHEMES: Final[dict[tuple[str, str, int | None], Callable[[Job], Prediction]]] = {
    ("ddp", "DistributedDataParallel", None): ddp.predict,
    ("fsdp", "fully_shard", None): fsdp.predict,
    ("dtensor", "parallelize_module", None): dtensor.predict,
    ("deepspeed", "DeepSpeedEngine", 0): engine.predict,
    ("deepspeed", "DeepSpeedEngine", 1): zero12.predict,
    ("deepspeed", "DeepSpeedEngine", 2): zero12.predict,
    ("deepspeed", "DeepSpeedEngine", 3): zero3.predict,
    ("deepspeed", "PipelineEngine", 0): pipeline.predict,
    ("deepspeed", "PipelineEngine", 1): pipeline.predict,
}
"""Predictions by source, engine and ZeRO stage of the job."""


EXTENSIONS: Final[tuple[tuple[Callable[[Job], bool], Callable[[Job, Prediction], Prediction]], ...]] = (
    (lambda job: "tensor_plan" in job.row and job.row.get("source") == "fsdp", dtensor.extend_prediction),
    # Schemes whose own rules cover all parallel dimensions:
    (lambda job: job.row.get("source") in ("fsdp", "dtensor"), lambda job, data: data),
    (lambda job: job.row.get("engine") == "PipelineEngine", lambda job, data: data),
    (
        lambda job: job.tensor > 1 and bool(job.row.get("model", {}).get("sequence_parallel")),
        sequence_parallel.extend_prediction,
    ),
    (lambda job: job.tensor > 1, tensor_parallel.extend_prediction),
    (lambda job: job.sequence > 1, ulysses.extend_prediction),
    (lambda job: job.context > 1, ring_attention.extend_prediction),
    (lambda job: bool(job.row.get("moe")), experts.extend_prediction),
)
"""Conditions, and functions that extend the data-parallel prediction of a job by the calls in another dimension.

The first whose condition holds is used; several dimensions together have no rules yet.
"""


def predict(row: Mapping[str, Any]) -> Prediction:
    """Predict what one rank of a job communicates.

    Args:
        row: A row of the log's `job` table (`commtrace.schema`), or one from `commtrace.theory.configs`.

    Raises:
        NotPredictedError: With the reason, if there are no rules for the job, or its row lacks what they need.
    """
    stage = row.get("zero_stage")
    if not isinstance(stage, int | None):
        raise NotPredictedError(f"the job in the log cannot be read (zero_stage: {stage})")
    source, engine_name = str(row.get("source")), str(row.get("engine"))
    if (source, engine_name, stage) not in SCHEMES:
        zero = "" if stage is None else f" with ZeRO stage {stage}"
        raise NotPredictedError(f"there are no rules for {source} {engine_name}{zero} yet")
    try:
        job = Job(row)
        prediction = SCHEMES[source, engine_name, stage](job)
        extend = next((extend for applies, extend in EXTENSIONS if applies(job)), None)
        return prediction if extend is None else extend(job, prediction)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise NotPredictedError(f"the job in the log cannot be read ({type(error).__name__}: {error})") from error
