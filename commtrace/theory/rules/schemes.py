"""Schemes: who predicts which kind of job, and what tensor parallelism adds to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from commtrace.theory.expected_calls import Prediction
from commtrace.theory.job import Job, NotPredictedError

from .deepspeed import engine as zero
from .deepspeed import experts, pipeline, ulysses, zero3, zero12
from .megatron import ring_attention as ring
from .megatron import sequence_parallel as megatron_sequence
from .megatron import tensor_parallel as tensor
from .torch import ddp, dtensor, fsdp

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


def _of_dtensors(job: Job) -> bool:
    """Whether ranks share a model of DTensors beneath `fully_shard`."""
    return "tensor_plan" in job.row and job.row.get("source") == "fsdp"


def _as_it_is(job: Job) -> bool:
    """Whether the scheme's own rules know of all that ranks share."""
    return job.row.get("source") in ("fsdp", "dtensor") or job.row.get("engine") == "PipelineEngine"


SHARED: Final[tuple[tuple[Callable[[Job], bool], Callable[[Job, Prediction], Prediction]], ...]] = (
    (_of_dtensors, dtensor.extend_prediction),
    (_as_it_is, lambda job, data: data),
    (megatron_sequence.applies, megatron_sequence.extend_prediction),
    (tensor.applies, tensor.extend_prediction),
    (ulysses.applies, ulysses.extend_prediction),
    (ring.applies, ring.extend_prediction),
    (experts.applies, experts.extend_prediction),
)
"""What is added to the scheme of data parallelism, by the first that a job fits; together they have no rules yet."""


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
        return _shared(job, SCHEMES[kind](job))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise NotPredictedError(f"the job in the log cannot be read ({type(error).__name__}: {error})") from error


def _shared(job: Job, data: Prediction) -> Prediction:
    """With what ranks send that share a model, a sequence or experts."""
    for applies, added in SHARED:
        if applies(job):
            return added(job, data)
    return data
