"""Models as their configuration describes them: which parameters they have, in the order in which they are made.

The rule: a model is a tree of modules, each with parameters of its own; torch lists parameters (`named_parameters`)
from the root on, a module's own before those of the modules in it, and each shared one where it comes first. So shapes
and order follow from the tree, and no model is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ModuleSpec:
    """A module."""

    name: str
    parameters: tuple[tuple[str, Shape], ...] = ()
    parts: tuple[ModuleSpec, ...] = ()
    runs: bool = True
    """Whether it has a forward of its own; a list of modules has none."""
    norm: bool = False
    """Its parameters are not decayed."""
    shared: str = ""
    """A parameter of another module that it uses as well, by its full name."""
    buffers: tuple[tuple[str, Shape, str], ...] = ()
    """Name, shape and element type."""
    expert: bool = False
    """It is one of several experts, and the parts within it are its own."""


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> ModuleSpec:
    """`outputs` rows of `inputs`."""
    own: tuple[tuple[str, Shape], ...] = (("weight", (outputs, inputs)), ("bias", (outputs,)))
    return ModuleSpec(name, own if bias else own[:1])


def norm(name: str, size: int, *, bias: bool = True) -> ModuleSpec:
    """A layer norm, or one without a bias (RMSNorm)."""
    own: tuple[tuple[str, Shape], ...] = (("weight", (size,)), ("bias", (size,)))
    return ModuleSpec(name, own if bias else own[:1], norm=True)


def embedding(name: str, count: int, size: int) -> ModuleSpec:
    """An embedding of `count` rows."""
    return ModuleSpec(name, (("weight", (count, size)),))


def module_list(name: str, *parts: ModuleSpec) -> ModuleSpec:
    """A list or dictionary of modules."""
    return ModuleSpec(name, parts=parts, runs=False)


def numbered_copies(part: ModuleSpec, count: int) -> Iterator[ModuleSpec]:
    """The part so many times, named by number."""
    return (replace(part, name=f"{part.name}{number}") for number in range(count))


@dataclass(frozen=True)
class ModelShape:
    """What decides the shapes of a GPT-NeoX model."""

    layers: int
    hidden: int
    vocabulary: int
    """Rows of the embedding, with padding."""
    tied: bool = False
    """The head uses the embedding's matrix."""
    tensor: int = 1
    """Ranks that share the model: each has a part of the vocabulary, of the heads and of the inner layers."""
    experts: int = 1
    """Of a layer that has several."""
    experts_here: int = 1
    """Those of one rank."""
    expert_interval: int = 1
    """Every so many-th layer has experts, the first one on."""


def gpt_neox_model(figures: ModelShape) -> ModuleSpec:
    """The tree of `examples.gpt_neox`, whose parameters are those of GPT-NeoX.

    2Vh + L(12h^2 + 13h) + 2h of them, less Vh where embeddings are tied; a rank of t has a t-th of the matrices and
    of the biases behind column-parallel ones, and all of the others.
    """
    embedding, block, norm_, head = gpt_neox_layers(figures)
    tied = ModuleSpec("head", shared="layers.embedding.weight")
    blocks = (_with_experts(block, figures, number) for number in range(figures.layers))
    return ModuleSpec("", parts=(module_list("layers", embedding, *blocks, norm_, tied if figures.tied else head),))


def gpt_neox_layers(figures: ModelShape) -> tuple[ModuleSpec, ModuleSpec, ModuleSpec, ModuleSpec]:
    """The embedding, a transformer layer without experts, the last norm, and a head with a matrix of its own."""
    size, part = figures.hidden, figures.hidden // figures.tensor
    attention = ModuleSpec("attention", parts=(linear("query_key_value", size, 3 * part), linear("dense", part, size)))
    mlp = ModuleSpec("mlp", parts=(linear("dense_h_to_4h", size, 4 * part), linear("dense_4h_to_h", 4 * part, size)))
    block = ModuleSpec(
        "block_", parts=(norm("input_layernorm", size), attention, norm("post_attention_layernorm", size), mlp)
    )
    vocabulary = figures.vocabulary // figures.tensor
    vocabulary_rows = embedding("embedding", vocabulary, size)
    return vocabulary_rows, block, norm("final_norm", size), linear("head", size, vocabulary, bias=False)


def _with_experts(block: ModuleSpec, figures: ModelShape, number: int) -> ModuleSpec:
    """The layer of this number, with experts in place of its MLP where it has some."""
    *others, mlp = block.parts
    has = figures.experts > 1 and number % figures.expert_interval == 0
    return replace(block, name=f"{block.name}{number}", parts=(*others, _experts(mlp, figures) if has else mlp))


def _experts(mlp: ModuleSpec, figures: ModelShape) -> ModuleSpec:
    """DeepSpeed's layer of several, in place of one: a gate, and those of one rank."""
    gate = ModuleSpec("gate", parts=(linear("wg", figures.hidden, figures.experts, bias=False),))
    copies = (replace(mlp, name=str(number), expert=True) for number in range(figures.experts_here))
    experts = ModuleSpec("experts", parts=(module_list("deepspeed_experts", *copies),))
    return ModuleSpec("mlp", parts=(ModuleSpec("moe", parts=(ModuleSpec("deepspeed_moe", parts=(gate, experts)),)),))


# --- as a row of the `job` table has it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelLists:
    """The lists that a job row has of a model."""

    parameters: list[dict[str, Any]]
    buffers: list[dict[str, Any]]
    modules: list[dict[str, Any]]
    decaying: list[int]
    """Numbers of the parameters that decay: matrices, that is neither biases nor those of norms."""
    plain: list[int]
    """Numbers of the others."""


def model_lists(root: ModuleSpec, dtype: str) -> ModelLists:
    """Of a model whose parameters have this element type."""
    found = ModelLists([], [], [], [], [])
    numbers: dict[str, int] = {}
    for prefix, part in _walk(root, ""):
        own = []
        mark = {"expert": True} if part.expert else {}
        for name, shape in part.parameters:
            number = numbers[prefix + name] = len(found.parameters)
            row = {"name": prefix + name, "shape": [*shape], "dtype": dtype, "trainable": True}
            found.parameters.append({**row, **mark})
            (found.plain if part.norm or name.endswith("bias") else found.decaying).append(number)
            own.append(number)
        if part.shared:
            own.append(numbers[part.shared])
        found.buffers.extend(
            {"name": prefix + name, "shape": [*shape], "dtype": kind} for name, shape, kind in part.buffers
        )
        if part.runs:
            found.modules.append({"name": prefix.rstrip("."), "parameters": own})
    return found


def _walk(part: ModuleSpec, prefix: str) -> Iterator[tuple[str, ModuleSpec]]:
    """Each part, parents first, with what stands before the names of its parameters."""
    inner = f"{prefix}{part.name}." if part.name else prefix
    yield inner, part
    for one in part.parts:
        yield from _walk(replace(one, expert=True) if part.expert else one, inner)
