"""ZeRO-1 and ZeRO-2: each rank keeps a part of the optimizer's state; under ZeRO-2, of the gradients as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import ceil, gcd
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
from commtrace.theory.rules.gradient_buckets import (
    buckets_exceeding_limit,
    buckets_within_limit,
    max_buckets_within_limit,
)
from commtrace.theory.rules.gradient_order import backward_order
from commtrace.theory.rules.registry import DEEPSPEED, rule

from .engine import (
    GRADIENTS,
    NORM,
    OVERFLOW,
    among_copies,
    broadcast_model,
    check,
    communication_type,
    copies_level,
    gradient_levels,
    parameter_size,
    scatter_volume,
)

PARAMETERS: Final = "parameters"

_START_ALIGNMENT: Final = 2  # nccl_start_alignment_factor


def predict(job: Job) -> Prediction:
    """What a rank communicates. Raises NotPredictedError for settings without rules."""
    check(job)
    if job.fact("optimizer") != "DeepSpeedZeroOptimizer":
        raise NotPredictedError(f"the optimizer {job.fact('optimizer')} has no rules yet")
    step = (*reductions(job), *overflow_check(job), *norms(job), *parameter_gathers(job))
    form = WaterfallBar("equation 2: 2 P (d-1)/d", _closed_form(job))
    stage = f"ZeRO-{int(job.fact('zero_stage'))}"
    skipped = ((*norms(job), *parameter_gathers(job)), tuple(parameter_gathers(job)))
    return Prediction(stage, job.ranks, tuple(broadcast_model(job)), (step,), form, tuple(_bars(job, step)), skipped)


def _closed_form(job: Job) -> Fraction:
    elements = sum(parameter.elements for parameter in job.parameters)
    return data_parallel(elements, job.ranks) * parameter_size(job)


def _bars(job: Job, step: tuple[ExpectedCall, ...]) -> Iterator[WaterfallBar]:
    """Half of equation 2 is the gradients' reduce_scatter, half the parameters' all_gather: each goes its own way."""
    half = _closed_form(job) / 2
    volume = scatter_volume(job)
    levels = gradient_levels(job, volume) | copies_level(job, all_gather_volume, element_size(communication_type(job)))
    once = [*levels.values()][-1]
    reduced = [one for one in step if one.cause == GRADIENTS]
    if reduces_each_micro_batch(job):
        levels[f"gradients reduced in each of {job.micro_batches} micro-batches"] = once * job.micro_batches
    label = "all_reduce in place of reduce_scatter"
    levels[label] = total_wire_bytes(reduced, job.ranks)
    yield from level_bars(half, levels)
    gathered = total_wire_bytes((one for one in step if one.cause == PARAMETERS), job.ranks)
    trained = volume(sum(one.elements for one in job.trainable), parameter_size(job))
    yield from level_bars(
        half,
        {
            "frozen parameters are not gathered": trained,
            **copies_level(job, all_gather_volume, parameter_size(job)),
            "padding of the parameters to equal parts": gathered,
        },
    )
    yield from cause_bars((one for one in step if one.cause not in (GRADIENTS, PARAMETERS)), job.ranks)


# --- rules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatGroup:
    """Where each parameter of a group begins in the group's flat buffer, and how long a rank's part of it is."""

    offsets: dict[int, int]
    part: int


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._round_robin_reorder", DEEPSPEED)
def group_order(job: Job, group: tuple[int, ...]) -> list[int]:
    """The group's parameters as they lie in its flat buffer."""
    if not job.zero("round_robin_gradients"):
        return list(group)
    ranks = job.copies(job.parameters[group[0]])
    return [parameter for part in range(ranks) for parameter in group[part::ranks]]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.__init__, flatten_dense_tensors_aligned", DEEPSPEED)
def flat_group(job: Job, group: tuple[int, ...]) -> FlatGroup:
    """Parameters one after the other (at multiples of 16 bytes with parameter_alignment), padded to 2d elements."""
    order = group_order(job, group)
    size = job.parameters[order[0]].size
    alignment = 16 // gcd(16, size) if job.zero("parameter_alignment") else 1
    offsets, end = {}, 0
    for number in order:
        offsets[number] = ceil(end / alignment) * alignment
        end = offsets[number] + job.parameters[number].elements
    ranks = job.copies(job.parameters[order[0]])
    multiple = _START_ALIGNMENT * ranks
    return FlatGroup(offsets, ceil(end / multiple) * multiple // ranks)


@rule("deepspeed.runtime.utils.all_gather_into_tensor_dp_groups", DEEPSPEED)
def parameter_gathers(job: Job) -> list[ExpectedCall]:
    """One all_gather for each group of the optimizer, whatever allgather_bucket_size says; none of one rank."""
    found = []
    for group in job.groups:
        first = job.parameters[group[0]]
        if job.copies(first) > 1:
            size = flat_group(job, group).part * job.copies(first) * first.size
            found.append(among_copies(job, first, ExpectedCall("all_gather", size, PARAMETERS)))
    return found


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.process_gradients, "
      "reduce_ready_partitions_and_remove_grads", DEEPSPEED)  # fmt: skip
def reduces_each_micro_batch(job: Job) -> bool:
    """ZeRO-2 keeps no whole gradients from one micro-batch to the next; ZeRO-1 reduces the sum of all of them."""
    return int(job.fact("zero_stage")) == 2 and job.micro_batches > 1


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.reduce_gradients, create_gradient_handling_hooks",
      DEEPSPEED)  # fmt: skip
def reduction_order(job: Job) -> list[int]:
    """As backward hands gradients out; ZeRO-1 without overlap_comm waits for its end and goes through the groups."""
    grouped = [number for group in job.groups for number in group]
    if int(job.fact("zero_stage")) == 1 and not job.zero("overlap_comm"):
        return grouped
    places = {parameter.name: number for number, parameter in enumerate(job.parameters)}
    tensors: list[ModelTensor] = [job.parameters[number] for number in sorted(grouped)]
    return [places[parameter.name] for parameter in backward_order(job, tensors)]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.average_tensor", DEEPSPEED)
def reductions(job: Job) -> list[ExpectedCall]:
    """Buckets of gradients: all_reduced whole, or with use_multi_rank_bucket_allreduce off reduced to their owners."""
    order, limit = reduction_order(job), int(job.zero("reduce_bucket_size"))
    elements = [job.parameters[number].elements for number in order]
    found = [
        one
        for bucket in buckets_within_limit(elements, limit)
        for one in bucket_messages(job, [order[position] for position in bucket], limit)
    ]
    if not (int(job.fact("zero_stage")) == 1 and not job.zero("overlap_comm")) and found:
        pieces = len(found) if found[0].op == "reduce" else len({job.parameters[number].expert for number in order})
        most = max_buckets_within_limit(sum(elements), limit, len(elements)) * pieces
        found[0] = ExpectedCall(found[0].op, found[0].payload, GRADIENTS, most=1 + max(0, most - len(found)))
    return [one.times(job.micro_batches if reduces_each_micro_batch(job) else 1) for one in found]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_bucket (sequence_parallel_size)",
      DEEPSPEED)  # fmt: skip
def bucket_type(job: Job) -> str:
    """fp32 where ranks share sequences, whatever is configured, but for buckets that are summed as they lie."""
    as_it_lies = job.zero("contiguous_gradients") and not job.zero("reduce_scatter")
    return "float32" if job.sequence > 1 and not as_it_lies else communication_type(job)


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_bucket", DEEPSPEED)
def bucket_messages(job: Job, bucket: list[int], limit: int) -> list[ExpectedCall]:
    """The calls for one bucket of parameters."""
    size = element_size(bucket_type(job))
    if not job.zero("reduce_scatter") or not job.zero("contiguous_gradients"):
        whole = sum(job.parameters[number].elements for number in bucket)
        return [ExpectedCall("all_reduce", whole * size, GRADIENTS)]
    pieces = [(owner, job.parameters[number], count) for number in bucket for owner, count in owners(job, number)]
    together = bool(job.zero("use_multi_rank_bucket_allreduce"))
    parts: dict[tuple[int | None, bool], list[int]] = {}
    some: dict[bool, ModelTensor] = {}  # of experts, and of the others: they are reduced in different groups
    for (owner, expert), same in groupby(pieces, key=lambda piece: (piece[0], piece[1].expert)):
        alike = [*same]
        some[expert] = alike[0][1]
        parts.setdefault((None if together else owner, expert), []).append(sum(count for *_, count in alike))
    return [
        among_copies(job, some[expert], ExpectedCall("all_reduce" if together else "reduce", held * size, GRADIENTS))
        for (_, expert), counts in parts.items()
        for held in buckets_exceeding_limit(counts, limit)
    ]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.initialize_gradient_partition", DEEPSPEED)
def owners(job: Job, number: int) -> list[tuple[int, int]]:
    """The pieces of a parameter: (the rank whose part it lies in, elements)."""
    group = next(group for group in job.groups if number in group)
    place = flat_group(job, group)
    begin, end = place.offsets[number], place.offsets[number] + job.parameters[number].elements
    found = []
    while begin < end:
        owner = begin // place.part
        upto = min(end, (owner + 1) * place.part)
        found.append((owner, upto - begin))
        begin = upto
    return found


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.has_overflow", DEEPSPEED)
def overflow_check(job: Job) -> list[ExpectedCall]:
    """One byte, where the precision has the check (fp16, and bf16 with check_grad_overflow)."""
    return [ExpectedCall("all_reduce", 1, OVERFLOW)] if job.fact("check_grad_overflow") else []


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.scaled_global_norm, get_grad_norm_direct", DEEPSPEED)
def norms(job: Job) -> list[ExpectedCall]:
    """A 32-bit number for each group of the optimizer, whether gradients are clipped or not (compute_grad_norm)."""
    return [ExpectedCall("all_reduce", 4, NORM)] * len(job.groups) if job.zero("compute_grad_norm") else []
