"""The captured job (a row of the `job` table), for rules to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

ELEMENT_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element, by torch's name of its type."""


class NotPredictedError(Exception):
    """Why nothing can be said of a job: a sentence without its full stop."""


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    expert: bool = False
    """Of an expert, of which only some ranks have a copy."""

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return element_size(self.dtype)

    @property
    def bytes(self) -> int:
        """Of all elements."""
        return self.elements * self.size


@dataclass(frozen=True)
class ModuleNode:
    """A part of the model that runs: numbers of its own parameters, and the parts that run within it, in order."""

    number: int
    parameters: tuple[int, ...]
    children: tuple[ModuleNode, ...]


@dataclass(frozen=True)
class Job:
    """A row of the `job` table."""

    row: Mapping[str, Any]

    def fact(self, *path: str) -> Any:
        """A value of the row, by its keys. Raises NotPredictedError where the log does not have it."""
        value: Any = self.row
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                raise NotPredictedError(f"the log does not say {'.'.join(path)}")
            value = value[key]
        return value

    @cached_property
    def ranks(self) -> int:
        """Ranks that reduce gradients together: the data-parallel ones, with Ulysses those that share sequences too."""
        together = self.row.get("sequence_data_parallel_size")
        return int(self.fact("data_parallel_size") if together is None else together)

    @cached_property
    def parameters(self) -> tuple[ModelTensor, ...]:
        """In the order of registration."""
        return _tensors(self.fact("parameters"))

    @cached_property
    def buffers(self) -> tuple[ModelTensor, ...]:
        """In the order of registration."""
        return _tensors(self.fact("buffers"))

    @cached_property
    def trainable(self) -> tuple[ModelTensor, ...]:
        """The parameters that get a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the parameters in each group of the optimizer (in ZeRO-3: in each of its sub-groups)."""
        return tuple(tuple(group) for group in self.fact("optimizer_groups"))

    @cached_property
    def micro_batches(self) -> int:
        """Of one step."""
        return int(self.fact("gradient_accumulation_steps"))

    @cached_property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        if "tensor_parallel_size" in self.row:
            return int(self.fact("tensor_parallel_size"))
        return int(self.fact("model", "model_parallel_size")) if "model" in self.row else 1

    @cached_property
    def sequence(self) -> int:
        """Ranks that share sequences as DeepSpeed's Ulysses does."""
        return int(self.row.get("sequence_parallel_size") or 1)

    @cached_property
    def context(self) -> int:
        """Ranks that share sequences in a ring."""
        return int(self.row.get("model", {}).get("context_parallel_size") or 1)

    @cached_property
    def experts_over(self) -> int:
        """Ranks that have different experts."""
        sizes = self.row.get("expert_parallel_sizes") or [1]
        if len(sizes) > 1:
            raise NotPredictedError("experts over groups of several sizes have no rules yet")
        return int(sizes[0])

    def copies(self, tensor: ModelTensor) -> int:
        """Ranks that have a parameter and reduce its gradient."""
        return self.ranks // self.experts_over if tensor.expert else self.ranks

    def model(self, name: str, default: Any = None) -> Any:
        """A fact of the model's architecture. Raises NotPredictedError where the log does not have it."""
        if default is not None and name not in self.fact("model"):
            return default
        return self.fact("model", name)

    @cached_property
    def root(self) -> ModuleNode:
        """The model as a tree of the modules that run."""
        return _tree(self.fact("modules"))

    def zero(self, name: str) -> Any:
        """A setting of `zero_optimization`."""
        return self.fact("zero", name)


def element_size(dtype: str) -> int:
    """Bytes. Raises NotPredictedError for a type that is not known here."""
    if dtype not in ELEMENT_BYTES:
        raise NotPredictedError(f"the size of an element of type {dtype} is not known")
    return ELEMENT_BYTES[dtype]


def _tensors(rows: Sequence[Mapping[str, Any]]) -> tuple[ModelTensor, ...]:
    try:
        return tuple(
            ModelTensor(
                str(row["name"]),
                tuple(map(int, row["shape"])),
                str(row["dtype"]),
                bool(row.get("trainable", True)),
                bool(row.get("expert", False)),
            )
            for row in rows
        )
    except (KeyError, TypeError, ValueError):
        raise NotPredictedError("the list of parameters in the log cannot be read") from None


def _tree(rows: Sequence[Mapping[str, Any]]) -> ModuleNode:
    """Modules by their dotted names, parents first, as a tree. What never runs by itself is not among the rows."""
    names = [str(row["name"]) for row in rows]
    if not names or names[0] != "":
        raise NotPredictedError("the model itself is not among the modules in the log")
    children: dict[int, list[int]] = {number: [] for number in range(len(names))}
    for number, name in enumerate(names[1:], 1):
        parent = max((at for at in range(number) if _within(name, names[at])), key=lambda at: len(names[at]))
        children[parent].append(number)

    def build(number: int) -> ModuleNode:
        return ModuleNode(number, tuple(rows[number]["parameters"]), tuple(build(child) for child in children[number]))

    return build(0)


def _within(name: str, parent: str) -> bool:
    return not parent or name.startswith(parent + ".")
