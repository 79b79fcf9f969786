"""ZeRO-1 and ZeRO-2: each rank keeps a shard of the optimizer's state, and under ZeRO-2 of the gradients as well.

DeepSpeed's BF16_Optimizer (bf16, gradients accumulated in fp32) replaces ZeRO-1, or ZeRO-0 in a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import ceil, gcd
from typing import Final

from commtrace.theory.closed_forms import data_parallel
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, ModelTensor, NotPredictedError, element_size
from commtrace.theory.rules import gradients
from commtrace.theory.rules.registry import DEEPSPEED, rule

from . import engine
from .engine import GRADIENTS, NORM, OVERFLOW

PARAMETERS: Final = "parameters"

_START_ALIGNMENT: Final = 2  # nccl_start_alignment_factor
_ZERO: Final = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer."


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates. Raise NotPredictedError for settings without rules.

    BF16_Optimizer computes its norm in the model-parallel group (`tensor_parallel`), and has no overflow check.
    """
    engine.check(job)
    stage, wrapper = job.row.zero_stage, job.row.optimizer
    scheme = f"ZeRO-{stage}"
    if wrapper == "BF16_Optimizer" and stage < 2:
        scheme, reduced, overflow, norm = f"{scheme} (BF16_Optimizer)", flat_reductions(job), [], []
    elif wrapper == "DeepSpeedZeroOptimizer":
        reduced, overflow, norm = reductions(job), overflow_check(job), norms(job)
    else:
        raise NotPredictedError(f"the optimizer {wrapper} has no rules yet")
    all_gathers = parameter_all_gathers(job)
    step = (*reduced, *overflow, *norm, *all_gathers)
    form = WaterfallBar("equation 2: 2 P (d-1)/d", data_parallel(job.elements, job.ranks) * job.parameter_size)
    start, bars = tuple(engine.broadcast_model(job)), tuple(_bars(job, step, form.bytes / 2))
    return Prediction(scheme, job.ranks, start, (step,), form, bars, ((*norm, *all_gathers), tuple(all_gathers)))


def _bars(job: Job, step: tuple[ExpectedCall, ...], half: Fraction) -> Iterator[WaterfallBar]:
    """Yield the bars from one half of equation 2 to the gradients' calls, and from the other to the all_gathers."""
    levels = engine.gradient_levels(job)
    each_time = f"gradients reduced in each of {job.micro_batches} micro-batches"
    levels[each_time] = levels[engine.AMONG_COPIES] * reductions_per_step(job)
    levels["all_reduce in place of reduce_scatter"] = total_wire_bytes(step, job.ranks, GRADIENTS)
    yield from level_bars(half, levels)
    gather_levels = {
        "frozen parameters are not gathered": engine.ring_bytes(job, job.trainable_elements, job.parameter_size),
        engine.AMONG_COPIES: engine.copies_bytes(job, job.parameter_size),
        "padding of the parameters to equal parts": total_wire_bytes(step, job.ranks, PARAMETERS),
    }
    yield from level_bars(half, gather_levels)
    yield from cause_bars(step, job.ranks, GRADIENTS, PARAMETERS)


@dataclass(frozen=True)
class FlatGroup:
    """Flat buffer of an optimizer group: offsets of its parameters by number, and the length of a rank's shard.

    Offsets and length are in elements.
    """

    offsets: dict[int, int]
    shard: int


@rule(_ZERO + "_round_robin_reorder", DEEPSPEED)
def group_order(job: Job, group: tuple[int, ...]) -> list[int]:
    """Return a group's parameters in flat-buffer order; round_robin_gradients assigns them to ranks in turn."""
    if not job.row.zero.round_robin_gradients:
        return list(group)
    ranks = job.copies(job.parameters[group[0]])
    return [parameter for rank in range(ranks) for parameter in group[rank::ranks]]


@rule(_ZERO + "__init__, flatten_dense_tensors_aligned", DEEPSPEED)
def flat_group(job: Job, group: tuple[int, ...]) -> FlatGroup:
    """Return a group's flat buffer, padded to a multiple of 2d elements; parameter_alignment aligns each parameter."""
    order = group_order(job, group)
    size = job.parameters[order[0]].size
    alignment = 16 // gcd(16, size) if job.row.zero.parameter_alignment else 1
    offsets, end = {}, 0
    for number in order:
        offsets[number] = ceil(end / alignment) * alignment
        end = offsets[number] + job.parameters[number].elements
    ranks = job.copies(job.parameters[order[0]])
    multiple = _START_ALIGNMENT * ranks
    return FlatGroup(offsets, ceil(end / multiple) * multiple // ranks)


@rule("deepspeed.runtime.utils.all_gather_into_tensor_dp_groups", DEEPSPEED)
def parameter_all_gathers(job: Job) -> list[ExpectedCall]:
    """Return the all_gather of each optimizer group with several ranks, whatever allgather_bucket_size says."""
    calls = []
    for group in job.groups:
        first = job.parameters[group[0]]
        if job.copies(first) > 1:
            payload = flat_group(job, group).shard * job.copies(first) * first.size
            calls.append(engine.among_copies(job, first, ExpectedCall("all_gather", payload, PARAMETERS)))
    return calls


@rule(_ZERO + "process_gradients, reduce_ready_partitions_and_remove_grads", DEEPSPEED)
def reductions_per_step(job: Job) -> int:
    """Return how often a step reduces gradients: under ZeRO-2 in each micro-batch, under ZeRO-1 once."""
    return job.micro_batches if job.row.zero_stage == 2 else 1


@rule(_ZERO + "reduce_gradients, create_gradient_handling_hooks", DEEPSPEED)
def reduction_order(job: Job) -> list[int]:
    """Return parameters in reduction order: that of backward, or group by group (ZeRO-1 without overlap_comm)."""
    grouped = [number for group in job.groups for number in group]
    if job.row.zero_stage == 1 and not job.row.zero.overlap_comm:
        return grouped
    numbers = {parameter.name: number for number, parameter in enumerate(job.parameters)}
    tensors: list[ModelTensor] = [job.parameters[number] for number in sorted(grouped)]
    return [numbers[parameter.name] for parameter in gradients.backward_order(job, tensors)]


@rule(_ZERO + "average_tensor", DEEPSPEED)
def reductions(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of buckets; without use_multi_rank_bucket_allreduce, the reduces to the shards' owners."""
    order, limit = reduction_order(job), job.row.zero.reduce_bucket_size
    elements = [job.parameters[number].elements for number in order]
    calls = [
        call
        for bucket in gradients.buckets_within_limit(elements, limit)
        for call in bucket_calls(job, [order[position] for position in bucket], limit)
    ]
    if not (job.row.zero_stage == 1 and not job.row.zero.overlap_comm) and calls:
        pieces = len(calls) if calls[0].op == "reduce" else len({job.parameters[number].expert for number in order})
        most = gradients.max_buckets_within_limit(sum(elements), limit, len(elements)) * pieces
        calls[0] = ExpectedCall(calls[0].op, calls[0].payload, GRADIENTS, max_calls=1 + max(0, most - len(calls)))
    return [call.times(reductions_per_step(job)) for call in calls]


@rule(_ZERO + "allreduce_bucket (sequence_parallel_size)", DEEPSPEED)
def bucket_dtype(job: Job) -> str:
    """Return the dtype of buckets: the communication dtype, but fp32 with Ulysses unless they are reduced in place."""
    is_in_place = job.row.zero.contiguous_gradients and not job.row.zero.reduce_scatter
    return "float32" if job.sequence > 1 and not is_in_place else engine.communication_dtype(job)


@rule(_ZERO + "allreduce_bucket", DEEPSPEED)
def bucket_calls(job: Job, bucket: list[int], limit: int) -> list[ExpectedCall]:
    """Return the calls for one bucket of parameters."""
    size = element_size(bucket_dtype(job))
    if not job.row.zero.reduce_scatter or not job.row.zero.contiguous_gradients:
        elements = sum(job.parameters[number].elements for number in bucket)
        return [ExpectedCall("all_reduce", elements * size, GRADIENTS)]
    pieces = [(owner, job.parameters[number], count) for number in bucket for owner, count in owners(job, number)]
    reduces_together = job.row.zero.use_multi_rank_bucket_allreduce
    op = "all_reduce" if reduces_together else "reduce"
    counts: dict[tuple[int | None, bool], list[int]] = {}
    examples: dict[bool, ModelTensor] = {}  # a parameter of an expert (True) and another (False): their groups differ
    for (owner, expert), same_owner in groupby(pieces, key=lambda piece: (piece[0], piece[1].expert)):
        neighbours = [*same_owner]
        examples[expert] = neighbours[0][1]
        key = (None if reduces_together else owner, expert)
        counts.setdefault(key, []).append(sum(count for *_, count in neighbours))
    return [
        engine.among_copies(job, examples[expert], ExpectedCall(op, elements * size, GRADIENTS))
        for (_, expert), piece_counts in counts.items()
        for elements in gradients.buckets_exceeding_limit(piece_counts, limit)
    ]


@rule(_ZERO + "initialize_gradient_partition", DEEPSPEED)
def owners(job: Job, number: int) -> list[tuple[int, int]]:
    """Return the pieces of a parameter: for each, the rank whose shard contains it and its number of elements."""
    group = next(group for group in job.groups if number in group)
    flat = flat_group(job, group)
    begin, end = flat.offsets[number], flat.offsets[number] + job.parameters[number].elements
    pieces = []
    while begin < end:
        owner = begin // flat.shard
        piece_end = min(end, (owner + 1) * flat.shard)
        pieces.append((owner, piece_end - begin))
        begin = piece_end
    return pieces


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.get_grads_for_reduction; "
      "deepspeed.runtime.pipe.engine.PipelineEngine._bf16_reduce_grads", DEEPSPEED)  # fmt: skip
def flat_reductions(job: Job) -> list[ExpectedCall]:
    """Return BF16_Optimizer's all_reduces of the groups' flat gradients, with padding, in the communication dtype."""
    elements = [flat_group(job, group).shard * job.ranks for group in job.groups]
    size = element_size(engine.communication_dtype(job))
    buckets = gradients.buckets_exceeding_limit(elements, engine.FALLBACK_BUCKET)
    return [ExpectedCall("all_reduce", held * size, GRADIENTS) for held in buckets]


@rule(_ZERO + "has_overflow", DEEPSPEED)
def overflow_check(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of the overflow check: one byte, in fp16, and in bf16 with check_grad_overflow."""
    return [ExpectedCall("all_reduce", 1, OVERFLOW)] if job.row.check_grad_overflow else []


@rule(_ZERO + "scaled_global_norm, get_grad_norm_direct", DEEPSPEED)
def norms(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of a 32-bit norm per optimizer group, with or without clipping (compute_grad_norm)."""
    return [ExpectedCall("all_reduce", 4, NORM)] * len(job.groups) if job.row.zero.compute_grad_norm else []
