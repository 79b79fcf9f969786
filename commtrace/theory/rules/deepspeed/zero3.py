"""ZeRO-3: each rank keeps a part of every parameter, and gathers the whole ones where they are used.

Exact: bytes, and with `coordinator`'s assumptions the calls as well; the most calls that could be made is one for each
parameter gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Final

from commtrace.theory.closed_forms import all_gather_volume, zero_3
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    drop_repeated_steps,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, ModelTensor, NotPredictedError, element_size
from commtrace.theory.rules.gradient_buckets import buckets_within_limit, max_buckets_within_limit
from commtrace.theory.rules.gradient_order import gradient_order, zero3_linear_order
from commtrace.theory.rules.registry import DEEPSPEED, rule

from .engine import (
    GRADIENTS,
    NORM,
    OVERFLOW,
    check,
    communication_type,
    gradient_levels,
    parameter_size,
    scatter_volume,
)
from .zero3_coordinator import CheckpointedSegment, Coordinator, CoordinatorCalls, CoordinatorLimits, run_step

PARAMETERS: Final = "parameters"
PERSISTENT: Final = "small parameters"
COMPARED: Final = "comparison of the order of modules"

_OFF: Final = (
    "use_all_reduce_for_fetch_params",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "enable_sanity_checks",
)
_INT64: Final = 8
_STEPS: Final = 4  # to play through: the record is complete in the second at the latest


def predict(job: Job) -> Prediction:
    """What a rank communicates. Raises NotPredictedError for settings without rules."""
    check(job)
    if job.tensor > 1:
        raise NotPredictedError("ZeRO-3 with tensor parallelism has no rules yet")
    for name in _OFF:
        if job.zero(name):
            raise NotPredictedError(f"{name} has no rules yet")
    if job.fact("optimizer") != "DeepSpeedZeroOptimizer_Stage3":
        raise NotPredictedError(f"{job.fact('optimizer')} with these partitions has no rules yet")
    start = (*initial_broadcasts(job), *barriers(job), *initial_gathers(job))
    second = frozenset(number for group in job.groups for number in group) if hpz_ranks(job) else None
    state = Coordinator(
        job.root, dict(enumerate(_elements(job))), persistent(job), limits(job), checkpointed_segments(job), second
    )
    traffics = [run_step(state, job.micro_batches) for _ in range(_STEPS)]
    steps = drop_repeated_steps(_step(job, traffic) for traffic in traffics)
    form = WaterfallBar("equation 3: 3 P (d-1)/d", zero_3(sum(_elements(job)), job.ranks) * parameter_size(job))
    small = gathers(job, traffics[-1][-1].gathers, PERSISTENT)
    skipped = ((*norms(job), *small), tuple(small))
    scheme = f"ZeRO-3, hpZ within {hpz_ranks(job)} ranks" if hpz_ranks(job) else "ZeRO-3"
    return Prediction(scheme, job.ranks, start, steps, form, tuple(_bars(job, traffics[-1], steps[-1])), skipped)


def _step(job: Job, parts: list[CoordinatorCalls]) -> tuple[ExpectedCall, ...]:
    *passes, optimizer = parts
    return (
        *(one for part in passes for one in comparisons(part)),
        *(one for part in passes for one in gathers(job, part.gathers, PARAMETERS)),
        *(one for part in passes for one in gathers_within(job, part.within)),
        *(one.times(job.micro_batches) for one in reductions(job)),
        *overflow_check(job),
        *norms(job),
        *gathers(job, optimizer.gathers, PERSISTENT),
    )


def _elements(job: Job) -> list[int]:
    return [parameter.elements for parameter in job.parameters]


def _bars(job: Job, parts: list[CoordinatorCalls], step: tuple[ExpectedCall, ...]) -> Iterator[WaterfallBar]:
    """Two thirds of equation 3 are all_gathers of the parameters, a third is the gradients' reduce_scatter."""
    volume, elements = scatter_volume(job), _elements(job)
    third = all_gather_volume(sum(elements), job.ranks) * parameter_size(job)
    twice, kept = 2 * job.micro_batches, persistent(job)
    small = sum(elements[number] for number in kept)
    fetched = sum(
        elements[number] for part in parts for gathered in (*part.gathers, *part.within) for number in gathered
    )
    gathered_once_a_pass = twice * (sum(elements) - small) + small
    less_or_more = (
        "parameters still there when they are used again"
        if fetched <= gathered_once_a_pass
        else "parameters gathered more than twice (recomputation, shared weights)"
    )
    apart = among_all_ranks(_about(step, PARAMETERS, PERSISTENT))
    levels = {
        f"parameters pass twice in each of {job.micro_batches} micro-batches": third * twice,
        "small parameters gathered once (persistence threshold)": volume(gathered_once_a_pass, parameter_size(job)),
        less_or_more: volume(fetched, parameter_size(job)),
        "padding of parameters to equal parts": total_wire_bytes(apart, job.ranks),
        "gathered from fewer ranks (hpZ)": total_wire_bytes(_about(step, PARAMETERS, PERSISTENT), job.ranks),
    }
    yield from level_bars(third * 2, levels)
    levels = gradient_levels(job, volume)
    once = [*levels.values()][-1]
    levels[f"gradients reduced in each of {job.micro_batches} micro-batches"] = once * job.micro_batches
    reduced = [*_about(step, GRADIENTS)]
    whole = Fraction(sum(one.bytes for one in reduced) * (job.ranks - 1), job.ranks)
    levels["padding of gradients to equal parts"] = whole
    levels["all_reduce in place of reduce_scatter"] = total_wire_bytes(reduced, job.ranks)
    yield from level_bars(third, levels)
    known = (PARAMETERS, PERSISTENT, GRADIENTS)
    yield from cause_bars((one for one in step if one.cause not in known), job.ranks)


def among_all_ranks(messages: Iterable[ExpectedCall]) -> Iterator[ExpectedCall]:
    """The same among all ranks."""
    return (replace(one, ranks=None) for one in messages)


def _about(messages: Iterable[ExpectedCall], *causes: str) -> Iterator[ExpectedCall]:
    return (one for one in messages if one.cause in causes)


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param, _partition_param", DEEPSPEED)
def padded_elements(job: Job, tensor: ModelTensor) -> int:
    """Elements of a parameter with the padding that makes its parts equal."""
    return ceil(tensor.elements / job.ranks) * job.ranks


@rule("deepspeed.runtime.zero.partition_parameters.Init._zero_init_param", DEEPSPEED)
def initial_broadcasts(job: Job) -> list[ExpectedCall]:
    """Rank 0 sends each parameter, as bytes, before it is taken apart."""
    cause = "first parameters, one broadcast each, as uint8"
    return [ExpectedCall("broadcast", parameter.bytes, cause) for parameter in job.parameters]


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__init__, _setup_for_real_optimizer", DEEPSPEED)
def barriers(job: Job) -> list[ExpectedCall]:
    """One before the partitions are moved together, two around the optimizer's state."""
    return [ExpectedCall("barrier", 0, "ranks wait for each other while ZeRO-3 is set up", 3)]


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks", DEEPSPEED)
def initial_gathers(job: Job) -> list[ExpectedCall]:
    """Each parameter that is trained, whole for a moment, so that a hook can be put on its gradient."""
    cause = "every parameter once, to put a hook on its gradient"
    trained = [job.parameters[number] for group in job.groups for number in group if job.parameters[number].trainable]
    return [ExpectedCall("all_gather", padded_elements(job, one) * one.size, cause) for one in trained]


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.mark_persistent_parameters", DEEPSPEED)
def persistent(job: Job) -> frozenset[int]:
    """Parameters of at most so many elements, as long as together they stay below another limit."""
    each, together = int(job.zero("param_persistence_threshold")), int(job.zero("model_persistence_threshold"))
    found, total = set(), 0
    for number, elements in enumerate(_elements(job)):
        if elements <= each and total + elements <= together:
            found.add(number)
            total += elements
    return frozenset(found)


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer", DEEPSPEED)
def limits(job: Job) -> CoordinatorLimits:
    """Settings of the coordinator."""
    names = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    return CoordinatorLimits(*(int(job.zero(name)) for name in names))


@rule("deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.all_gather_coalesced", DEEPSPEED)
def gathers(job: Job, sets: Iterable[tuple[int, ...]], cause: str) -> list[ExpectedCall]:
    """One call for each element type in a set of parameters, or one for each parameter (allgather_sequential)."""
    found = []
    for numbers in sets:
        for part in _calls(job, numbers):
            size = sum(padded_elements(job, job.parameters[number]) for number in part) * job.parameters[part[0]].size
            most = None if cause == PERSISTENT else len(part)
            found.append(
                ExpectedCall("all_gather", size, cause, most=most, ranks=job.ranks if hpz_ranks(job) else None)
            )
    return found


@rule("deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.all_gather_coalesced "
      "(use_secondary_tensor)", DEEPSPEED)  # fmt: skip
def gathers_within(job: Job, sets: Iterable[tuple[int, ...]]) -> list[ExpectedCall]:
    """As `gathers`, of as many bytes, from the ranks that have the second partition among them (hpZ)."""
    return [replace(one, ranks=hpz_ranks(job)) for one in gathers(job, sets, PARAMETERS)]


@rule("deepspeed.utils.groups._create_zero_param_parallel_group", DEEPSPEED)
def hpz_ranks(job: Job) -> int:
    """Ranks that have a second partition of all parameters among them (zero_hpz_partition_size); 0: there is none."""
    size = int(job.zero("zero_hpz_partition_size"))
    return min(size, job.ranks) if size > 1 else 0


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.pre_sub_module_forward_function "
      "(in torch.utils.checkpoint)", DEEPSPEED)  # fmt: skip
def checkpointed_segments(job: Job) -> list[CheckpointedSegment]:
    """Layers that are recomputed in backward, as the model says it (`neox_args`), so many at a time."""
    if "model" not in job.row or not job.model("checkpoint_activations", False):
        return []
    if len(job.trainable) < len(job.parameters):
        raise NotPredictedError("ZeRO-3 with recomputed activations and frozen parameters has no rules yet")
    names = [str(row["name"]) for row in job.fact("modules")]
    layers = [at for at, child in enumerate(job.root.children) if _LAYER.search(names[child.number])]
    count, each = int(job.model("num_layers")), int(job.model("checkpoint_num_layers", 1))
    if len(layers) != count or layers != [*range(layers[0], layers[0] + count)]:
        raise NotPredictedError("the modules in the log are not the layers that the model says it has")
    reentrant, masked = bool(job.model("checkpoint_reentrant", True)), float(job.model("hidden_dropout", 0.0)) > 0
    return [CheckpointedSegment(at, min(at + each, layers[-1] + 1), reentrant, masked) for at in layers[::each]]


_LAYER: Final = re.compile(r"(?:^|[._])\d+$")


def _calls(job: Job, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    if job.zero("allgather_sequential"):
        return [(number,) for number in numbers]
    types: dict[str, list[int]] = {}
    for number in numbers:
        types.setdefault(job.parameters[number].dtype, []).append(number)
    return [tuple(part) for part in types.values()]


@rule("deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks, get_lst_from_rank0", DEEPSPEED)
def comparisons(traffic: CoordinatorCalls) -> list[ExpectedCall]:
    """64-bit numbers."""
    return [ExpectedCall("broadcast", _INT64 * length, COMPARED) for length in traffic.compared]


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads", DEEPSPEED)
def reductions(job: Job) -> list[ExpectedCall]:
    """Buckets of gradients of one micro-batch. With reduce_scatter off they are all_reduced, without padding."""
    size, limit = element_size(communication_type(job)), int(job.zero("reduce_bucket_size"))
    grouped = sorted(number for group in job.groups for number in group)
    order = reduction_order(job, [job.parameters[number] for number in grouped if job.parameters[number].trainable])
    elements = [parameter.elements for parameter in order]
    found = []
    for bucket in buckets_within_limit(elements, limit):
        held = sum(elements[position] for position in bucket)
        if job.zero("contiguous_gradients") and held <= limit and not job.zero("reduce_scatter"):
            found.append(ExpectedCall("all_reduce", held * size, GRADIENTS))
        else:
            whole = sum(padded_elements(job, order[position]) for position in bucket)
            found.append(ExpectedCall("reduce_scatter", whole * size, GRADIENTS))
    spare = max_buckets_within_limit(sum(elements), limit, len(elements)) - len(found)
    return [
        ExpectedCall(one.op, one.payload, one.cause, most=1 + (max(spare, 0) if number == 0 else 0))
        for number, one in enumerate(found)
    ]


@rule("deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses._enable_mem_efficient_linear",
      DEEPSPEED)  # fmt: skip
def reduction_order(job: Job, tensors: list[ModelTensor]) -> list[ModelTensor]:
    """The order in which gradients become ready."""
    order = gradient_order(tensors)
    return zero3_linear_order(order) if job.zero("memory_efficient_linear") else order


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._overflow_check_and_loss_scale_update", DEEPSPEED)
def overflow_check(job: Job) -> list[ExpectedCall]:
    """One byte, in fp16 alone."""
    return [ExpectedCall("all_reduce", 1, OVERFLOW)] if job.fact("precision") == "fp16" else []


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups, get_grad_norm_direct", DEEPSPEED)
def norms(job: Job) -> list[ExpectedCall]:
    """A number for each sub-group of the optimizer, whether gradients are clipped or not."""
    return [ExpectedCall("all_reduce", element_size(str(job.fact("norm_dtype"))), NORM)] * len(job.groups)
