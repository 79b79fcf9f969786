"""ZeRO-3: each rank keeps a shard of every parameter, and parameters are gathered where they are used.

Bytes are exact, and so are calls under the assumptions of `zero3_passes`. Without these, there is at most one call for
each parameter that is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from commtrace.job_row import PassesRow, PassRow
from commtrace.theory.closed_forms import all_gather_volume, zero_3
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, ModuleNode, NotPredictedError, refuse
from commtrace.theory.rules.megatron import sequential_model
from commtrace.theory.rules.registry import DEEPSPEED, rule

from . import engine, zero3_calls
from .engine import GRADIENTS
from .zero3_coordinator import CheckpointedSegment, Coordinator, CoordinatorCalls, CoordinatorLimits, leave_gathered
from .zero3_passes import forward_pass, run_step

MAX_DIFFERENT_PASSES: Final = 16  # passes of an evaluation to simulate before they must have converged
STEPS: Final = 4  # steps to simulate: the trace of modules is complete in the second at the latest
_LAYER: Final = re.compile(r"(?:^|[._])\d+$")


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates. Raise NotPredictedError for settings without rules."""
    engine.check(job)
    optimizer, zero = job.row.optimizer, job.row.zero
    refuse(
        (job.tensor > 1, "ZeRO-3 with tensor parallelism has no rules yet"),
        (zero.use_all_reduce_for_fetch_params, "use_all_reduce_for_fetch_params has no rules yet"),
        (zero.zero_quantized_weights, "zero_quantized_weights has no rules yet"),
        (zero.zero_quantized_nontrainable_weights, "zero_quantized_nontrainable_weights has no rules yet"),
        (zero.zero_quantized_gradients, "zero_quantized_gradients has no rules yet"),
        (zero.enable_sanity_checks, "enable_sanity_checks has no rules yet"),
        (optimizer != "DeepSpeedZeroOptimizer_Stage3", f"the optimizer {optimizer} under ZeRO-3 has no rules yet"),
    )
    between = between_steps(job)
    state = _coordinator(job)
    kinds = {entry.kind for entries in between.values() for entry in entries}
    old_evaluations = "evaluation" in kinds and state.resets_after_backward
    refuse((old_evaluations, "evaluations with DeepSpeed before 0.15.4 have no rules yet"))
    evaluated = tuple(_run_entries(job, state, between[-1]))
    start = (*zero3_calls.initial_broadcasts(job), *zero3_calls.barriers(job), *zero3_calls.initial_all_gathers(job))
    recorded = [run_step(state, job.micro_batches) for _ in range(STEPS)]
    steps = tuple(_step(job, calls) for calls in recorded)
    form = WaterfallBar("equation 3: 3 P (d-1)/d", zero_3(job.elements, job.ranks) * job.parameter_size)
    persistent_gathers = zero3_calls.all_gathers(job, recorded[-1][-1].all_gathers, zero3_calls.PERSISTENT)
    skipped = ((*zero3_calls.norms(job), *persistent_gathers), tuple(persistent_gathers))
    scheme = f"ZeRO-3, hpZ within {zero3_calls.hpz_ranks(job)} ranks" if zero3_calls.hpz_ranks(job) else "ZeRO-3"
    bars = tuple(_bars(job, recorded[-1], steps[-1]))
    prediction = Prediction(scheme, job.ranks, start + evaluated, steps, form, bars, skipped)
    has_later = any(entries for step, entries in between.items() if step >= 0)
    return _with_entries(job, prediction, between) if has_later else prediction


class Entry(NamedTuple):
    """What precedes a step: passes of an evaluation, or parameters that something else left gathered."""

    kind: str
    passes: int
    gathered: tuple[int, ...] | None = None
    """None: the parameters that are kept."""


Entries: TypeAlias = tuple[Entry, ...]


def between_steps(job: Job) -> dict[int, Entries]:
    """Return what follows each step before the next begins, by the first of equal steps; -1: before all steps."""
    # GPT-NeoX's evaluations follow from its arguments.
    rows = [] if job.is_gpt_neox else sorted(job.row.passes, key=lambda row: row.step)
    by_step = {row.step: _entries(row) for row in rows}
    before = by_step.get(-1, ())
    return {-1: before, 0: before, **by_step}


def _entries(row: PassesRow) -> Entries:
    if row.passes is None:
        raise NotPredictedError(f"the log does not have the evaluations from step {row.step} on")
    passes = [entry for entry in row.passes if entry.kind not in ("external", "returned", "idle")]
    interrupts = any(entry.kind not in ("evaluation", "gathered") for entry in passes)
    refuse((interrupts, f"a forward pass without gradients within step {row.step} has no rules yet"))
    return tuple(map(_entry, passes))


def _entry(entry: PassRow) -> Entry:
    if entry.kind == "evaluation":
        return Entry(entry.kind, entry.times)
    return Entry(entry.kind, 0, None if entry.parameters is None else tuple(entry.parameters))


def _with_entries(job: Job, regular: Prediction, between: dict[int, Entries]) -> Prediction:
    """Return the prediction with what happens after steps, and leaves parameters gathered for the next step."""
    simulation, state = SimulatedSteps(job), 0
    calls: dict[int, tuple[ExpectedCall, ...]] = {}
    for step, following in pairwise([*between, max(between) + STEPS]):
        for number in range(step, min(following, step + STEPS)):  # all later ones equal the last
            calls[number], state = simulation.run(state, between[step], trains=number >= 0)
    return regular.with_steps(calls)


class SimulatedSteps:
    """Simulation of a job's steps. `run` takes and returns indices of states; 0 is the state before the first step.

    Steps with equal passes that start in the same state are simulated once.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._states = [_coordinator(job)]
        self._known: dict[tuple[int, Entries, bool], tuple[tuple[ExpectedCall, ...], int]] = {}

    def run(self, start: int, entries: Entries, *, trains: bool) -> tuple[tuple[ExpectedCall, ...], int]:
        """Return the calls of a training step (if `trains`) and of what follows it, and the final state."""
        key = start, entries, trains
        if key not in self._known:
            state = deepcopy(self._states[start])
            step = _step(self._job, run_step(state, self._job.micro_batches)) if trains else ()
            calls = (*step, *_run_entries(self._job, state, entries))
            if state not in self._states:
                self._states.append(state)
            self._known[key] = calls, self._states.index(state)
        return self._known[key]

    def evaluation(self, steps: int, passes: int) -> tuple[tuple[ExpectedCall, ...], tuple[ExpectedCall, ...]]:
        """Return the calls of an evaluation's passes after a number of steps, and those of the next step."""
        if self._job.is_older("deepspeed", 0, 15, 4):  # these versions have a separate coordinator for evaluations
            raise NotPredictedError("evaluations under ZeRO-3 of DeepSpeed before 0.15.4 have no rules yet")
        state = 0
        for _ in range(steps):
            _, state = self.run(state, (), trains=True)
        evaluated, state = self.run(state, (Entry("evaluation", passes),), trains=False)
        return evaluated, self.run(state, (), trains=True)[0]


def _run_entries(job: Job, state: Coordinator, entries: Entries) -> Iterator[ExpectedCall]:
    for entry in entries:
        if entry.kind == "evaluation":
            yield from _evaluate(job, state, entry.passes)
        else:
            leave_gathered(state, state.persistent if entry.gathered is None else entry.gathered)


def _evaluate(job: Job, state: Coordinator, passes: int) -> Iterator[ExpectedCall]:
    before: object = None
    for _ in range(MAX_DIFFERENT_PASSES):
        if not passes:
            return
        forward_pass(state)
        recorded, held = state.take_recorded(), ({*state.available}, {*state.inflight})
        repetitions = passes if held == before else 1  # all later ones equal this one
        calls = (*zero3_calls.comparisons(recorded), *_parameter_all_gathers(job, recorded))
        yield from (call.times(repetitions) for call in calls)
        passes, before = passes - repetitions, held
    if passes:
        raise NotPredictedError("the passes of an evaluation do not converge to the same calls")


def _coordinator(job: Job) -> Coordinator:
    """Return the coordinator before the first step."""
    secondary = frozenset(number for group in job.groups for number in group) if zero3_calls.hpz_ranks(job) else None
    elements = {number: parameter.elements for number, parameter in enumerate(job.parameters)}
    root = sequential_model.executed_model(job) if job.is_gpt_neox else job.root
    return Coordinator(
        root,
        elements,
        zero3_calls.persistent_parameters(job),
        limits(job),
        segments=checkpointed_segments(job, root),
        resets_after_backward=job.is_older("deepspeed", 0, 15, 4),
        compares_lengths=not job.is_older("deepspeed", 0, 17, 6),
        secondary=secondary,
    )


def _parameter_all_gathers(job: Job, recorded: CoordinatorCalls) -> list[ExpectedCall]:
    return [
        *zero3_calls.all_gathers(job, recorded.all_gathers, zero3_calls.PARAMETERS),
        *zero3_calls.hpz_all_gathers(job, recorded.hpz_all_gathers),
    ]


def _step(job: Job, recorded: list[CoordinatorCalls]) -> tuple[ExpectedCall, ...]:
    *micro_batches, optimizer = recorded
    return (
        *(call for micro_batch in micro_batches for call in zero3_calls.comparisons(micro_batch)),
        *(call for micro_batch in micro_batches for call in _parameter_all_gathers(job, micro_batch)),
        *(call.times(job.micro_batches) for call in zero3_calls.reductions(job)),
        *zero3_calls.overflow_check(job),
        *zero3_calls.norms(job),
        *zero3_calls.all_gathers(job, optimizer.all_gathers, zero3_calls.PERSISTENT),
    )


def _bars(job: Job, recorded: list[CoordinatorCalls], step: tuple[ExpectedCall, ...]) -> Iterator[WaterfallBar]:
    """Yield the bars from 2/3 of equation 3 to the parameters' all_gathers, and from 1/3 to the gradients' calls."""
    size = job.parameter_size
    third = engine.ring_bytes(job, job.elements, size)
    passes = 2 * job.micro_batches
    persistent_elements = sum(job.parameters[number].elements for number in zero3_calls.persistent_parameters(job))
    fetched = sum(
        job.parameters[number].elements
        for calls in recorded
        for numbers in (*calls.all_gathers, *calls.hpz_all_gathers)
        for number in numbers
    )
    once_per_pass = passes * (job.elements - persistent_elements) + persistent_elements
    fetched_label = (
        "parameters that are still gathered"
        if fetched <= once_per_pass
        else "parameters gathered more than twice (recomputation, shared weights)"
    )
    causes = zero3_calls.PARAMETERS, zero3_calls.PERSISTENT
    among_all_ranks = [replace(call, ranks=None) for call in step]
    levels = {
        f"parameters pass twice in each of {job.micro_batches} micro-batches": third * passes,
        "small parameters gathered once (persistence threshold)": engine.ring_bytes(job, once_per_pass, size),
        fetched_label: engine.ring_bytes(job, fetched, size),
        "padding of parameters to equal parts": total_wire_bytes(among_all_ranks, job.ranks, *causes),
        "gathered from fewer ranks (hpZ)": total_wire_bytes(step, job.ranks, *causes),
    }
    yield from level_bars(third * 2, levels)
    levels = engine.gradient_levels(job)
    once = [*levels.values()][-1]
    levels[f"gradients reduced in each of {job.micro_batches} micro-batches"] = once * job.micro_batches
    reduced = sum(call.bytes for call in step if call.cause == GRADIENTS)
    levels["padding of gradients to equal parts"] = all_gather_volume(reduced, job.ranks)
    levels["all_reduce in place of reduce_scatter"] = total_wire_bytes(step, job.ranks, GRADIENTS)
    yield from level_bars(third, levels)
    yield from cause_bars(step, job.ranks, *causes, GRADIENTS)


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer", DEEPSPEED)
def limits(job: Job) -> CoordinatorLimits:
    """Return the three settings that the engine passes to the coordinator."""
    zero = job.row.zero
    return CoordinatorLimits(zero.prefetch_bucket_size, zero.max_live_parameters, zero.max_reuse_distance)


@rule("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.pre_sub_module_forward_function "
      "(in torch.utils.checkpoint)", DEEPSPEED)  # fmt: skip
def checkpointed_segments(job: Job, root: ModuleNode) -> list[CheckpointedSegment]:
    """Return the segments of checkpoint_num_layers layers that the model recomputes in backward (`neox_args`)."""
    if not job.declares_architecture or not job.model.checkpoint_activations:
        return []
    if len(job.trainable) < len(job.parameters):
        raise NotPredictedError("ZeRO-3 with recomputed activations and frozen parameters has no rules yet")
    interval, children = job.model.checkpoint_num_layers, root.children
    reentrant, masked = job.model.checkpoint_reentrant, job.model.hidden_dropout > 0
    if job.is_gpt_neox:
        segments = sequential_model.checkpointed_segments(job, root)
    else:
        names = [row.name for row in job.row.modules]
        layers = [position for position, child in enumerate(children) if _LAYER.search(names[child.number])]
        count = job.model.num_layers
        if len(layers) != count or layers != [*range(layers[0], layers[0] + count)]:
            raise NotPredictedError("the modules in the log are not the layers that the model declares")
        segments = [(first, min(first + interval, layers[-1] + 1)) for first in layers[::interval]]
    return [CheckpointedSegment(first, end, reentrant, masked) for first, end in segments]
