"""Tensor parallelism by DTensors (`parallelize_module`): which activations each style of a plan moves.

A style determines how a module's parameters, input and output are sharded over the ranks that share a model, and so
the data that moves in forward and, in the reverse direction, in backward. Payloads are tokens x width: those of the
input or the output of the module, before sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from commtrace.job_row import StyleRow
from commtrace.theory.job import NotPredictedError
from commtrace.theory.rules.registry import TORCH, rule


class Moved(NamedTuple):
    """An activation that a style brings from one placement to another.

    Attributes:
        module: Dotted name of the module.
        activation: "input", "column-parallel output" or "row-parallel output".
        placement: Placement in which the input arrives, or in which the output leaves: "Replicate", "Shard(1)".
        forward: Operation of the forward pass; "": none, the placement is only declared.
        backward: Operation of the backward pass; "": none.
        width: Elements of a token.
    """

    module: str
    activation: str
    placement: str
    forward: str
    backward: str
    width: int


_MOVES: Final = {
    ("input", "Replicate"): ("", "all_reduce"),  # backward sums the ranks' gradients
    ("input", "Shard"): ("all_gather", "reduce_scatter"),
    ("column-parallel output", "Shard(-1)"): ("", ""),
    ("column-parallel output", "Replicate"): ("all_gather", ""),
    ("row-parallel output", "Replicate"): ("all_reduce", ""),
    ("row-parallel output", "Shard"): ("reduce_scatter", "all_gather"),
}
"""Operations, forward and backward, that move activations from or to a placement."""

_STYLE: Final = "torch.distributed.tensor.parallel.style."


def moved(plan: Sequence[StyleRow]) -> Iterator[Moved]:
    """Yield what the modules of a plan move, in their order.

    Raises:
        NotPredictedError: A module's style has no rules.
    """
    for row in plan:
        yield from moved_by(row, plan)


@rule(_STYLE + "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput (_prepare_input_fn, "
      "_prepare_output_fn)", TORCH)  # fmt: skip
def moved_by(row: StyleRow, plan: Sequence[StyleRow]) -> Iterator[Moved]:
    """Yield what a module of a plan moves. Raise NotPredictedError for a style without rules."""
    arrives, leaves = "".join(row.inputs[:1]), "".join(row.outputs[:1])
    if row.style == "SequenceParallel":
        return
    if row.style == "PrepareModuleInput":
        if row.desired[:1] != ["Replicate"] or row.local:
            raise NotPredictedError(f"PrepareModuleInput of {row.module} to {row.desired} has no rules yet")
        yield _moved(row, "input", arrives, _width_within(row, plan))
    elif row.style == "ColwiseParallel" and row.weight and not row.embedding:
        if not is_prepared(row, plan):
            yield _moved(row, "input", arrives, row.weight[1])
        yield _moved(row, "column-parallel output", leaves, row.weight[0])
    elif row.style == "RowwiseParallel" and row.weight:
        yield _moved(row, "row-parallel output", leaves, row.weight[1] if row.embedding else row.weight[0])
    else:
        raise NotPredictedError(f"the style {row.style} of {row.module} has no rules yet")


def is_prepared(row: StyleRow, plan: Sequence[StyleRow]) -> bool:
    """Return whether a module around this one prepares its input, which then arrives as a DTensor."""
    return any(row.module.startswith(f"{other.module}.") for other in plan if other.style == "PrepareModuleInput")


def _width_within(prepared: StyleRow, plan: Sequence[StyleRow]) -> int:
    """Return the width of a prepared input: that of the column-parallel modules that read it."""
    for row in plan:
        if row.style == "ColwiseParallel" and row.weight and row.module.startswith(f"{prepared.module}."):
            return row.weight[1]
    raise NotPredictedError(f"no column-parallel module reads the input that {prepared.module} prepares")


def _moved(row: StyleRow, activation: str, placement: str, width: int) -> Moved:
    last = activation == "column-parallel output" and placement in ("Shard(-1)", "Shard(2)")
    known = "Shard(-1)" if last else "Shard" if placement.startswith("Shard(") else placement
    if (activation, known) not in _MOVES:
        raise NotPredictedError(f"a {activation} placed as {placement} has no rules yet ({row.module})")
    return Moved(row.module, activation, placement, *_MOVES[activation, known], width)
