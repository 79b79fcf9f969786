"""DeepSpeed's engine without ZeRO, and what all of its stages share.

Assumed, as the job cannot say it: the order of gradients (see `gradients`); that every parameter is used in every
micro-batch; that the overflow check lets every step pass.
"""

from __future__ import annotations

from collections.abc import Callable
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
from commtrace.theory.job import Job, ModelTensor, NotPredictedError, element_size
from commtrace.theory.rules.gradient_buckets import buckets_exceeding_limit
from commtrace.theory.rules.registry import DEEPSPEED, rule

GRADIENTS: Final = "gradients"
NORM: Final = "norm of the gradients"
OVERFLOW: Final = "overflow check"

# numel_per_bucket of allreduce_gradients: not a setting.
_FALLBACK_ELEMENTS: Final = 500_000_000

_PLAIN: Final = ("AdamW", "Adam", "SGD", "FusedAdam", "DeepSpeedCPUAdam", "Adagrad", "RMSprop")


def check(job: Job) -> None:
    """Raise NotPredictedError for settings of the engine that have no rules yet."""
    if int(job.fact("sequence_parallel_size")) != 1 and int(job.fact("zero_stage")) == 3:
        raise NotPredictedError("ZeRO-3 with Ulysses has no rules yet")
    if int(job.fact("pipeline_stages")) != 1:
        raise NotPredictedError(f"pipeline stages {job.fact('pipeline_stages')} has no rules yet")
    if job.row.get("sparse_gradients"):  # no setting any more in DeepSpeed 0.19
        raise NotPredictedError("sparse gradients have no rules yet")
    if job.fact("moe") and int(job.fact("zero_stage")) == 3:
        raise NotPredictedError("ZeRO-3 with mixtures of experts has no rules yet")
    if job.fact("basic_optimizer") not in _PLAIN:
        raise NotPredictedError(f"the optimizer {job.fact('basic_optimizer')} has no rules yet")
    if job.ranks < 2 and job.tensor < 2:
        raise NotPredictedError("with one data-parallel rank there is nothing to tell")


def predict(job: Job) -> Prediction:
    """What a rank communicates under ZeRO-0. Raises NotPredictedError for settings without rules."""
    check(job)
    step = (*fallback_gradients(job), *fallback_norm(job))
    form = WaterfallBar("equation 2: 2 P (d-1)/d", data_parallel(_elements(job), job.ranks) * parameter_size(job))
    reduced = total_wire_bytes((one for one in step if one.cause == GRADIENTS), job.ranks)
    levels = gradient_levels(job, lambda elements, size: data_parallel(elements, job.ranks) * size)
    levels |= copies_level(job, data_parallel, element_size(communication_type(job)))
    levels["gradients of other types"] = reduced
    bars = [*level_bars(form.bytes, levels), *cause_bars((one for one in step if one.cause != GRADIENTS), job.ranks)]
    return Prediction("ZeRO-0", job.ranks, tuple(broadcast_model(job)), (step,), form, tuple(bars))


def _elements(job: Job) -> int:
    return sum(parameter.elements for parameter in job.parameters)


def parameter_size(job: Job) -> int:
    """Bytes of an element of the parameters; the widest where they differ."""
    return max((parameter.size for parameter in job.parameters), default=1)


def gradient_levels(job: Job, volume: Callable[[int, int], Fraction]) -> dict[str, Fraction]:
    """From the volume of all parameters to that of the gradients' elements in the type in which they travel."""
    trained = sum(parameter.elements for parameter in job.trainable)
    communication = communication_type(job)
    return {
        "frozen parameters have no gradients": volume(trained, parameter_size(job)),
        f"gradients travel as {communication}": volume(trained, element_size(communication)),
    }


def scatter_volume(job: Job) -> Callable[[int, int], Fraction]:
    """Bytes that a rank sends in a reduce_scatter or all_gather of so many elements of a size."""
    return lambda elements, size: all_gather_volume(elements, job.ranks) * size


def copies_level(job: Job, volume: Callable[[int, int], Fraction], size: int) -> dict[str, Fraction]:
    """The level of trained parameters, elements of a size, where fewer ranks have copies of some; else none.

    `volume`: elements that a rank sends of so many, among so many ranks.
    """
    if not any(parameter.expert for parameter in job.trainable):
        return {}
    return {"experts travel among the ranks that have them": copies_volume(job, volume) * size}


def copies_volume(job: Job, volume: Callable[[int, int], Fraction]) -> Fraction:
    """Elements that a rank sends of all trained parameters, of each among the ranks that have it."""
    elements: dict[int, int] = {}
    for parameter in job.trainable:
        elements[job.copies(parameter)] = elements.get(job.copies(parameter), 0) + parameter.elements
    return sum((volume(count, ranks) for ranks, count in elements.items()), Fraction(0))


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", DEEPSPEED)
def broadcast_model(job: Job) -> list[ExpectedCall]:
    """Rank 0 sends each parameter, as bytes."""
    cause = "first parameters, one broadcast each, as uint8"
    return [
        among_copies(job, parameter, ExpectedCall("broadcast", parameter.bytes, cause)) for parameter in job.parameters
    ]


@rule("deepspeed.runtime.engine.DeepSpeedEngine._reduce_expert_gradients; "
      "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._configure_moe_settings", DEEPSPEED)  # fmt: skip
def among_copies(job: Job, parameter: ModelTensor, message: ExpectedCall) -> ExpectedCall:
    """A message about a parameter: of an expert's, among the ranks that have it."""
    return message.among(job.copies(parameter)) if parameter.expert else message


@rule("deepspeed.runtime.engine.DeepSpeedEngine.communication_data_type", DEEPSPEED)
def communication_type(job: Job) -> str:
    """The type in which gradients travel: that of the parameters, unless the configuration says otherwise."""
    return str(job.fact("communication_data_type"))


@rule("deepspeed.runtime.engine.DeepSpeedEngine.buffered_allreduce_fallback", DEEPSPEED)
def fallback_gradients(job: Job) -> list[ExpectedCall]:
    """At the end of a step's last backward pass: the gradients of one type after the other, in registration order.

    Those of experts apart, among the ranks that have them.
    """
    size = element_size(communication_type(job))
    types: dict[tuple[str, bool], list[ModelTensor]] = {}
    for parameter in job.trainable:
        types.setdefault((parameter.dtype, parameter.expert), []).append(parameter)
    return [
        among_copies(job, same[0], ExpectedCall("all_reduce", held * size, GRADIENTS))
        for same in types.values()
        for held in buckets_exceeding_limit((parameter.elements for parameter in same), _FALLBACK_ELEMENTS)
    ]


@rule("deepspeed.runtime.engine.DeepSpeedEngine._take_model_step; deepspeed.runtime.utils.clip_grad_norm_", DEEPSPEED)
def fallback_norm(job: Job) -> list[ExpectedCall]:
    """One 32-bit number, in fp32 alone: in 16 bits each rank clips by its own, equal, gradients."""
    clips = float(job.fact("gradient_clipping")) > 0 and job.fact("precision") == "fp32"
    return [ExpectedCall("all_reduce", 4, NORM)] if clips else []
