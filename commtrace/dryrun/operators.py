"""Kinds of torch operators, derived from their schemas: views, writes, new tensors, numbers."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import torch

from .flops import Formula, formula_of


class OperatorKind(Enum):
    """How a dry run treats an operator."""

    REAL = auto()  # reads metadata only, or makes a view: executed
    WRITE = auto()  # writes into an argument: skipped if that is large
    NEW = auto()  # makes tensors whose shapes depend on those of the arguments
    NUMBER = auto()  # returns a number that the program may branch on
    SHAPE = auto()  # makes tensors whose shapes depend on values
    JOIN = auto()  # torch.cat: ZeRO-3 joins a thousand pieces of each gradient
    INDEX = auto()  # x[i, mask]: only the values of a mask determine the shape
    COPY = auto()  # a functional collective that copies its input first


class OperatorPlan(NamedTuple):
    """How a dry run treats one operator."""

    kind: OperatorKind
    writes: tuple[tuple[int, str], ...] = ()  # position and name of each argument that is written to
    returns: int = 0  # number of results of a WRITE
    pointwise: bool = False  # whether the operator is elementwise
    fills: bool = False  # whether it overwrites its first argument completely
    leaves_empty: bool = False  # whether it makes a tensor without initial values
    draws: bool = False  # whether it draws random numbers into an argument, from a generator that a caller may give
    flops: Formula | None = None  # number of floating-point operations of a NEW


# Operators that write metadata: the storage of a tensor, its length, its strides.
_METADATA: Final = frozenset(
    (
        "set_", "resize_", "resize_as_", "detach_", "t_", "transpose_", "unsqueeze_", "squeeze_", "swapaxes_",
        "swapdims_", "as_strided_", "lift_fresh", "_unsafe_view", "_reshape_alias", "requires_grad_", "record_stream",
    )
)  # fmt: skip
_COPIES: Final = frozenset(("all_reduce", "all_reduce_coalesced", "broadcast"))
_FILLS: Final = frozenset(("zero_", "fill_", "copy_", "normal_", "uniform_"))


def operator_plan(operator: Any) -> OperatorPlan:
    """Return the plan of an OpOverload."""
    schema = operator._schema
    space, _, name = schema.name.partition("::")
    if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return OperatorPlan(OperatorKind.COPY if name in _COPIES and not schema.is_mutable else OperatorKind.REAL)
    if name in _METADATA:
        return OperatorPlan(OperatorKind.REAL)
    writes = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    # An operator that writes and also makes new tensors (batch norm) is NEW.
    if writes and all(result.alias_info is not None for result in schema.returns):
        draws = any(argument.name == "generator" for argument in schema.arguments)
        return OperatorPlan(OperatorKind.WRITE, writes, len(schema.returns), fills=name in _FILLS, draws=draws)
    if torch.Tag.data_dependent_output in operator.tags:
        return OperatorPlan(OperatorKind.NUMBER)
    if operator is torch.ops.aten.cat.default:
        return OperatorPlan(OperatorKind.JOIN)
    if operator is torch.ops.aten.index.Tensor:
        return OperatorPlan(OperatorKind.INDEX)
    if torch.Tag.dynamic_output_shape in operator.tags and "ctc_loss" not in name:
        return OperatorPlan(OperatorKind.SHAPE)
    views = any(result.alias_info is not None for result in schema.returns)
    if views or not any("Tensor" in str(result.type) for result in schema.returns):
        return OperatorPlan(OperatorKind.REAL)
    return OperatorPlan(
        OperatorKind.NEW, pointwise=torch.Tag.pointwise in operator.tags, leaves_empty="empty" in name,
        flops=formula_of(operator),
    )  # fmt: skip


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument, including those in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
