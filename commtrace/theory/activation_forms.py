"""Closed forms of the activations that a tensor-parallel plan moves: what each module of the plan sends in a step.

The plan determines the calls of each module, and their payload but for one factor that all modules share: the tokens
of a step. No job states it, so it is taken from the recorded calls, as most modules of the plan have it, with the
number of micro-batches. A module that differs from the others then differs from its closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from commtrace.job_row import JobRow
from commtrace.schema import Purpose

from .job import NotPredictedError, element_size, reading_job
from .purpose_forms import ROOT, PurposeForm
from .rules.torch.parallel_styles import Moved, moved

_FORWARD, _BACKWARD = Purpose.ACTIVATIONS, Purpose.ACTIVATION_GRADIENTS
_FORMULA: Final = "tokens x width of the module; tokens and micro-batches as most modules have them"
_OF_NORMS: Final = "gradients of parameters that are used on shards of the sequence"
_ROLE: Final = "tensor"

PlacedCalls = Mapping[tuple[str, str, str], tuple[float, float]]
"""Calls and payload bytes of a step by purpose, operation and place: "layers.0.attention, S(1) -> R"."""


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan of a model.

    Attributes:
        moves: What its modules move, in the model's order.
        ranks: Ranks that share the model.
        needs_gradients: Whether every parameter is trained: then every input but the first one needs a gradient.
        norms: Unit of `fully_shard` and bytes of each parameter that is whole on all ranks, and used on shards of the
            sequence: its gradient is partial on each rank.
    """

    moves: tuple[Moved, ...]
    ranks: int
    needs_gradients: bool
    norms: tuple[tuple[str, int], ...] = ()

    def is_uncertain(self, number: int, move: Moved) -> bool:
        """Return whether the input that the n-th move brings may need no gradient."""
        return move.activation == "input" and not (self.needs_gradients and number)

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> TensorPlan | None:
        """Return the plan of a row of the log's `job` table; None if it has none, or one with a style without rules."""
        job = JobRow.read(row)
        if not job.has(JobRow.tensor_plan):
            return None
        with suppress(NotPredictedError), reading_job():
            trained = all(parameter.trainable for parameter in job.parameters)
            return cls(tuple(moved(job.tensor_plan)), job.tensor_parallel_size, trained, tuple(_norms(job)))
        return None


def _norms(job: JobRow) -> Iterator[tuple[str, int]]:
    """Yield the unit and the bytes of each parameter of the plan's modules that are parallel along the sequence."""
    units = sorted(job.get(JobRow.units, []), key=lambda unit: len(unit.name))
    for row in job.tensor_plan:
        if row.style == "SequenceParallel":
            for shape in (shape for shape in (row.weight, row.bias) if shape):
                for unit in units[::-1]:
                    if not unit.name or f"{row.module}.".startswith(f"{unit.name}."):
                        yield unit.name or ROOT, prod(shape) * element_size(unit.dtypes[0])
                        break


def activation_forms(plan: TensorPlan, recorded: PlacedCalls) -> Iterator[PurposeForm]:
    """Yield the closed forms of the calls that move a plan's activations.

    Args:
        plan: The plan.
        recorded: The calls of the step, of which the tokens and the number of micro-batches are taken.
    """
    forward = [(move, at) for move, at in zip(plan.moves, _places(plan, recorded), strict=True) if move.forward]
    shares = Counter(
        (calls, size / _elements(plan, move))
        for move, place in forward
        for calls, size in [recorded.get((_FORWARD.value, move.forward, place), (0, 0))]
        if calls
    )
    if not shares:
        return
    ((calls, bytes_of_tokens), _), *_ = shares.most_common(1)
    for move, place in forward:
        yield _form(_FORWARD, move.forward, place, calls, bytes_of_tokens * _elements(plan, move))
    called = {key: number for key, (number, _) in recorded.items()}
    for number, move in sorted(enumerate(plan.moves), key=lambda item: plan.is_uncertain(*item)):
        if move.backward:
            key = (_BACKWARD.value, move.backward, _gradient_place(move))
            called[key] = called.get(key, 0) - calls
            if called[key] >= 0 or not plan.is_uncertain(number, move):
                yield _form(_BACKWARD, *key[1:], calls, bytes_of_tokens * move.width)
    if calls == 1:  # with several micro-batches, it depends on whether gradients are accumulated
        for unit, size in plan.norms:
            yield PurposeForm((Purpose.GRADIENTS,), _ROLE, "all_reduce", unit, 1, size, _OF_NORMS)


def _form(purpose: Purpose, op: str, place: str, calls: float, size: float) -> PurposeForm:
    return PurposeForm((purpose,), _ROLE, op, place, int(calls), round(size), _FORMULA)


def _elements(plan: TensorPlan, move: Moved) -> int:
    """Return the elements of a token in a call: shards along the width are padded to equal ones."""
    if move.activation != "column-parallel output":
        return move.width
    return -(-move.width // plan.ranks) * plan.ranks


def _places(plan: TensorPlan, recorded: PlacedCalls) -> Iterator[str]:
    """Yield the place of each move's forward calls, with placements as the hooks write them."""
    inputs = {_input_place(move) for move in plan.moves if move.activation == "input"}
    gathered = {place for purpose, op, place in recorded if (purpose, op) == (_FORWARD.value, "all_gather")} - inputs
    for move in plan.moves:
        if move.activation == "input":
            yield _input_place(move)
        elif move.activation == "row-parallel output":
            yield f"{move.module}, P -> {_short(move.placement)}"
        else:  # along the last dimension, whose number only the recorded calls have
            begin = f"{move.module}, S("
            yield max((place for place in gathered if place.startswith(begin)), default=f"{begin}-1) -> R")


def _input_place(move: Moved) -> str:
    return f"{move.module}, {_short(move.placement)} -> R"


def _gradient_place(move: Moved) -> str:
    """Return the place of a module's backward calls."""
    if (move.activation, move.placement) == ("input", "Replicate"):
        return "P -> R"  # no call in forward shows which module's input it is
    short = _short(move.placement)
    return f"{move.module}, P -> {short}" if move.activation == "input" else f"{move.module}, {short} -> R"


def _short(placement: str) -> str:
    """Return a placement as the hooks write it: "S(1)" for "Shard(1)", "R" for "Replicate"."""
    return placement.replace("Shard", "S").replace("Replicate", "R")


def plans_of(rows: Sequence[Mapping[str, Any]]) -> tuple[TensorPlan, ...]:
    """Return the plans of the models that a process trains, from its rows of the `job` table."""
    return tuple(plan for plan in map(TensorPlan.read, rows) if plan is not None and plan.moves)
