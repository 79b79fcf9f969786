"""Shapes of models from their configuration: parameters, buffers and modules in the order in which they are made.

A model is a tree of modules, each with parameters of its own. torch lists parameters (`named_parameters`) from the root
on: a module's own before those of the modules in it, and each shared one where it comes first. So shapes and order
follow from the tree, and no model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ModuleSpec:
    """A module of a model, with the modules in it."""

    name: str  # last part of the dotted name
    parameters: tuple[tuple[str, Shape], ...] = ()  # name and shape of its own parameters
    children: tuple[ModuleSpec, ...] = ()  # modules in it
    runs: bool = True  # whether it has a forward of its own, which a list of modules has not
    norm: bool = False  # whether it is a norm, whose parameters are not decayed
    shared: str = ""  # full name of a parameter of another module that it uses as well; empty: none
    buffers: tuple[tuple[str, Shape, str], ...] = ()  # name, shape and element type of its buffers
    expert: bool = False  # whether it is one of several experts


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> ModuleSpec:
    """Return a linear layer, whose weight has `outputs` rows of `inputs`."""
    parameters: tuple[tuple[str, Shape], ...] = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return ModuleSpec(name, parameters if bias else parameters[:1])


def norm(name: str, size: int, *, bias: bool = True) -> ModuleSpec:
    """Return a layer norm, or one without a bias (RMSNorm)."""
    parameters: tuple[tuple[str, Shape], ...] = (("weight", (size,)), ("bias", (size,)))
    return ModuleSpec(name, parameters if bias else parameters[:1], norm=True)


def embedding(name: str, rows: int, size: int) -> ModuleSpec:
    """Return an embedding."""
    return ModuleSpec(name, (("weight", (rows, size)),))


def module(name: str, *children: ModuleSpec) -> ModuleSpec:
    """Return a module without parameters of its own."""
    return ModuleSpec(name, children=children)


def module_list(name: str, *children: ModuleSpec) -> ModuleSpec:
    """Return a list or dictionary of modules."""
    return ModuleSpec(name, children=children, runs=False)


def numbered_copies(part: ModuleSpec, count: int) -> Iterator[ModuleSpec]:
    """Return copies of a module, named by number."""
    return (replace(part, name=f"{part.name}{number}") for number in range(count))


@dataclass(frozen=True)
class ModelShape:
    """What decides the shapes of a GPT-NeoX model."""

    layers: int  # transformer layers
    hidden: int  # hidden size
    vocabulary: int  # rows of the embedding, with padding
    tied: bool = False  # whether the head uses the embedding's matrix
    tensor: int = 1
    """Ranks that share the model: each has a part of the vocabulary, of the heads and of the inner layers."""
    experts: int = 1  # experts of a layer that has several
    experts_here: int = 1  # experts of one rank
    expert_interval: int = 1  # one layer in so many has experts, beginning with the first


def gpt_neox_model(shape: ModelShape) -> ModuleSpec:
    """Return the model of `examples.gpt_neox`, whose parameters are those of GPT-NeoX.

    It has 2Vh + L(12h^2 + 13h) + 2h parameters, less Vh where embeddings are tied. A rank of t tensor-parallel ones has
    a t-th of the matrices and of the biases of column-parallel ones, and all of the others.
    """
    first, block, last_norm, head = gpt_neox_layers(shape)
    if shape.tied:
        head = ModuleSpec("head", shared="layers.embedding.weight")
    blocks = []
    for number in range(shape.layers):
        *parts, mlp = block.children
        has_experts = shape.experts > 1 and number % shape.expert_interval == 0
        layer_parts = (*parts, _experts(mlp, shape) if has_experts else mlp)
        blocks.append(replace(block, name=f"{block.name}{number}", children=layer_parts))
    return module("", module_list("layers", first, *blocks, last_norm, head))


def gpt_neox_layers(shape: ModelShape) -> tuple[ModuleSpec, ModuleSpec, ModuleSpec, ModuleSpec]:
    """Return the embedding, a transformer layer without experts, the last norm, and a head with its own matrix."""
    size, part = shape.hidden, shape.hidden // shape.tensor
    attention = module("attention", linear("query_key_value", size, 3 * part), linear("dense", part, size))
    mlp = module("mlp", linear("dense_h_to_4h", size, 4 * part), linear("dense_4h_to_h", 4 * part, size))
    block = module("block_", norm("input_layernorm", size), attention, norm("post_attention_layernorm", size), mlp)
    vocabulary = shape.vocabulary // shape.tensor
    head = linear("head", size, vocabulary, bias=False)
    return embedding("embedding", vocabulary, size), block, norm("final_norm", size), head


def _experts(mlp: ModuleSpec, shape: ModelShape) -> ModuleSpec:
    """Return DeepSpeed's layer of experts in place of an MLP: a gate, and the experts of one rank."""
    gate = module("gate", linear("wg", shape.hidden, shape.experts, bias=False))
    copies = (replace(mlp, name=str(number), expert=True) for number in range(shape.experts_here))
    experts = module("experts", module_list("deepspeed_experts", *copies))
    return module("mlp", module("moe", module("deepspeed_moe", gate, experts)))


# --- rows of the `job` table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelLists:
    """Lists about a model in a row of the `job` table."""

    parameters: list[dict[str, Any]] = field(default_factory=list)
    """Name, shape, dtype and whether it is trained, of each parameter."""
    buffers: list[dict[str, Any]] = field(default_factory=list)  # name, shape and dtype of each buffer
    modules: list[dict[str, Any]] = field(default_factory=list)  # name and parameter numbers of each module that runs
    decaying: list[int] = field(default_factory=list)
    """Numbers of the parameters that decay: matrices, which are neither biases nor of norms."""
    plain: list[int] = field(default_factory=list)  # numbers of the other parameters


def model_lists(root: ModuleSpec, dtype: str) -> ModelLists:
    """Return the lists of a model whose parameters have this element type."""
    lists = ModelLists()
    numbers: dict[str, int] = {}
    for prefix, part in _walk(root, ""):
        own = []
        mark = {"expert": True} if part.expert else {}
        for name, shape in part.parameters:
            number = numbers[prefix + name] = len(lists.parameters)
            row = {"name": prefix + name, "shape": [*shape], "dtype": dtype, "trainable": True}
            lists.parameters.append({**row, **mark})
            (lists.plain if part.norm or name.endswith("bias") else lists.decaying).append(number)
            own.append(number)
        if part.shared:
            own.append(numbers[part.shared])
        lists.buffers.extend(
            {"name": prefix + name, "shape": [*shape], "dtype": kind} for name, shape, kind in part.buffers
        )
        if part.runs:
            lists.modules.append({"name": prefix.rstrip("."), "parameters": own})
    return lists


def _walk(part: ModuleSpec, prefix: str) -> Iterator[tuple[str, ModuleSpec]]:
    """Yield each module, parents first, with the prefix of its parameters' names."""
    inner = f"{prefix}{part.name}." if part.name else prefix
    yield inner, part
    for child in part.children:
        yield from _walk(replace(child, expert=True) if part.expert else child, inner)
