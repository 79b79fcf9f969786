"""Calls of ZeRO-3: at start-up, for the parameters that the coordinator gathers, for gradients, in the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Final

from commtrace.theory.expected_calls import ExpectedCall
from commtrace.theory.job import Job, ModelTensor, element_size, grouped
from commtrace.theory.rules import gradients
from commtrace.theory.rules.registry import DEEPSPEED, rule

from . import engine
from .engine import GRADIENTS, NORM, OVERFLOW
from .zero3_coordinator import CoordinatorCalls

PARAMETERS: Final = "parameters"
PERSISTENT: Final = "small parameters"
COMPARED: Final = "comparison of the order of modules"
BARRIERS: Final = "ranks wait for each other while ZeRO-3 is set up"

_INT64: Final = 8
_STAGE_3: Final = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3."
_INIT: Final = "deepspeed.runtime.zero.partition_parameters.Init."


@rule(_INIT + "_convert_to_deepspeed_param, _partition_param", DEEPSPEED)
def padded_elements(job: Job, tensor: ModelTensor) -> int:
    """Return the number of elements of a parameter, padded so that it splits into equal shards."""
    return ceil(tensor.elements / job.ranks) * job.ranks


@rule(_INIT + "_zero_init_param; deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", DEEPSPEED)
def initial_broadcasts(job: Job) -> list[ExpectedCall]:
    """Return rank 0's broadcasts of the initial parameters, one each as uint8, before they are partitioned.

    Parameters that are not yet partitioned when the engine is built are also broadcast with the model. A job row that
    does not list them has none: its model was built under `deepspeed.zero.Init`.
    """
    partitioned = "first parameters, one broadcast each, as uint8"
    with_model = "parameters not yet partitioned when the engine is made, once more"
    late = (job.parameters[number] for number in job.row.partitioned_by_engine)
    return [
        *(ExpectedCall("broadcast", parameter.bytes, partitioned) for parameter in job.parameters),
        *(ExpectedCall("broadcast", parameter.bytes, with_model) for parameter in late),
    ]


@rule(_STAGE_3 + "__init__, _setup_for_real_optimizer", DEEPSPEED)
def barriers(job: Job) -> list[ExpectedCall]:
    """Return the barriers of set-up.

    One comes before partitions are defragmented, two are around the initialization of the optimizer state.
    """
    return [ExpectedCall("barrier", 0, BARRIERS, 3)]


@rule(_STAGE_3 + "create_reduce_and_remove_grad_hooks", DEEPSPEED)
def initial_all_gathers(job: Job) -> list[ExpectedCall]:
    """Return the all_gathers of trained parameters, one each, to register hooks on their gradients."""
    cause = "every parameter once, to put a hook on its gradient"
    parameters = (job.parameters[number] for group in job.groups for number in group)
    return [
        ExpectedCall("all_gather", padded_elements(job, parameter) * parameter.size, cause)
        for parameter in parameters
        if parameter.trainable
    ]


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.mark_persistent_parameters", DEEPSPEED)
def persistent_parameters(job: Job) -> frozenset[int]:
    """Return the parameters that stay gathered (param_persistence_threshold, model_persistence_threshold)."""
    limit, total_limit = job.row.zero.param_persistence_threshold, job.row.zero.model_persistence_threshold
    numbers, total = set(), 0
    for number, parameter in enumerate(job.parameters):
        if parameter.elements <= limit and total + parameter.elements <= total_limit:
            numbers.add(number)
            total += parameter.elements
    return frozenset(numbers)


@rule(_INIT + "_convert_to_deepspeed_param.all_gather_coalesced", DEEPSPEED)
def all_gathers(job: Job, sets: Iterable[tuple[int, ...]], cause: str) -> list[ExpectedCall]:
    """Return one all_gather for each set of parameters and dtype, or for each parameter (allgather_sequential)."""
    calls = []
    ranks, is_sequential = job.ranks if hpz_ranks(job) else None, job.row.zero.allgather_sequential

    def call_key(number: int) -> int | str:
        return number if is_sequential else job.parameters[number].dtype

    for numbers in (numbers for parameter_set in sets for numbers in grouped(parameter_set, call_key)):
        elements = sum(padded_elements(job, job.parameters[number]) for number in numbers)
        max_calls = None if cause == PERSISTENT else len(numbers)
        payload = elements * job.parameters[numbers[0]].size
        calls.append(ExpectedCall("all_gather", payload, cause, max_calls=max_calls, ranks=ranks))
    return calls


@rule(_INIT + "_convert_to_deepspeed_param.all_gather_coalesced (use_secondary_tensor)", DEEPSPEED)
def hpz_all_gathers(job: Job, sets: Iterable[tuple[int, ...]]) -> list[ExpectedCall]:
    """Return `all_gathers` with the same payloads among the ranks that share a secondary partition (hpZ)."""
    return [replace(call, ranks=hpz_ranks(job)) for call in all_gathers(job, sets, PARAMETERS)]


@rule("deepspeed.utils.groups._create_zero_param_parallel_group", DEEPSPEED)
def hpz_ranks(job: Job) -> int:
    """Return the number of ranks that share a secondary partition (zero_hpz_partition_size); 0 without one."""
    size = job.row.zero.zero_hpz_partition_size
    return min(size, job.ranks) if size > 1 else 0


@rule("deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks, get_lst_from_rank0", DEEPSPEED)
def comparisons(recorded: CoordinatorCalls) -> list[ExpectedCall]:
    """Return rank 0's broadcasts of the lists (int64) that ranks compare. Modules that never run are not in them."""
    return [
        ExpectedCall("broadcast", _INT64 * most, COMPARED, min_payload=_INT64 * least if least < most else None)
        for most, least in recorded.compared
    ]


@rule(_STAGE_3 + "__reduce_and_partition_ipg_grads", DEEPSPEED)
def reductions(job: Job) -> list[ExpectedCall]:
    """Return the calls that reduce the gradient buckets of a micro-batch.

    They are reduce_scatters of padded gradients. A bucket is an all_reduce without padding if reduce_scatter is off,
    contiguous_gradients is on, and the bucket is not larger than reduce_bucket_size.
    """
    size, limit = element_size(engine.communication_dtype(job)), job.row.zero.reduce_bucket_size
    numbers = sorted(number for group in job.groups for number in group)
    order = reduction_order(job, [job.parameters[number] for number in numbers if job.parameters[number].trainable])
    elements = [parameter.elements for parameter in order]
    calls = []
    for bucket in gradients.buckets_within_limit(elements, limit):
        held = sum(elements[position] for position in bucket)
        if job.row.zero.contiguous_gradients and held <= limit and not job.row.zero.reduce_scatter:
            calls.append(ExpectedCall("all_reduce", held * size, GRADIENTS, max_calls=1))
        else:
            padded = sum(padded_elements(job, order[position]) for position in bucket)
            calls.append(ExpectedCall("reduce_scatter", padded * size, GRADIENTS, max_calls=1))
    spare = gradients.max_buckets_within_limit(sum(elements), limit, len(elements)) - len(calls)
    return [replace(call, max_calls=1 + max(spare, 0)) if number == 0 else call for number, call in enumerate(calls)]


@rule("deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses._enable_mem_efficient_linear",
      DEEPSPEED)  # fmt: skip
def reduction_order(job: Job, tensors: list[ModelTensor]) -> list[ModelTensor]:
    """Return parameters in the order in which their gradients become ready.

    Under memory_efficient_linear, ZeRO-3 replaces linear layers, which changes the order.
    """
    order = gradients.gradient_order(tensors)
    return gradients.zero3_linear_order(order) if job.row.zero.memory_efficient_linear else order


@rule(_STAGE_3 + "_overflow_check_and_loss_scale_update", DEEPSPEED)
def overflow_check(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of the overflow check: one byte, in fp16 only."""
    return [ExpectedCall("all_reduce", 1, OVERFLOW)] if job.row.precision == "fp16" else []


@rule(_STAGE_3 + "_get_norm_groups, get_grad_norm_direct", DEEPSPEED)
def norms(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of a norm per sub-group of the optimizer, with or without clipping."""
    return [ExpectedCall("all_reduce", element_size(job.row.norm_dtype), NORM)] * len(job.groups)


@rule(_STAGE_3 + "checkpoint_event_epilogue", DEEPSPEED)
def saved_state(job: Job) -> list[ExpectedCall]:
    """Return the all_gathers after a checkpoint: saving it releases the persistent parameters, too."""
    return all_gathers(job, [(number,) for number in sorted(persistent_parameters(job))], PERSISTENT)
