"""A captured job: a row of the log's `job` table (`commtrace.job_row`), and what rules derive from it.

Rows come from the hooks, or from configuration files (`commtrace.theory.configs`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

from commtrace.job_facts import UnknownFactError
from commtrace.job_row import JobRow, ModelSettings, ModuleRow, TensorRow

ELEMENT_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element, by torch's name of the dtype."""

ALONE: Final = "one data-parallel rank has nothing to communicate"
"""Why a job whose only dimension has one rank is not predicted."""

Item = TypeVar("Item")


class NotPredictedError(Exception):
    """Error for a job without a prediction. The message is the reason, without a full stop."""


@contextmanager
def reading_job() -> Iterator[None]:
    """Raise NotPredictedError with the reason if a job's row cannot be read: it may lack facts, or be damaged."""
    try:
        yield
    except UnknownFactError as error:
        raise NotPredictedError(str(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
        raise NotPredictedError(f"the job in the log cannot be read ({type(error).__name__}: {error})") from error


def only_job(rows: Sequence[Item]) -> Item:
    """Return the job of a process from its rows of the log's `job` table, or from what was read of them.

    Raises:
        NotPredictedError: It trained no model that was captured, or several.
    """
    if len(rows) != 1:
        raise NotPredictedError(f"the process trained {len(rows)} models" if rows else "no job was captured")
    return rows[0]


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
    """Whether it belongs to an expert, which only some ranks have."""

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
    """A module that runs, with the numbers of its own parameters and the modules that run within it, in order."""

    number: int
    parameters: tuple[int, ...]
    children: tuple[ModuleNode, ...]
    borrowed: tuple[int, ...] = ()  # parameters that modules within it return to it
    external: tuple[int, ...] = ()  # parameters of other modules that its own code uses
    outputs: int = 1  # returned tensors that have a gradient
    reads_input: bool = False  # whether it gets the model's input, as the first module always does

    def __deepcopy__(self, memo: object) -> ModuleNode:
        """Return the node itself, which is immutable."""
        return self

    def walk(self) -> Iterator[ModuleNode]:
        """Yield the module and those within it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def has_parameters(self) -> bool:
        """Whether it or a module within it has parameters. A module without any, such as dropout, may never run."""
        return any(module.parameters for module in self.walk())


@dataclass(frozen=True)
class Job:
    """A row of the `job` table."""

    row: JobRow

    @property
    def model(self) -> ModelSettings:
        """The model's architecture (`neox_args`)."""
        return self.row.model

    @property
    def declares_architecture(self) -> bool:
        """Whether the model declares its architecture (`neox_args`)."""
        return self.row.has(JobRow.model)

    def is_older(self, library: str, *version: int) -> bool:
        """Return whether the log's version of a library is older than `version`; False if the log does not have it."""
        recorded = str(self.row.versions.get(library, ""))
        return bool(recorded) and tuple(map(int, re.findall(r"\d+", recorded)[: len(version)])) < version

    def require_architecture(self, feature: str) -> None:
        """Raise NotPredictedError if the model does not declare its architecture (`neox_args`)."""
        reason = f"{feature} of a model that does not declare its architecture (neox_args) has no rules yet"
        refuse((not self.declares_architecture, reason))

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that reduce gradients together: data-parallel and, with Ulysses, sequence-parallel ones."""
        size = self.row.sequence_data_parallel_size
        return self.row.data_parallel_size if size is None else size

    @cached_property
    def parameters(self) -> tuple[ModelTensor, ...]:
        """Parameters in the order of registration."""
        return _tensors(self.row.parameters)

    @cached_property
    def buffers(self) -> tuple[ModelTensor, ...]:
        """Buffers in the order of registration."""
        return _tensors(self.row.buffers)

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
        """Bytes per element of the parameters; of the widest dtype if they differ."""
        return max((parameter.size for parameter in self.parameters), default=1)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the parameters in each group of the optimizer (ZeRO-3: in each sub-group)."""
        return tuple(tuple(group) for group in self.row.optimizer_groups)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step: those of DeepSpeed's engine, else those that the model declares, or one."""
        if self.row.source == "deepspeed":
            return self.row.gradient_accumulation_steps
        return self.model.get(ModelSettings.gradient_accumulation_steps, 1) if self.declares_architecture else 1

    @cached_property
    def clips_gradients(self) -> bool:
        """Whether the program itself clips gradients, according to the model's settings."""
        return self.declares_architecture and self.model.gradient_clipping > 0

    @cached_property
    def tensor(self) -> int:
        """Number of tensor-parallel ranks."""
        if self.row.has(JobRow.tensor_parallel_size):
            return self.row.tensor_parallel_size
        return self.model.model_parallel_size if self.declares_architecture else 1

    @property
    def has_pipeline_engine(self) -> bool:
        """Whether DeepSpeed's pipeline engine trains the model, even with one stage."""
        return self.row.engine == "PipelineEngine"

    @property
    def is_gpt_neox(self) -> bool:
        """Whether GPT-NeoX's own program trains the model."""
        return self.declares_architecture and self.model.program == "NeoXArgs"

    @cached_property
    def sequence(self) -> int:
        """Number of ranks that share sequences with DeepSpeed's Ulysses."""
        return self.row.get(JobRow.sequence_parallel_size, 1) or 1

    @cached_property
    def context(self) -> int:
        """Number of ranks that share sequences with ring attention."""
        return (self.model.context_parallel_size or 1) if self.declares_architecture else 1

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.row.get(JobRow.moe, False)

    @cached_property
    def expert_parallel_size(self) -> int:
        """Number of ranks that the experts are distributed over."""
        sizes = self.row.expert_parallel_sizes or [1]
        refuse((len(sizes) > 1, "experts over groups of several sizes have no rules yet"))
        return sizes[0]

    def copies(self, tensor: ModelTensor) -> int:
        """Return the number of ranks that have a parameter and reduce its gradient."""
        return self.ranks // self.expert_parallel_size if tensor.expert else self.ranks

    @cached_property
    def root(self) -> ModuleNode:
        """The model as a tree of the modules that run."""
        first_pass: dict[str, dict[int, tuple[int, ...]]] = {"external": {}, "returned": {}, "idle": {}}
        for entry in (entry for row in self.row.passes for entry in row.passes or () if entry.kind in first_pass):
            parameters = () if entry.kind == "idle" else tuple(entry.parameters or ())
            first_pass[entry.kind].update(dict.fromkeys(entry.modules, parameters))
        return _tree(self.row.modules, frozenset(self.row.embeddings), **first_pass)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Group items by key, in the order of the keys' first occurrences."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.values()]


def element_size(dtype: str) -> int:
    """Return the bytes per element of a dtype. Raise NotPredictedError for an unknown dtype."""
    if dtype not in ELEMENT_BYTES:
        raise NotPredictedError(f"the size of an element of type {dtype} is not known")
    return ELEMENT_BYTES[dtype]


def _tensors(rows: Sequence[TensorRow]) -> tuple[ModelTensor, ...]:
    try:
        tensors = tuple(ModelTensor(row.name, tuple(row.shape), row.dtype, row.trainable, row.expert) for row in rows)
    except UnknownFactError:
        raise NotPredictedError("the list of parameters in the log cannot be read") from None
    is_negative = any(length < 0 for tensor in tensors for length in tensor.shape)
    refuse((is_negative, "the list of parameters in the log cannot be read"))
    return tensors


def _tree(
    rows: Sequence[ModuleRow],
    embeddings: frozenset[int],
    *,
    external: Mapping[int, tuple[int, ...]],
    returned: Mapping[int, tuple[int, ...]],
    idle: Container[int],
) -> ModuleNode:
    """Return the tree of the modules in rows (dotted names, parents first). Modules that never run have no row.

    Every embedding counts as reading the model's input, because its indices have no gradient either.
    """
    names = [row.name for row in rows]
    if not names or names[0] != "":
        raise NotPredictedError("the model itself is not among the modules in the log")
    children: dict[int, list[int]] = {number: [] for number in range(len(names))}
    running = [number for number in range(len(names)) if number == 0 or number not in idle]
    for number in running[1:]:
        ancestors = (
            other
            for other in running
            if other < number and (not names[other] or names[number].startswith(names[other] + "."))
        )
        children[max(ancestors, key=lambda other: len(names[other]))].append(number)

    def build(number: int) -> ModuleNode:
        nodes = tuple(build(child) for child in children[number])
        own, of_others = tuple(rows[number].parameters), (returned.get(number, ()), external.get(number, ()))
        return ModuleNode(number, own, nodes, *of_others, reads_input=number in embeddings)

    return build(0)
