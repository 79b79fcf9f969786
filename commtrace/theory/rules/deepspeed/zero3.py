"""ZeRO-3: each rank keeps a part of every parameter, and parameters are gathered where they are used.

Bytes are exact, and so are calls under the assumptions of `zero3_coordinator`. Without these, there is at most one call
for each parameter gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any, Final

from commtrace.theory.closed_forms import all_gather_volume, zero_3
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, total_wire_bytes
from commtrace.theory.job import Job, ModelTensor, ModuleNode, NotPredictedError, element_size, refuse
from commtrace.theory.rules import gradients
from commtrace.theory.rules.megatron import sequential_model
from commtrace.theory.rules.registry import DEEPSPEED, rule
from commtrace.theory.waterfall import cause_bars, level_bars

from . import engine
from .engine import GRADIENTS, NORM, OVERFLOW
from .zero3_coordinator import (
    CheckpointedSegment,
    Coordinator,
    CoordinatorCalls,
    CoordinatorLimits,
    forward_pass,
    run_step,
)

PARAMETERS: Final = "parameters"
PERSISTENT: Final = "small parameters"
COMPARED: Final = "comparison of the order of modules"
BARRIERS: Final = "ranks wait for each other while ZeRO-3 is set up"

NOT_PREDICTED: Final = (
    "use_all_reduce_for_fetch_params",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "enable_sanity_checks",
)
_INT64: Final = 8
MAX_DIFFERENT_PASSES: Final = 16  # of an evaluation: all others are as the last one
STEPS: Final = 4  # steps to run through: the record of modules is complete in the second at the latest
_LAYER: Final = re.compile(r"(?:^|[._])\d+$")


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates. Raise NotPredictedError for settings without rules."""
    engine.check(job)
    optimizer = job.fact("optimizer")
    refuse(
        (job.tensor > 1, "ZeRO-3 with tensor parallelism has no rules yet"),
        *((job.zero(name), f"{name} has no rules yet") for name in NOT_PREDICTED),
        (optimizer != "DeepSpeedZeroOptimizer_Stage3", f"{optimizer} with these partitions has no rules yet"),
    )
    evaluations = recorded_evaluations(job)
    state = _coordinator(job)
    is_old = any(evaluations.values()) and state.resets_after_backward
    refuse((is_old, "evaluations with DeepSpeed before 0.15.4 have no rules yet"))
    evaluated = [*_evaluate(job, state, evaluations[-1])]
    start = (*initial_broadcasts(job), *barriers(job), *initial_gathers(job), *evaluated)
    recorded = [run_step(state, job.micro_batches) for _ in range(STEPS)]
    steps = tuple(_step(job, parts) for parts in recorded)
    form = WaterfallBar("equation 3: 3 P (d-1)/d", zero_3(job.elements, job.ranks) * job.parameter_size)
    persistent_gathers = gathers(job, recorded[-1][-1].gathers, PERSISTENT)
    skipped = ((*norms(job), *persistent_gathers), tuple(persistent_gathers))
    scheme = f"ZeRO-3, hpZ within {hpz_ranks(job)} ranks" if hpz_ranks(job) else "ZeRO-3"
    bars = tuple(_bars(job, recorded[-1], steps[-1]))
    prediction = Prediction(scheme, job.ranks, start, steps, form, bars, skipped)
    has_later = any(passes for step, passes in evaluations.items() if step >= 0)
    return _with_evaluations(job, prediction, evaluations) if has_later else prediction


def recorded_evaluations(job: Job) -> dict[int, int]:
    """Return the passes of evaluations after a step, by the first of the steps that have so many, from -1 on."""
    # GPT-NeoX's arguments tell its evaluations.
    rows = [] if job.is_gpt_neox else sorted(job.row.get("passes", ()), key=lambda row: int(row["step"]))
    by_step = {int(row["step"]): _count_evaluations(row["passes"], int(row["step"])) for row in rows}
    before = by_step.get(-1, 0)
    return {-1: before, 0: before, **by_step}


def _count_evaluations(passes: list[Mapping[str, Any]] | None, step: int) -> int:
    if passes is None:
        raise NotPredictedError(f"the log does not have the evaluations from step {step} on")
    is_within = any(entry["kind"] != "evaluation" for entry in passes)
    refuse((is_within, f"a forward pass without gradients within step {step} has no rules yet"))
    return sum(int(entry["times"]) for entry in passes)


def _with_evaluations(job: Job, regular: Prediction, evaluations: dict[int, int]) -> Prediction:
    """Return the prediction with evaluations after steps, which change what the next step finds gathered."""
    simulation, state = SimulatedSteps(job), 0
    calls: dict[int, tuple[ExpectedCall, ...]] = {}
    for step, following in pairwise([*evaluations, max(evaluations) + STEPS]):
        for number in range(step, min(following, step + STEPS)):  # all later ones are as the last
            calls[number], state = simulation.run(state, evaluations[step], trains=number >= 0)
    return regular.with_steps(calls)


class SimulatedSteps:
    """Steps of a job from any state, which is a number; 0 is the state before the first step.

    A step that begins in an earlier one's state, with equal passes, is simulated once.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._states = [_coordinator(job)]
        self._known: dict[tuple[int, int, bool], tuple[tuple[ExpectedCall, ...], int]] = {}

    def run(self, begin: int, passes: int, *, trains: bool) -> tuple[tuple[ExpectedCall, ...], int]:
        """Return the calls of a training step, if it trains, with passes of an evaluation after it, and the state."""
        key = begin, passes, trains
        if key not in self._known:
            state = deepcopy(self._states[begin])
            step = _step(self._job, run_step(state, self._job.micro_batches)) if trains else ()
            calls = (*step, *_evaluate(self._job, state, passes))
            if state not in self._states:
                self._states.append(state)
            self._known[key] = calls, self._states.index(state)
        return self._known[key]

    def evaluation(self, steps: int, passes: int) -> tuple[tuple[ExpectedCall, ...], tuple[ExpectedCall, ...]]:
        """Return the calls of an evaluation's passes after a number of steps, and those of the step behind it."""
        if self._job.is_older("deepspeed", 0, 15, 4):  # it has a coordinator of its own for evaluations
            raise NotPredictedError("evaluations under ZeRO-3 of DeepSpeed before 0.15.4 have no rules yet")
        state = 0
        for _ in range(steps):
            _, state = self.run(state, 0, trains=True)
        evaluated, state = self.run(state, passes, trains=False)
        return evaluated, self.run(state, 0, trains=True)[0]


def _evaluate(job: Job, state: Coordinator, passes: int) -> Iterator[ExpectedCall]:
    before: object = None
    for _ in range(MAX_DIFFERENT_PASSES):
        if not passes:
            return
        forward_pass(state)
        recorded, held = state.take_recorded(), ({*state.available}, {*state.inflight})
        repetitions = passes if held == before else 1  # all others are as this one
        yield from (call.times(repetitions) for call in (*comparisons(recorded), *_fetched(job, recorded)))
        passes, before = passes - repetitions, held
    if passes:
        raise NotPredictedError("what an evaluation gathers does not become the same in each pass")


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue", DEEPSPEED)
def saved_state(job: Job) -> list[ExpectedCall]:
    """Saving a checkpoint releases all parameters; afterwards each persistent one is gathered."""
    return gathers(job, [(number,) for number in sorted(persistent(job))], PERSISTENT)


def _coordinator(job: Job) -> Coordinator:
    """Return the coordinator before the first step."""
    secondary = frozenset(number for group in job.groups for number in group) if hpz_ranks(job) else None
    elements = {number: parameter.elements for number, parameter in enumerate(job.parameters)}
    root = sequential_model.model_as_run(job) if job.is_gpt_neox else job.root
    return Coordinator(
        root,
        elements,
        persistent(job),
        limits(job),
        segments=checkpointed_segments(job, root),
        resets_after_backward=job.is_older("deepspeed", 0, 15, 4),
        compares_lengths=not job.is_older("deepspeed", 0, 17, 6),
        secondary=secondary,
    )


def _fetched(job: Job, recorded: CoordinatorCalls) -> list[ExpectedCall]:
    return [*gathers(job, recorded.gathers, PARAMETERS), *gathers_within(job, recorded.within)]


def _step(job: Job, parts: list[CoordinatorCalls]) -> tuple[ExpectedCall, ...]:
    *passes, optimizer = parts
    return (
        *(call for part in passes for call in comparisons(part)),
        *(call for part in passes for call in _fetched(job, part)),
        *(call.times(job.micro_batches) for call in reductions(job)),
        *overflow_check(job),
        *norms(job),
        *gathers(job, optimizer.gathers, PERSISTENT),
    )


def _bars(job: Job, parts: list[CoordinatorCalls], step: tuple[ExpectedCall, ...]) -> Iterator[WaterfallBar]:
    """Two thirds of equation 3 are all_gathers of the parameters, a third is the gradients' reduce_scatter."""
    size = job.parameter_size
    third = engine.ring_bytes(job, job.elements, size)
    twice = 2 * job.micro_batches
    small = sum(job.parameters[number].elements for number in persistent(job))
    fetched = sum(
        job.parameters[number].elements
        for part in parts
        for gathered in (*part.gathers, *part.within)
        for number in gathered
    )
    gathered_once_a_pass = twice * (job.elements - small) + small
    less_or_more = (
        "parameters that are still gathered"
        if fetched <= gathered_once_a_pass
        else "parameters gathered more than twice (recomputation, shared weights)"
    )
    among_all_ranks = [replace(call, ranks=None) for call in step]
    levels = {
        f"parameters pass twice in each of {job.micro_batches} micro-batches": third * twice,
        "small parameters gathered once (persistence threshold)": engine.ring_bytes(job, gathered_once_a_pass, size),
        less_or_more: engine.ring_bytes(job, fetched, size),
        "padding of parameters to equal parts": total_wire_bytes(among_all_ranks, job.ranks, PARAMETERS, PERSISTENT),
        "gathered from fewer ranks (hpZ)": total_wire_bytes(step, job.ranks, PARAMETERS, PERSISTENT),
    }
    yield from level_bars(third * 2, levels)
    levels = engine.gradient_levels(job)
    once = [*levels.values()][-1]
    levels[f"gradients reduced in each of {job.micro_batches} micro-batches"] = once * job.micro_batches
    reduced = sum(call.bytes for call in step if call.cause == GRADIENTS)
    levels["padding of gradients to equal parts"] = all_gather_volume(reduced, job.ranks)
    levels["all_reduce in place of reduce_scatter"] = total_wire_bytes(step, job.ranks, GRADIENTS)
    yield from level_bars(third, levels)
    yield from cause_bars(step, job.ranks, PARAMETERS, PERSISTENT, GRADIENTS)


@rule("deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param, _partition_param", DEEPSPEED)
def padded_elements(job: Job, tensor: ModelTensor) -> int:
    """A parameter is padded so that all ranks have equal parts; returned are its elements."""
    return ceil(tensor.elements / job.ranks) * job.ranks


@rule("deepspeed.runtime.zero.partition_parameters.Init._zero_init_param; "
      "deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model", DEEPSPEED)  # fmt: skip
def initial_broadcasts(job: Job) -> list[ExpectedCall]:
    """Rank 0 broadcasts each parameter, as bytes, before it is partitioned.

    Parameters that are not yet partitioned when the engine is made are also broadcast with the model. A job that does
    not tell which these are has none: its model was made under `deepspeed.zero.Init`.
    """
    partitioned = "first parameters, one broadcast each, as uint8"
    with_model = "parameters not yet partitioned when the engine is made, once more"
    late = (job.parameters[number] for number in job.row.get("partitioned_by_engine", ()))
    return [
        *(ExpectedCall("broadcast", parameter.bytes, partitioned) for parameter in job.parameters),
        *(ExpectedCall("broadcast", parameter.bytes, with_model) for parameter in late),
    ]


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__init__, _setup_for_real_optimizer", DEEPSPEED)
def barriers(job: Job) -> list[ExpectedCall]:
    """One barrier is before the partitions are moved together, two around the optimizer's state."""
    return [ExpectedCall("barrier", 0, BARRIERS, 3)]


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks", DEEPSPEED)
def initial_gathers(job: Job) -> list[ExpectedCall]:
    """Each trained parameter is gathered once, so that a hook can be put on its gradient."""
    cause = "every parameter once, to put a hook on its gradient"
    parameters = (job.parameters[number] for group in job.groups for number in group)
    return [
        ExpectedCall("all_gather", padded_elements(job, parameter) * parameter.size, cause)
        for parameter in parameters
        if parameter.trainable
    ]


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.mark_persistent_parameters", DEEPSPEED)
def persistent(job: Job) -> frozenset[int]:
    """Parameters up to param_persistence_threshold stay gathered, together up to model_persistence_threshold."""
    limit, total_limit = int(job.zero("param_persistence_threshold")), int(job.zero("model_persistence_threshold"))
    numbers, total = set(), 0
    for number, parameter in enumerate(job.parameters):
        if parameter.elements <= limit and total + parameter.elements <= total_limit:
            numbers.add(number)
            total += parameter.elements
    return frozenset(numbers)


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer", DEEPSPEED)
def limits(job: Job) -> CoordinatorLimits:
    """The engine hands three settings to the coordinator."""
    names = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    return CoordinatorLimits(*(int(job.zero(name)) for name in names))


@rule("deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.all_gather_coalesced", DEEPSPEED)
def gathers(job: Job, sets: Iterable[tuple[int, ...]], cause: str) -> list[ExpectedCall]:
    """A set of parameters is one call for each element type, or one for each parameter (allgather_sequential)."""
    calls = []
    ranks = job.ranks if hpz_ranks(job) else None
    for numbers in (numbers for together in sets for numbers in _gathered_together(job, together)):
        elements = sum(padded_elements(job, job.parameters[number]) for number in numbers)
        most = None if cause == PERSISTENT else len(numbers)
        payload = elements * job.parameters[numbers[0]].size
        calls.append(ExpectedCall("all_gather", payload, cause, most=most, ranks=ranks))
    return calls


@rule("deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.all_gather_coalesced "
      "(use_secondary_tensor)", DEEPSPEED)  # fmt: skip
def gathers_within(job: Job, sets: Iterable[tuple[int, ...]]) -> list[ExpectedCall]:
    """With hpZ, gathers are of as many bytes, among the ranks that share the secondary partition."""
    return [replace(call, ranks=hpz_ranks(job)) for call in gathers(job, sets, PARAMETERS)]


@rule("deepspeed.utils.groups._create_zero_param_parallel_group", DEEPSPEED)
def hpz_ranks(job: Job) -> int:
    """zero_hpz_partition_size ranks share a secondary partition of all parameters; 0: there is none."""
    size = int(job.zero("zero_hpz_partition_size"))
    return min(size, job.ranks) if size > 1 else 0


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.pre_sub_module_forward_function "
      "(in torch.utils.checkpoint)", DEEPSPEED)  # fmt: skip
def checkpointed_segments(job: Job, root: ModuleNode) -> list[CheckpointedSegment]:
    """Layers are recomputed in backward as the model says (`neox_args`), checkpoint_num_layers at a time."""
    if "model" not in job.row or not job.model("checkpoint_activations", False):
        return []
    if len(job.trainable) < len(job.parameters):
        raise NotPredictedError("ZeRO-3 with recomputed activations and frozen parameters has no rules yet")
    interval, children = int(job.model("checkpoint_num_layers", 1)), root.children
    reentrant, masked = bool(job.model("checkpoint_reentrant", True)), float(job.model("hidden_dropout", 0.0)) > 0
    if job.is_gpt_neox:
        segments = sequential_model.checkpointed_segments(job, root)
    else:
        names = [str(row["name"]) for row in job.fact("modules")]
        layers = [position for position, child in enumerate(children) if _LAYER.search(names[child.number])]
        count = int(job.model("num_layers"))
        if len(layers) != count or layers != [*range(layers[0], layers[0] + count)]:
            raise NotPredictedError("the modules in the log are not the layers that the model says it has")
        segments = [(first, min(first + interval, layers[-1] + 1)) for first in layers[::interval]]
    return [CheckpointedSegment(first, end, reentrant, masked) for first, end in segments]


def _gathered_together(job: Job, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    if job.zero("allgather_sequential"):
        return [(number,) for number in numbers]
    types: dict[str, list[int]] = {}
    for number in numbers:
        types.setdefault(job.parameters[number].dtype, []).append(number)
    return [tuple(part) for part in types.values()]


@rule("deepspeed.runtime.zero.utils.assert_lst_len_same_as_other_ranks, get_lst_from_rank0", DEEPSPEED)
def comparisons(recorded: CoordinatorCalls) -> list[ExpectedCall]:
    """Rank 0 broadcasts each list that ranks compare, as 64-bit numbers. Modules that do not run are not in it."""
    return [
        ExpectedCall("broadcast", _INT64 * most, COMPARED, least=_INT64 * least if least < most else None)
        for most, least in recorded.compared
    ]


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads", DEEPSPEED)
def reductions(job: Job) -> list[ExpectedCall]:
    """Gradients of a micro-batch are reduced in buckets; with reduce_scatter off all_reduced, without padding."""
    size, limit = element_size(engine.communication_type(job)), int(job.zero("reduce_bucket_size"))
    grouped = sorted(number for group in job.groups for number in group)
    order = reduction_order(job, [job.parameters[number] for number in grouped if job.parameters[number].trainable])
    elements = [parameter.elements for parameter in order]
    calls = []
    for bucket in gradients.buckets_within_limit(elements, limit):
        held = sum(elements[position] for position in bucket)
        if job.zero("contiguous_gradients") and held <= limit and not job.zero("reduce_scatter"):
            calls.append(ExpectedCall("all_reduce", held * size, GRADIENTS, most=1))
        else:
            padded = sum(padded_elements(job, order[position]) for position in bucket)
            calls.append(ExpectedCall("reduce_scatter", padded * size, GRADIENTS, most=1))
    spare = gradients.max_buckets_within_limit(sum(elements), limit, len(elements)) - len(calls)
    return [replace(call, most=1 + max(spare, 0)) if number == 0 else call for number, call in enumerate(calls)]


@rule("deepspeed.runtime.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses._enable_mem_efficient_linear",
      DEEPSPEED)  # fmt: skip
def reduction_order(job: Job, tensors: list[ModelTensor]) -> list[ModelTensor]:
    """Gradients become ready in backward order, as ZeRO-3's own linear layers return them."""
    order = gradients.gradient_order(tensors)
    return gradients.zero3_linear_order(order) if job.zero("memory_efficient_linear") else order


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._overflow_check_and_loss_scale_update", DEEPSPEED)
def overflow_check(job: Job) -> list[ExpectedCall]:
    """The check all_reduces one byte, in fp16 only."""
    return [ExpectedCall("all_reduce", 1, OVERFLOW)] if job.fact("precision") == "fp16" else []


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups, get_grad_norm_direct", DEEPSPEED)
def norms(job: Job) -> list[ExpectedCall]:
    """Each sub-group of the optimizer all_reduces a number, with or without clipping."""
    return [ExpectedCall("all_reduce", element_size(str(job.fact("norm_dtype"))), NORM)] * len(job.groups)
