"""DeepSpeed's engine without ZeRO (ZeRO-0), and what all ZeRO stages share.

Assumptions that the captured job cannot confirm: the order of gradients (see `gradients`); every parameter is used in
every micro-batch; no step is skipped because of an overflow.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from commtrace.theory.closed_forms import all_gather_volume, data_parallel
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import ALONE, Job, ModelTensor, element_size, grouped, refuse
from commtrace.theory.rules.gradients import buckets_exceeding_limit
from commtrace.theory.rules.registry import DEEPSPEED, rule

GRADIENTS: Final = "gradients"
NORM: Final = "norm of the gradients"
OVERFLOW: Final = "overflow check"
AMONG_COPIES: Final = "experts travel among the ranks that have them"

FALLBACK_BUCKET: Final = 500_000_000
"""Elements of a bucket without ZeRO (numel_per_bucket, MEMORY_OPT_ALLREDUCE_SIZE); not a setting."""

_KNOWN_OPTIMIZERS: Final = ("AdamW", "Adam", "SGD", "FusedAdam", "DeepSpeedCPUAdam", "Adagrad", "RMSprop")


def check(job: Job) -> None:
    """Raise NotPredictedError for settings of the engine that have no rules yet."""
    is_zero_3 = job.row.zero_stage == 3
    stages, optimizer = job.row.pipeline_stages, job.row.basic_optimizer
    refuse(
        (job.row.sequence_parallel_size != 1 and is_zero_3, "ZeRO-3 with Ulysses has no rules yet"),
        (int(stages) != 1, f"{stages} pipeline stages have no rules yet"),
        (job.row.sparse_gradients, "sparse gradients have no rules yet"),  # DeepSpeed 0.19 has no such setting
        (job.row.moe and is_zero_3, "ZeRO-3 with mixtures of experts has no rules yet"),
        (optimizer not in _KNOWN_OPTIMIZERS, f"the optimizer {optimizer} has no rules yet"),
        (job.ranks < 2 and job.tensor < 2, ALONE),
    )


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates under ZeRO-0. Raise NotPredictedError for settings without rules."""
    check(job)
    step = (*fallback_gradients(job), *fallback_norm(job))
    form = WaterfallBar("equation 2: 2 P (d-1)/d", data_parallel(job.elements, job.ranks) * job.parameter_size)
    levels = gradient_levels(job, passes=2)
    levels["gradients of other types"] = total_wire_bytes(step, job.ranks, GRADIENTS)
    bars = (*level_bars(form.bytes, levels), *cause_bars(step, job.ranks, GRADIENTS))
    return Prediction("ZeRO-0", job.ranks, tuple(broadcast_model(job)), (step,), form, bars)


def gradient_levels(job: Job, passes: int = 1) -> dict[str, Fraction]:
    """Return the waterfall levels of trained parameters, of the dtype in which gradients are reduced, and of experts.

    They are the bytes that a rank sends in a reduce_scatter or, with two `passes`, in an all_reduce.
    """
    dtype = communication_dtype(job)
    size = element_size(dtype)
    return {
        "frozen parameters have no gradients": passes * ring_bytes(job, job.trainable_elements, job.parameter_size),
        f"gradients travel as {dtype}": passes * ring_bytes(job, job.trainable_elements, size),
        AMONG_COPIES: passes * copies_bytes(job, size),
    }


def ring_bytes(job: Job, elements: int, size: int) -> Fraction:
    """Return the bytes that a rank sends in a reduce_scatter or all_gather of elements of `size` bytes."""
    return all_gather_volume(elements, job.ranks) * size


def copies_bytes(job: Job, size: int) -> Fraction:
    """Return `ring_bytes` of the trained parameters, each among the ranks that have it."""
    volumes = (all_gather_volume(parameter.elements, job.copies(parameter)) for parameter in job.trainable)
    return sum(volumes, Fraction(0)) * size


@rule("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", DEEPSPEED)
def broadcast_model(job: Job) -> list[ExpectedCall]:
    """Return the broadcasts of rank 0, one per parameter, as uint8."""
    cause = "first parameters, one broadcast each, as uint8"
    return [
        among_copies(job, parameter, ExpectedCall("broadcast", parameter.bytes, cause)) for parameter in job.parameters
    ]


@rule("deepspeed.runtime.engine.DeepSpeedEngine._reduce_expert_gradients; "
      "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._configure_moe_settings", DEEPSPEED)  # fmt: skip
def among_copies(job: Job, parameter: ModelTensor, call: ExpectedCall) -> ExpectedCall:
    """Return a parameter's call, among the ranks that have the parameter if it belongs to an expert."""
    return call.among(job.copies(parameter)) if parameter.expert else call


@rule("deepspeed.runtime.engine.DeepSpeedEngine.communication_data_type", DEEPSPEED)
def communication_dtype(job: Job) -> str:
    """Return the dtype in which gradients are reduced: the parameters', unless the configuration sets another."""
    return job.row.communication_data_type


@rule("deepspeed.runtime.engine.DeepSpeedEngine.buffered_allreduce_fallback", DEEPSPEED)
def fallback_gradients(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of gradients after a step's last backward pass, by dtype, in registration order.

    Gradients of experts are all_reduced separately, among the ranks that have them.
    """
    size = element_size(communication_dtype(job))
    return [
        among_copies(job, parameters[0], ExpectedCall("all_reduce", elements * size, GRADIENTS))
        for parameters in grouped(job.trainable, lambda parameter: (parameter.dtype, parameter.expert))
        for elements in buckets_exceeding_limit((parameter.elements for parameter in parameters), FALLBACK_BUCKET)
    ]


@rule("deepspeed.runtime.engine.DeepSpeedEngine._take_model_step; deepspeed.runtime.utils.clip_grad_norm_", DEEPSPEED)
def fallback_norm(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of a 32-bit norm to clip fp32 gradients; the norm of 16-bit gradients needs no call."""
    clips = job.row.gradient_clipping > 0 and job.row.precision == "fp32"
    return [ExpectedCall("all_reduce", 4, NORM)] if clips else []
