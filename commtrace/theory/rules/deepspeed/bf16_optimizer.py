"""DeepSpeed's BF16_Optimizer: bf16 with gradients summed in fp32, under ZeRO-1 or, in a pipeline, without ZeRO."""

from __future__ import annotations

from commtrace.theory.closed_forms import data_parallel
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, total_wire_bytes
from commtrace.theory.job import Job, element_size
from commtrace.theory.rules.gradient_buckets import buckets_exceeding_limit
from commtrace.theory.rules.registry import DEEPSPEED, rule
from commtrace.theory.waterfall import level_bars

from . import engine, zero12
from .engine import FALLBACK_BUCKET, GRADIENTS, NORM, communication_type


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates among those with the same parameters, without the norm.

    Raise NotPredictedError for settings without rules.
    """
    engine.check(job)
    half = data_parallel(job.elements, job.ranks) * job.parameter_size / 2
    reduced, gathered = gradients(job), zero12.parameter_gathers(job)
    levels = engine.gradient_levels(job)
    levels["all_reduce in place of reduce_scatter"] = total_wire_bytes(reduced, job.ranks)
    padding = {"padding of the parameters to equal parts": total_wire_bytes(gathered, job.ranks)}
    bars = (*level_bars(half, levels), *level_bars(half, padding))
    name = f"ZeRO-{int(job.fact('zero_stage'))} (BF16_Optimizer)"
    form = WaterfallBar("equation 2: 2 P (d-1)/d", 2 * half)
    start = tuple(engine.broadcast_model(job))
    return Prediction(name, job.ranks, start, ((*reduced, *gathered),), form, bars, (tuple(gathered),))


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.get_grads_for_reduction; "
      "deepspeed.runtime.pipe.engine.PipelineEngine._bf16_reduce_grads", DEEPSPEED)  # fmt: skip
def gradients(job: Job) -> list[ExpectedCall]:
    """Each group's flat gradients are all_reduced, padding included, in the type of communication."""
    elements = [zero12.flat_group(job, group).part * job.ranks for group in job.groups]
    size = element_size(communication_type(job))
    return [
        ExpectedCall("all_reduce", held * size, GRADIENTS)
        for held in buckets_exceeding_limit(elements, FALLBACK_BUCKET)
    ]


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.step; deepspeed.runtime.utils.get_global_norm_of_tensors",
      DEEPSPEED)  # fmt: skip
def norm(role: str) -> list[ExpectedCall]:
    """With an mpu, a 32-bit norm is all_reduced among the ranks that share a model, with or without clipping."""
    return [ExpectedCall("all_reduce", 4, NORM, role=role)]
