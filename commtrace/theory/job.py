"""A captured job: a row of the log's `job` table, with typed access for rules.

Rows come from the hooks, or from configuration files (`commtrace.theory.configs`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

ELEMENT_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of an element, by torch's name of its type."""

Item = TypeVar("Item")


class NotPredictedError(Exception):
    """Why there is no prediction for a job: a sentence without its full stop."""


def refuse(*reasons: tuple[object, str]) -> None:
    """Raise NotPredictedError with the first reason whose condition holds."""
    for is_refused, reason in reasons:
        if is_refused:
            raise NotPredictedError(reason)


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or a buffer of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    expert: bool = False
    """Whether it belongs to an expert, of which only some ranks have a copy."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of one element."""
        return element_size(self.dtype)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return self.elements * self.size


@dataclass(frozen=True)
class ModuleNode:
    """A module that runs: numbers of its own parameters, and the modules that run within it, in order."""

    number: int
    parameters: tuple[int, ...]
    children: tuple[ModuleNode, ...]
    borrowed: tuple[int, ...] = ()  # parameters that modules within it return, for its own use
    outputs: int = 1  # tensors with a gradient that it returns
    reads_input: bool = False  # whether it is handed the model's input, beside the first module

    def __deepcopy__(self, memo: object) -> ModuleNode:
        """Return the node itself, which does not change."""
        return self

    def walk(self) -> Iterator[ModuleNode]:
        """Yield the module and those within it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def has_parameters(self) -> bool:
        """Whether it or a module within it has parameters. A module without, as dropout, may be registered in vain."""
        return any(module.parameters for module in self.walk())


@dataclass(frozen=True)
class Job:
    """A row of the `job` table."""

    row: Mapping[str, Any]

    def fact(self, *path: str) -> Any:
        """Return a value of the row by its keys.

        Raises:
            NotPredictedError: If the log does not have it.
        """
        value: Any = self.row
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                raise NotPredictedError(f"the job in the log has no {'.'.join(path)}")
            value = value[key]
        return value

    def zero(self, name: str) -> Any:
        """Return a setting of `zero_optimization`, named without the prefix "stage3_"."""
        return self.fact("zero", name)

    def model(self, name: str, default: Any = None) -> Any:
        """Return a fact of the model's architecture (`neox_args`).

        Raises:
            NotPredictedError: If the log does not have it, and there is no default.
        """
        if default is not None and name not in self.fact("model"):
            return default
        return self.fact("model", name)

    def is_older(self, library: str, *version: int) -> bool:
        """Return whether the log's version of a library is below this one; False if the log does not tell it."""
        known = str(self.row.get("versions", {}).get(library, ""))
        return bool(known) and tuple(map(int, re.findall(r"\d+", known)[: len(version)])) < version

    def require_architecture(self, feature: str) -> None:
        """Raise NotPredictedError if the model does not declare its architecture (`neox_args`), which rules need."""
        reason = f"{feature} of a model that does not declare its architecture (neox_args) has no rules yet"
        refuse(("model" not in self.row, reason))

    @cached_property
    def ranks(self) -> int:
        """Ranks that reduce gradients together: the data-parallel ones, with Ulysses those that share sequences too."""
        together = self.row.get("sequence_data_parallel_size")
        return int(self.fact("data_parallel_size") if together is None else together)

    @cached_property
    def parameters(self) -> tuple[ModelTensor, ...]:
        """Parameters in the order of registration."""
        return _tensors(self.fact("parameters"))

    @cached_property
    def buffers(self) -> tuple[ModelTensor, ...]:
        """Buffers in the order of registration."""
        return _tensors(self.fact("buffers"))

    @cached_property
    def trainable(self) -> tuple[ModelTensor, ...]:
        """Parameters that get a gradient."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable)

    @cached_property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @cached_property
    def trainable_elements(self) -> int:
        """Elements of the parameters that get a gradient."""
        return sum(parameter.elements for parameter in self.trainable)

    @cached_property
    def parameter_size(self) -> int:
        """Bytes of an element of the parameters; the widest where they differ."""
        return max((parameter.size for parameter in self.parameters), default=1)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the parameters in each group of the optimizer (in ZeRO-3: in each of its sub-groups)."""
        return tuple(tuple(group) for group in self.fact("optimizer_groups"))

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step: of DeepSpeed's engine, otherwise as the model declares them, or one."""
        if self.row.get("source") == "deepspeed":
            return int(self.fact("gradient_accumulation_steps"))
        return int(self.model("gradient_accumulation_steps", 1)) if "model" in self.row else 1

    @cached_property
    def clips_gradients(self) -> bool:
        """Whether the program clips gradients itself, as the model declares it."""
        return "model" in self.row and float(self.model("gradient_clipping", 0.0)) > 0

    @cached_property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        if "tensor_parallel_size" in self.row:
            return int(self.fact("tensor_parallel_size"))
        return int(self.fact("model", "model_parallel_size")) if "model" in self.row else 1

    @property
    def has_pipeline_engine(self) -> bool:
        """Whether DeepSpeed's pipeline engine trains the model, be it of one stage."""
        return self.row.get("engine") == "PipelineEngine"

    @property
    def is_gpt_neox(self) -> bool:
        """Whether GPT-NeoX's own program trains the model."""
        return bool(self.row.get("model", {}).get("program") == "NeoXArgs")

    @cached_property
    def sequence(self) -> int:
        """Ranks that share sequences by DeepSpeed's Ulysses."""
        return int(self.row.get("sequence_parallel_size") or 1)

    @cached_property
    def context(self) -> int:
        """Ranks that share sequences in a ring."""
        return int(self.row.get("model", {}).get("context_parallel_size") or 1)

    @cached_property
    def experts_over(self) -> int:
        """Ranks that have different experts."""
        sizes = self.row.get("expert_parallel_sizes") or [1]
        refuse((len(sizes) > 1, "experts over groups of several sizes have no rules yet"))
        return int(sizes[0])

    def copies(self, tensor: ModelTensor) -> int:
        """Return the number of ranks that have a parameter and reduce its gradient."""
        return self.ranks // self.experts_over if tensor.expert else self.ranks

    @cached_property
    def root(self) -> ModuleNode:
        """The model as a tree of the modules that run."""
        return _tree(self.fact("modules"), frozenset(self.row.get("embeddings", ())))


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Return the items of each key together, in the order in which keys come first."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def element_size(dtype: str) -> int:
    """Return the bytes of an element. Raise NotPredictedError for an unknown type."""
    if dtype not in ELEMENT_BYTES:
        raise NotPredictedError(f"the size of an element of type {dtype} is not known")
    return ELEMENT_BYTES[dtype]


def _tensors(rows: Sequence[Mapping[str, Any]]) -> tuple[ModelTensor, ...]:
    try:
        return tuple(
            ModelTensor(
                str(row["name"]),
                tuple(map(_dimension, row["shape"])),
                str(row["dtype"]),
                bool(row.get("trainable", True)),
                bool(row.get("expert", False)),
            )
            for row in rows
        )
    except (KeyError, TypeError, ValueError):
        raise NotPredictedError("the list of parameters in the log cannot be read") from None


def _dimension(value: Any) -> int:
    if (size := int(value)) < 0:
        raise ValueError(value)
    return size


def _tree(rows: Sequence[Mapping[str, Any]], embeddings: frozenset[int]) -> ModuleNode:
    """Return modules, given by dotted names with parents first, as a tree. Modules that never run have no row.

    Embeddings read the model's input wherever they are: indices have no gradient.
    """
    names = [str(row["name"]) for row in rows]
    if not names or names[0] != "":
        raise NotPredictedError("the model itself is not among the modules in the log")
    children: dict[int, list[int]] = {number: [] for number in range(len(names))}
    for number, name in enumerate(names[1:], 1):
        parents = (other for other in range(number) if not names[other] or name.startswith(names[other] + "."))
        children[max(parents, key=lambda other: len(names[other]))].append(number)

    def build(number: int) -> ModuleNode:
        parts = tuple(build(child) for child in children[number])
        return ModuleNode(number, tuple(rows[number]["parameters"]), parts, reads_input=number in embeddings)

    return build(0)
