"""Schemes: who predicts which kind of job, and what tensor parallelism adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from . import ddp, dtensor, fsdp, pipeline, tensor, zero, zero3, zero12
from .job import Job, NotPredictedError
from .messages import Prediction

SCHEMES: Final[dict[tuple[str, str, int | None], Callable[[Job], Prediction]]] = {
    ("ddp", "DistributedDataParallel", None): ddp.predict,
    ("fsdp", "fully_shard", None): fsdp.predict,
    ("dtensor", "parallelize_module", None): dtensor.predict,
    ("deepspeed", "DeepSpeedEngine", 0): zero.predict,
    ("deepspeed", "DeepSpeedEngine", 1): zero12.predict,
    ("deepspeed", "DeepSpeedEngine", 2): zero12.predict,
    ("deepspeed", "DeepSpeedEngine", 3): zero3.predict,
    ("deepspeed", "PipelineEngine", 0): pipeline.predict,
    ("deepspeed", "PipelineEngine", 1): pipeline.predict,
}
"""By the job's source, engine and ZeRO stage."""


def predict(row: Mapping[str, Any]) -> Prediction:
    """What one rank of a job communicates; the row is one of the log's `job` table.

    Raises NotPredictedError with the reason where there are no rules for the job, or its row lacks what they need.
    """
    stage = row.get("zero_stage")
    if not isinstance(stage, int | None):
        raise NotPredictedError(f"the job in the log cannot be read (zero_stage: {stage})")
    kind = (str(row.get("source")), str(row.get("engine")), stage)
    if kind not in SCHEMES:
        named = " ".join(str(part) for part in kind[:2]) + ("" if stage is None else f" with ZeRO stage {stage}")
        raise NotPredictedError(f"there are no rules for {named} yet")
    try:
        job = Job(row)
        found = SCHEMES[kind](job)
        if kind[0] == "fsdp" and "tensor_plan" in row:
            return dtensor.added(job, found)
        # A pipeline's rules know of the tensor parallelism of its stages.
        knows = kind[0] == "dtensor" or kind[1] == "PipelineEngine"
        return tensor.added(job, found) if job.tensor > 1 and not knows else found
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise NotPredictedError(f"the job in the log cannot be read ({type(error).__name__}: {error})") from error
