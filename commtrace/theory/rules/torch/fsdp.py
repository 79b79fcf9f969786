"""FSDP2 (`fully_shard`) and HSDP: each rank keeps a shard of every parameter, unit by unit.

A unit consists of the modules of one `fully_shard` call. One all_gather of its parameters precedes its forward pass,
and its backward pass if they were resharded. One reduce_scatter of its gradients follows its backward pass (HSDP: then
one all_reduce among the ranks that hold replicas of the same shard). Nothing is sent at start-up: every rank builds the
whole model and keeps its shard.

Sizes and counts are exact: they do not depend on the order of units. Assumptions that the captured job cannot confirm:
every unit runs once in each pass, and all of its trained parameters get a gradient. The passes of a step (micro-batches
with their settings, and evaluations) are those in the log. If it has none, a step has the micro-batches that the model
declares (`neox_args`), or one. Gradients are clipped if the model declares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import ceil, prod
from typing import Final, TypeAlias

from commtrace.job_row import PassesRow, PassRow, UnitRow
from commtrace.theory.closed_forms import all_gather_volume, all_reduce, hybrid_sharded
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    count_calls,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import ALONE, Job, NotPredictedError, element_size, refuse
from commtrace.theory.rules.registry import TORCH, rule

PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
COPIES: Final = "gradients among replicas"
NORM: Final = "norm of the gradients"


@dataclass(frozen=True)
class FsdpParameter:
    """A parameter of a unit."""

    shape: tuple[int, ...]  # before sharding
    dim: int  # the dimension that is sharded
    dtype: str  # of its all_gather, and of its gradient before reduction
    trained: bool

    @property
    def elements(self) -> int:
        """Number of elements, before sharding."""
        return prod(self.shape)

    def padded_bytes(self, shards: int, dtype: str) -> int:
        """Return the bytes of its elements in a dtype, including the padding to equal shards."""
        return padded_elements(self.shape, self.dim, shards) * element_size(dtype)


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that are communicated together."""

    number: int  # among the job's units
    parameters: tuple[FsdpParameter, ...]
    reduce_dtype: str | None
    shards: int
    copies: int
    kept: bool  # whether parameters stay unsharded between forward and backward
    within: int  # ranks that parameters are sharded over between forward and backward

    @property
    def trained(self) -> tuple[FsdpParameter, ...]:
        """Parameters that get a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.trained)

    @property
    def gradient_dtype(self) -> str:
        """Dtype in which gradients are reduced."""
        return self.reduce_dtype or min(parameter.dtype for parameter in self.trained)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, with padding."""
        return sum(parameter.padded_bytes(self.shards, self.gradient_dtype) for parameter in self.trained)


@dataclass(frozen=True)
class Pass:
    """A forward pass of the model and, if it trains, its backward pass, with the settings at its end."""

    trains: bool = True
    reduces: bool = True
    among_copies: bool = True
    reshards: bool = True
    is_last: bool = True  # before an optimizer step, as set_is_last_backward says
    resharded: frozenset[int] | None = frozenset()  # units that the program then reshards (for a state dict); None: all
    unsharded: frozenset[int] = frozenset()  # units that the program then gathers (`unshard`)


NO_PASS: Final = Pass(trains=False, reduces=False, resharded=None)
"""Stands before the first pass, if the program gathers units there. It does not run."""

StepPasses: TypeAlias = tuple[tuple[Pass, int], ...]
"""The passes of a step in their order, each with the number of times that it runs."""


def predict(job: Job) -> Prediction:
    """Predict what a rank communicates. Raise NotPredictedError for settings without rules."""
    units = units_of(job)
    refuse(
        (job.ranks < 2, ALONE),
        (not all(unit.trained for unit in units),
         "units of fully_shard without a trained parameter have no rules yet"),
    )  # fmt: skip
    recorded = recorded_passes(job) or {0: declared_passes(job)}
    regular = typical_passes(job)

    @cache
    def calls(before: Pass | None, passes: StepPasses) -> tuple[ExpectedCall, ...]:
        clipped = clipping(job, units) if any(model_pass.trains for model_pass, _ in passes) else []
        return (*step_calls(units, before, passes), *unused_prefetches(job, units, before, passes), *clipped)

    steps = {0: (), **{first: calls(*passes) for first, passes in _timeline(recorded).items()}}
    start, step = steps.pop(-1, ()), calls(regular[-1][0], regular)
    copies = max(unit.copies for unit in units)
    form, bars = _bars(job, units, regular, step)
    scheme = f"HSDP, {copies} copies" if copies > 1 else "FSDP2"
    prediction = Prediction(scheme, max(unit.shards for unit in units), start, (step,), form, tuple(bars))
    return prediction if {*steps.values()} == {step} else prediction.with_steps(steps)


def typical_passes(job: Job) -> StepPasses:
    """Return the most frequent passes of a training step: those in the log, else as the model declares them.

    Raises:
        NotPredictedError: The log has passes without rules.
    """
    recorded = recorded_passes(job) or {0: declared_passes(job)}
    return _regular_passes(recorded) or declared_passes(job)


def declared_passes(job: Job) -> StepPasses:
    """Return the passes of a step as the model declares them. The last micro-batch always reduces gradients."""
    row = job.row
    first, last = Pass(True, row.reduce_grads, row.all_reduce_grads, row.reshard_after_backward), Pass()
    if first == last or job.micro_batches == 1:
        return ((last, job.micro_batches),)
    return (first, job.micro_batches - 1), (last, 1)


def recorded_passes(job: Job) -> dict[int, StepPasses]:
    """Return the passes of the log's steps, keyed by the first step that has them, ascending; empty without any."""
    return dict(sorted((row.step, _read_passes(row)) for row in job.row.passes))


def _read_passes(row: PassesRow) -> StepPasses:
    if row.passes is None:
        raise NotPredictedError(f"the log does not have the passes of the steps from {row.step} on")
    passes: list[tuple[Pass, int]] = []
    for entry in row.passes:
        if entry.kind not in ("resharded", "unsharded"):
            passes.append((_read_pass(entry, row.step), entry.times))
            continue
        last, times = passes.pop() if passes else (NO_PASS, 0)
        after = _changed(last, entry)
        if after != NO_PASS:
            passes += [(last, times - 1)] * (times > 1) + [(after, min(times, 1))]
    return tuple(passes)


def _changed(before: Pass, entry: PassRow) -> Pass:
    """Return a pass after which the program also reshards or gathers units."""
    units = frozenset(entry.get(PassRow.modules, ()))
    if entry.kind == "unsharded":
        return replace(before, unsharded=before.unsharded | units)
    if not units or before.resharded is None:
        return replace(before, resharded=None, unsharded=before.unsharded - units if units else frozenset())
    return replace(before, resharded=before.resharded | units, unsharded=before.unsharded - units)


def _read_pass(entry: PassRow, step: int) -> Pass:
    if entry.kind == "evaluation":
        return Pass(trains=False)
    if entry.kind != "training":
        is_part = entry.kind == "part"
        reason = "only a part of the model ran" if is_part else "not every forward pass had its backward pass"
        raise NotPredictedError(f"{reason} in step {step}")
    reduces, among_copies, reshards = entry.reduce_grads, entry.all_reduce_grads, entry.reshard_after_backward
    if reduces is None or among_copies is None or reshards is None:
        raise NotPredictedError(f"units whose settings differ (set_requires_gradient_sync ...) in step {step}")
    return Pass(True, reduces, among_copies, reshards, entry.is_last_backward)


def _timeline(recorded: dict[int, StepPasses]) -> dict[int, tuple[Pass | None, StepPasses]]:
    """Return the last pass before each step and the passes of the step, keyed by the first of equal steps."""
    timeline: dict[int, tuple[Pass | None, StepPasses]] = {}
    before = None
    for step, following in pairwise([*recorded, max(recorded) + 2]):
        passes = recorded[step]
        timeline[step] = before, passes
        before = passes[-1][0] if passes else before
        if following > step + 1:
            timeline[step + 1] = before, passes
    return timeline


def _regular_passes(recorded: dict[int, StepPasses]) -> StepPasses:
    """Return the most frequent training passes of a step; empty without any."""
    counts = Counter[StepPasses]()
    for step, following in pairwise([*recorded, max(recorded) + 1]):
        training = tuple((model_pass, times) for model_pass, times in recorded[step] if model_pass.trains)
        counts[training] += (following - step) * bool(training)
    return counts.most_common(1)[0][0]


def units_of(job: Job) -> list[FsdpUnit]:
    """Return the job's units, the root first."""
    return [_unit(job, number, row) for number, row in enumerate(job.row.units) if row.parameters]


def _unit(job: Job, number: int, row: UnitRow) -> FsdpUnit:
    refuse((not row.unshard_in_backward, "set_unshard_in_backward has no rules yet"))
    parameters = (
        FsdpParameter(tuple(shape), dim, dtype, job.parameters[parameter].trainable)
        for parameter, shape, dim, dtype in zip(row.parameters, row.shapes, row.dims, row.dtypes, strict=True)
    )
    reshard = row.reshard_after_forward
    within = row.shards if isinstance(reshard, bool) else reshard
    return FsdpUnit(number, tuple(parameters), row.reduce_dtype, row.shards, row.copies, reshard is False, within)


def _bars(
    job: Job, units: list[FsdpUnit], passes: StepPasses, step: tuple[ExpectedCall, ...]
) -> tuple[WaterfallBar, list[WaterfallBar]]:
    """Return the closed form, and the bars from it to all_gathers (2/3), reduce_scatters (1/3), HSDP's all_reduces."""
    shards, copies = max(unit.shards for unit in units), max(unit.copies for unit in units)
    all_parameters = [parameter for unit in units for parameter in unit.parameters]
    elements, size = sum(parameter.elements for parameter in all_parameters), job.parameter_size
    label = "HSDP: 3 P (F-1)/F + 2 (P/F) (R-1)/R" if copies > 1 else "equation 3: 3 P (d-1)/d"
    form = WaterfallBar(label, hybrid_sharded(elements, shards, copies) * size)
    third = all_gather_volume(elements, shards) * size
    parameter_bytes = sum(parameter.elements * element_size(parameter.dtype) for parameter in all_parameters)
    padded = sum((all_gather_volume(all_gather_bytes(unit), unit.shards) for unit in units), Fraction(0))
    micro_batches = sum(times for _, times in passes)
    gathers = 2 * micro_batches
    gather_levels = {
        f"parameters pass twice in each of {micro_batches} micro-batches": gathers * third,
        f"parameters travel as {all_parameters[0].dtype}": gathers * all_gather_volume(parameter_bytes, shards),
        "padding of parameters to equal parts": gathers * padded,
        "parameters that are still gathered, or gathered from fewer ranks": total_wire_bytes(step, shards, PARAMETERS),
    }
    trained = [(parameter.elements, element_size(unit.gradient_dtype)) for unit in units for parameter in unit.trained]
    gradient_bytes = {
        "frozen parameters have no gradients": sum(number for number, _ in trained) * size,
        f"gradients travel as {units[0].gradient_dtype}": sum(number * width for number, width in trained),
        "padding of gradients to equal parts": sum(unit.gradient_bytes for unit in units),
    }
    reduce_levels = {label: all_gather_volume(held, shards) for label, held in gradient_bytes.items()}
    reduce_scatters = sum(times for model_pass, times in passes if model_pass.reduces)
    reduce_levels[f"gradients reduced {reduce_scatters} times a step"] = total_wire_bytes(step, shards, GRADIENTS)
    bars = [*level_bars(2 * third, gather_levels), *level_bars(third, reduce_levels)]
    if copies > 1:
        replica_levels = {
            f"among replicas: {label.removesuffix(' to equal parts')}": all_reduce(held, copies) / shards
            for label, held in gradient_bytes.items()
        }
        all_reduces = sum(times for model_pass, times in passes if model_pass.reduces and model_pass.among_copies)
        replica_levels[f"among replicas: reduced {all_reduces} times a step"] = total_wire_bytes(step, copies, COPIES)
        bars += level_bars(form.bytes - 3 * third, replica_levels)
    return form, [*bars, *cause_bars(step, shards, PARAMETERS, GRADIENTS, COPIES)]


_FSDP: Final = "torch.distributed.fsdp._fully_shard."


@rule(_FSDP + "_fsdp_param.FSDPParam._init_sharded_param; " + _FSDP + "_fsdp_common._get_dim0_padded_size", TORCH)
def padded_elements(shape: tuple[int, ...], dim: int, shards: int) -> int:
    """Return the elements of a parameter with its sharded dimension padded to a multiple of the ranks."""
    return prod(ceil(size / shards) * shards if axis == dim else size for axis, size in enumerate(shape))


@rule(_FSDP + "_fsdp_collectives.foreach_all_gather", TORCH)
def all_gather_bytes(unit: FsdpUnit) -> int:
    """Return the payload in bytes of a unit's all_gather, which contains parameters of all dtypes."""
    return sum(parameter.padded_bytes(unit.shards, parameter.dtype) for parameter in unit.parameters)


def step_calls(units: Sequence[FsdpUnit], before: Pass | None, passes: StepPasses) -> list[ExpectedCall]:
    """Return the calls of a step's passes; `before` is the last pass before the step, None without any."""
    calls: list[ExpectedCall] = []
    for model_pass, times in passes:
        for unit in units if times else ():
            repeated = all_gathers(unit, model_pass, model_pass) if times > 1 else []
            calls += [*all_gathers(unit, before, model_pass), *(call.times(times - 1) for call in repeated)]
            calls += [call.times(times) for call in reductions(unit, model_pass)]
        before = model_pass
    # Passes with different settings may have the same calls, which become one entry.
    return [call.times(count) for call, count in count_calls(calls).items()]


@rule(_FSDP + "_fsdp_param_group.FSDPParamGroup.unshard, reshard; "
      + _FSDP + "_fsdp_state.FSDPState._lazy_init (the root stays whole)", TORCH)  # fmt: skip
def all_gathers(unit: FsdpUnit, before: Pass | None, model_pass: Pass) -> list[ExpectedCall]:
    """Return the all_gathers of a unit.

    Prefetching and recomputed activations change when a unit is gathered, not how often.
    """
    payload = all_gather_bytes(unit)
    groups = gathered_over(unit, before, model_pass)
    return [ExpectedCall("all_gather", payload, PARAMETERS, ranks=ranks) for ranks in groups if ranks > 1]


def gathered_over(unit: FsdpUnit, before: Pass | None, model_pass: Pass) -> tuple[int, int]:
    """Return the ranks over which a unit is gathered before forward, and before backward; 1: it is not.

    It is gathered before forward if it is sharded, before backward if forward resharded it. `before` is the pass before
    this one, None without any.
    """
    after_forward = 1 if unit.kept else unit.within  # ranks that its shards are on; 1: unsharded
    if before is not None and unit.number in before.unsharded:
        ranks_before = 1
    elif before is None or before.resharded is None or unit.number in before.resharded:
        ranks_before = unit.shards
    elif before.trains:
        ranks_before = unit.shards if before.reshards else 1
    else:
        ranks_before = after_forward
    return ranks_before, after_forward if model_pass.trains else 1


@rule(_FSDP + "_fsdp_param_group.FSDPParamGroup._backward_prefetch, finalize_backward", TORCH)
def unused_prefetches(
    job: Job, units: Sequence[FsdpUnit], before: Pass | None, passes: StepPasses
) -> Iterator[ExpectedCall]:
    """Yield prefetched all_gathers that are not used: of the last unit, in the backward pass after an evaluation.

    The first unit's backward prefetches the unit that ran before its forward, which is the evaluation's last unit. A
    root with parameters runs last, and is unsharded at that time.
    """
    if len(units) < 2 or any(row.name == "" and row.parameters for row in job.row.units):
        return
    last = units[-1]
    for model_pass, _ in passes:
        if not model_pass.is_last:
            raise NotPredictedError("set_is_last_backward of a root without parameters has no rules yet")
        is_after_evaluation = before is not None and not before.trains
        if model_pass.trains and is_after_evaluation and model_pass.reshards and last.shards > 1:
            yield ExpectedCall("all_gather", all_gather_bytes(last), PARAMETERS, ranks=last.shards)
        before = model_pass


@rule(_FSDP + "_fsdp_param_group.FSDPParamGroup.post_backward; " + _FSDP + "_fsdp_collectives.foreach_reduce", TORCH)
def reductions(unit: FsdpUnit, model_pass: Pass) -> list[ExpectedCall]:
    """Return a unit's reduce_scatter of gradients, and HSDP's all_reduce of the shard among replicas.

    Only passes that synchronize gradients (set_requires_gradient_sync) have them. Gradients are padded like parameters.
    """
    calls: list[ExpectedCall] = []
    reduces = model_pass.trains and model_pass.reduces
    if reduces and unit.shards > 1:
        calls.append(ExpectedCall("reduce_scatter", unit.gradient_bytes, GRADIENTS, ranks=unit.shards))
    if reduces and model_pass.among_copies and unit.copies > 1:
        calls.append(ExpectedCall("all_reduce", unit.gradient_bytes // unit.shards, COPIES, ranks=unit.copies))
    return calls


@rule("torch.nn.utils.clip_grad_norm_ (of DTensors)", TORCH)
def clipping(job: Job, units: list[FsdpUnit]) -> list[ExpectedCall]:
    """Return the all_reduce of all gradients' norms in the sharding group: one call, with one number per parameter."""
    shards = max(unit.shards for unit in units)
    if not job.clips_gradients or shards < 2:
        return []
    return [ExpectedCall("all_reduce", len(job.trainable) * job.parameter_size, NORM, ranks=shards)]
