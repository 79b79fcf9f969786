"""FSDP2 (`fully_shard`) and HSDP: each rank keeps a part of every parameter, unit by unit.

A unit is what one call of `fully_shard` was given: its parameters are gathered in one all_gather before it runs, and
its gradients reduced in one reduce_scatter behind its backward pass (HSDP: and in one all_reduce among the ranks that
hold copies of the same part). Nothing is sent at start-up: every rank makes the whole model, and keeps its part.

Exact, sizes and counts: they do not depend on the order of units. Assumed, as the job cannot say it: every unit runs
once in each micro-batch, and all of its trained parameters get a gradient. Micro-batches of a step and clipping are
what the model says of itself (`neox_args`); one that says nothing has one micro-batch, and is not clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import Any, Final

from commtrace.theory.closed_forms import all_gather_volume, all_reduce, hybrid_sharded
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.deepspeed.engine import parameter_size
from commtrace.theory.rules.registry import TORCH, rule

from .dtensor import num_sharded_parameters, styles

PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
COPIES: Final = "gradients among copies"
NORM: Final = "norm of the gradients"


@dataclass(frozen=True)
class FsdpUnit:
    """Parameters that travel together. Lists are parallel; shapes are those that FSDP divides."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    """In which they are gathered, and their gradients made."""
    trained: tuple[bool, ...]
    reduce_dtype: str | None
    shards: int
    copies: int
    kept: bool
    """From forward to backward."""
    within: int
    """Ranks among which they are divided from forward to backward."""

    @property
    def elements(self) -> int:
        """Of all of its parameters, without padding."""
        return sum(map(prod, self.shapes))

    def gradient_elements(self) -> int:
        """Of those that are trained."""
        return sum(prod(shape) for shape, trained in zip(self.shapes, self.trained, strict=True) if trained)


def predict(job: Job) -> Prediction:
    """What a rank communicates. Raises NotPredictedError for settings without rules."""
    units = units_of(job)
    check(job, units)
    step = tuple(_step(job, units))
    copies = max(unit.copies for unit in units)
    form, bars = _bars(job, units, step)
    scheme = f"HSDP, {copies} copies" if copies > 1 else "FSDP2"
    return Prediction(scheme, max(unit.shards for unit in units), (), (step,), form, tuple(bars))


def check(job: Job, units: list[FsdpUnit]) -> None:
    """Raise NotPredictedError for settings that have no rules yet."""
    if job.ranks < 2:
        raise NotPredictedError("with one data-parallel rank there is nothing to tell")
    if any(not any(unit.trained) for unit in units):
        raise NotPredictedError("units of fully_shard without a trained parameter have no rules yet")
    if not job.fact("all_reduce_grads") and job.fact("reduce_grads"):
        raise NotPredictedError("fully_shard without its all_reduce (set_requires_all_reduce) has no rules yet")


def units_of(job: Job) -> list[FsdpUnit]:
    """The job's units, the root first."""
    return [_unit(job, row) for row in job.fact("units") if row["parameters"]]


def _unit(job: Job, row: dict[str, Any]) -> FsdpUnit:
    reshard = row["reshard_after_forward"]
    if not row["unshard_in_backward"]:
        raise NotPredictedError("set_unshard_in_backward has no rules yet")
    shards = int(row["shards"])
    return FsdpUnit(
        str(row["name"]),
        tuple(tuple(map(int, shape)) for shape in row["shapes"]),
        tuple(map(int, row["dims"])),
        tuple(map(str, row["dtypes"])),
        tuple(job.parameters[number].trainable for number in row["parameters"]),
        None if row["reduce_dtype"] is None else str(row["reduce_dtype"]),
        shards,
        int(row["copies"]),
        reshard is False,
        shards if isinstance(reshard, bool) else int(reshard),
    )


def _step(job: Job, units: list[FsdpUnit]) -> Iterator[ExpectedCall]:
    yield from gathers(job, units)
    for unit in units:
        yield from (one.times(reductions(job)) for one in (*gradient_scatters(unit), *replica_sums(unit)))
    yield from clipping(job, units)


def micro_batches(job: Job) -> int:
    """Of one step."""
    return int(job.model("gradient_accumulation_steps", 1)) if "model" in job.row else 1


def clips(job: Job) -> bool:
    """Whether the program clips gradients."""
    return "model" in job.row and float(job.model("gradient_clipping", 0.0)) > 0


def _bars(job: Job, units: list[FsdpUnit], step: tuple[ExpectedCall, ...]) -> tuple[WaterfallBar, list[WaterfallBar]]:
    """Two all_gathers and a reduce_scatter; in HSDP an all_reduce of what the reduce_scatter leaves."""
    shards, copies = max(unit.shards for unit in units), max(unit.copies for unit in units)
    elements, size, parts = sum(unit.elements for unit in units), parameter_size(job), micro_batches(job)
    form = WaterfallBar(
        "HSDP: 3 P (F-1)/F + 2 (P/F) (R-1)/R" if copies > 1 else "equation 3: 3 P (d-1)/d",
        hybrid_sharded(elements, shards, copies) * size,
    )
    bytes_of = sum(sum(map(_bytes, unit.shapes, unit.dtypes)) for unit in units)
    sent = _wire(step, shards, PARAMETERS)
    padded_elements = (
        2 * parts * sum((all_gather_volume(gathered_bytes(unit), unit.shards) for unit in units), Fraction(0))
    )
    kind = units[0].dtypes[0]
    third = all_gather_volume(elements, shards) * size
    levels = {
        f"parameters pass twice in each of {parts} micro-batches": 2 * parts * third,
        f"parameters travel as {kind}": 2 * parts * all_gather_volume(bytes_of, shards),
        "padding of parameters to equal parts": padded_elements,
        "parameters that are still there, or gathered from fewer ranks": sent,
    }
    bars = level_bars(2 * third, levels)
    trained = sum(unit.gradient_elements() for unit in units)
    wide = [unit.gradient_elements() * element_size(_gradient_type(unit)) for unit in units]
    scattered_bytes = sum(_padded_gradients(unit) for unit in units)
    scatters = {
        "frozen parameters have no gradients": all_gather_volume(trained, shards) * size,
        f"gradients travel as {_gradient_type(units[0])}": all_gather_volume(sum(wide), shards),
        "padding of gradients to equal parts": all_gather_volume(scattered_bytes, shards),
        f"gradients reduced {reductions(job)} times a step": _wire(step, shards, GRADIENTS),
    }
    bars += level_bars(third, scatters)
    if copies > 1:
        share = form.bytes - 3 * third
        sums = {
            "among copies: frozen parameters have no gradients": all_reduce(trained, copies) * size / shards,
            f"among copies: gradients travel as {_gradient_type(units[0])}": all_reduce(sum(wide), copies) / shards,
            "among copies: padding of gradients": all_reduce(scattered_bytes, copies) / shards,
            f"among copies: reduced {reductions(job)} times a step": _wire(step, copies, COPIES),
        }
        bars += level_bars(share, sums)
    return form, [*bars, *cause_bars((one for one in step if one.cause == NORM), shards)]


def _wire(step: Iterable[ExpectedCall], ranks: int, cause: str) -> Fraction:
    return total_wire_bytes((one for one in step if one.cause == cause), ranks)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * element_size(dtype)


def _gradient_type(unit: FsdpUnit) -> str:
    types = {dtype for dtype, trained in zip(unit.dtypes, unit.trained, strict=True) if trained}
    return unit.reduce_dtype or min(types)


# --- rules ----------------------------------------------------------------------------------------------------------

_WHERE: Final = "torch.distributed.fsdp._fully_shard."


@rule(_WHERE + "_fsdp_param.FSDPParam._init_sharded_param; " + _WHERE + "_fsdp_common._get_dim0_padded_size", TORCH)
def padded_elements(shape: tuple[int, ...], dim: int, shards: int) -> int:
    """Elements of a parameter whose divided dimension is made a multiple of the ranks; the others stay."""
    return prod(ceil(size / shards) * shards if at == dim else size for at, size in enumerate(shape))


@rule(_WHERE + "_fsdp_collectives.foreach_all_gather", TORCH)
def gathered_bytes(unit: FsdpUnit) -> int:
    """Payload of a unit's all_gather; parameters of several types travel together, as bytes."""
    parts = zip(unit.shapes, unit.dims, unit.dtypes, strict=True)
    return sum(padded_elements(shape, dim, unit.shards) * element_size(dtype) for shape, dim, dtype in parts)


@rule(_WHERE + "_fsdp_param_group.FSDPParamGroup.unshard, reshard; "
      + _WHERE + "_fsdp_state.FSDPState._lazy_init (the root stays whole)", TORCH)  # fmt: skip
def gathers(job: Job, units: list[FsdpUnit]) -> list[ExpectedCall]:
    """Before forward, and before backward where parameters were taken apart again; not while they are whole.

    Prefetching and recomputed activations change when a unit is gathered, not how often.
    """
    found, parts = [], micro_batches(job)
    whole: set[int] = set()
    for part in range(parts):
        for at, unit in enumerate(units):
            if at not in whole:
                found += _gather(unit, unit.shards)
            if not unit.kept:
                found += _gather(unit, unit.within)
        whole = set() if job.fact("reshard_after_backward") or part == parts - 1 else {*range(len(units))}
    return found


def _gather(unit: FsdpUnit, ranks: int) -> list[ExpectedCall]:
    return [ExpectedCall("all_gather", gathered_bytes(unit), PARAMETERS, ranks=ranks)] if ranks > 1 else []


@rule(_WHERE + "_fsdp_param_group.FSDPParamGroup.post_backward", TORCH)
def reductions(job: Job) -> int:
    """Times that gradients are reduced in a step: once, or in each micro-batch (set_requires_gradient_sync)."""
    return micro_batches(job) if job.fact("reduce_grads") else 1


@rule(_WHERE + "_fsdp_collectives.foreach_reduce", TORCH)
def gradient_scatters(unit: FsdpUnit) -> list[ExpectedCall]:
    """One reduce_scatter of the gradients of a unit's trained parameters, padded as they are."""
    return (
        [ExpectedCall("reduce_scatter", _padded_gradients(unit), GRADIENTS, ranks=unit.shards)]
        if unit.shards > 1
        else []
    )


def _padded_gradients(unit: FsdpUnit) -> int:
    parts = zip(unit.shapes, unit.dims, unit.trained, strict=True)
    elements = sum(padded_elements(shape, dim, unit.shards) for shape, dim, trained in parts if trained)
    return elements * element_size(_gradient_type(unit))


@rule(_WHERE + "_fsdp_collectives.foreach_reduce (HSDP)", TORCH)
def replica_sums(unit: FsdpUnit) -> list[ExpectedCall]:
    """What the reduce_scatter leaves, among the ranks that hold copies of the same part."""
    held = _padded_gradients(unit) // unit.shards
    return [ExpectedCall("all_reduce", held, COPIES, ranks=unit.copies)] if unit.copies > 1 else []


@rule("torch.nn.utils.clip_grad_norm_ (of DTensors)", TORCH)
def clipping(job: Job, units: list[FsdpUnit]) -> list[ExpectedCall]:
    """The norms of all gradients in one call, a number for each parameter, among the ranks that share parameters.

    With tensor parallelism in two: of what is cut, and of what is not.
    """
    shards = max(unit.shards for unit in units)
    if not clips(job) or shards < 2:
        return []
    cut = num_sharded_parameters(job, styles(job)) if "tensor_plan" in job.row else 0
    counts = (count for count in (cut, len(job.trainable) - cut) if count)
    return [ExpectedCall("all_reduce", count * parameter_size(job), NORM, ranks=shards) for count in counts]
