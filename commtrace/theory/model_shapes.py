"""Shapes of models from their configuration: parameters, buffers and modules in the order in which they are made.

A model is a tree of modules, each with parameters of its own. torch lists parameters (`named_parameters`) from the
root: a module's own before those of the modules in it, and a shared one where it occurs first. Shapes and order
therefore follow from the tree, without building the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from commtrace.job_row import ModelSettings, ModuleRow, TensorRow
from commtrace.theory.rules.registry import GPT_NEOX, rule

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class ModuleSpec:
    """A module of a model, with the modules in it."""

    name: str  # last part of the dotted name
    parameters: tuple[tuple[str, Shape], ...] = ()  # name and shape of its own parameters
    children: tuple[ModuleSpec, ...] = ()  # modules in it
    runs: bool = True  # whether it has its own forward; a list of modules does not
    norm: bool = False  # whether it is a norm, which has no weight decay
    shared: str = ""  # full name of a parameter of another module that it uses as well; empty: none
    buffers: tuple[tuple[str, Shape, str], ...] = ()  # name, shape and dtype of its buffers
    expert: bool = False  # whether it is one of several experts


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> ModuleSpec:
    """Return a linear layer with a weight of shape (outputs, inputs)."""
    return ModuleSpec(name, (("weight", (outputs, inputs)), *[("bias", (outputs,))] * bias))


def norm(name: str, size: int, *, bias: bool = True) -> ModuleSpec:
    """Return a LayerNorm or, without a bias, an RMSNorm."""
    return ModuleSpec(name, (("weight", (size,)), *[("bias", (size,))] * bias), norm=True)


def embedding(name: str, rows: int, size: int) -> ModuleSpec:
    """Return an embedding."""
    return ModuleSpec(name, (("weight", (rows, size)),))


def module(name: str, *children: ModuleSpec) -> ModuleSpec:
    """Return a module without parameters of its own."""
    return ModuleSpec(name, children=children)


def module_list(name: str, *children: ModuleSpec) -> ModuleSpec:
    """Return a list or dictionary of modules."""
    return ModuleSpec(name, children=children, runs=False)


def numbered_copies(original: ModuleSpec, count: int) -> Iterator[ModuleSpec]:
    """Return copies of a module with a number at the end of the name."""
    return (replace(original, name=f"{original.name}{number}") for number in range(count))


@dataclass(frozen=True)
class ModelShape:
    """Settings that determine the shapes of a GPT-NeoX model."""

    layers: int  # transformer layers
    hidden: int  # hidden size
    vocabulary: int  # rows of the embedding, with padding
    tied: bool = False  # whether the head uses the embedding's matrix
    tensor: int = 1
    """Tensor-parallel ranks: each has a part of the vocabulary, the heads and the MLP's inner dimension."""
    experts: int = 1  # experts of a layer that has several
    experts_here: int = 1  # experts on one rank
    expert_interval: int = 1  # every n-th layer has experts, beginning with the first
    keys: int = 0  # width of all heads' keys, and of their values; 0: the hidden size
    inner: tuple[int, int] = (0, 0)  # rows of the MLP's first matrix, columns of its second; 0: 4 times the hidden size
    attention_bias: bool = True  # whether the linear layers of attention have biases
    mlp_bias: bool = True  # whether the linear layers of the MLP have biases
    norm: str = "layernorm"  # a key of NORMS
    positions: int = 0  # learned positions


def gpt_neox_model(shape: ModelShape) -> ModuleSpec:
    """Return the model of `examples.gpt_neox`, which has the parameters of GPT-NeoX.

    It has 2Vh + L(12h^2 + 13h) + 2h parameters, less Vh if embeddings are tied. Each of t tensor-parallel ranks has 1/t
    of the matrices and of the biases of column-parallel layers, and all other parameters in full.
    """
    first, block, last_norm, head = gpt_neox_layers(shape)
    if shape.tied:
        head = ModuleSpec("head", shared="layers.embedding.weight")
    blocks = []
    for number in range(shape.layers):
        *others, mlp = block.children
        has_experts = shape.experts > 1 and number % shape.expert_interval == 0
        children = (*others, _experts(mlp, shape) if has_experts else mlp)
        blocks.append(replace(block, name=f"{block.name}{number}", children=children))
    return module("", module_list("layers", first, *blocks, last_norm, head))


def gpt_neox_layers(shape: ModelShape) -> tuple[ModuleSpec, ModuleSpec, ModuleSpec, ModuleSpec]:
    """Return the embedding, a transformer layer without experts, the last norm, and a head with its own matrix."""
    size, shard = shape.hidden, shape.hidden // shape.tensor
    keys, (rows, columns) = shape.keys or size, (width // shape.tensor or 4 * shard for width in shape.inner)
    queries_keys_values = linear("query_key_value", size, (size + 2 * keys) // shape.tensor, bias=shape.attention_bias)
    attention = module("attention", queries_keys_values, linear("dense", shard, size, bias=shape.attention_bias))
    mlp = module(
        "mlp",
        linear("dense_h_to_4h", size, rows, bias=shape.mlp_bias),
        linear("dense_4h_to_h", columns, size, bias=shape.mlp_bias),
    )
    norms = [_norm(name, shape) for name in ("input_layernorm", "post_attention_layernorm", "final_norm")]
    block = module("block_", norms[0], attention, norms[1], mlp)
    vocabulary = shape.vocabulary // shape.tensor
    first = embedding("embedding", vocabulary, size)
    if shape.positions:
        first = replace(first, parameters=(*first.parameters, ("positions", (shape.positions, size))))
    return first, block, norms[2], linear("head", size, vocabulary, bias=False)


NORMS: Final[dict[str, tuple[str, ...]]] = {
    "layernorm": ("weight", "bias"), "rmsnorm": ("scale",), "scalenorm": ("g",), "non_parametric_layernorm": (),
}  # fmt: skip
"""Parameters of GPT-NeoX's norms. Each has the hidden size, except scalenorm's, which is one number."""


def _norm(name: str, shape: ModelShape) -> ModuleSpec:
    elements = 1 if shape.norm == "scalenorm" else shape.hidden
    return ModuleSpec(name, tuple((parameter, (elements,)) for parameter in NORMS[shape.norm]), norm=True)


GATED: Final = ("geglu", "reglu", "bilinear", "swiglu", "glu")
"""GPT-NeoX's activations with a gate."""


@rule("megatron.model.transformer.ParallelMLP.__init__", GPT_NEOX)
def mlp_widths(settings: ModelSettings) -> tuple[int, int]:
    """Return the rows of the MLP's first matrix and the columns of its second.

    With a gate, the two halves of the first matrix together have two thirds of the width. Both results are rounded up.
    """
    hidden, multiple = settings.hidden_size, settings.mlp_multiple_of or 1
    width = settings.intermediate_size or int((settings.expansion_factor or 4) * hidden)
    rows, columns = width, width
    if settings.activation in GATED:
        rows = int(width * 2 / 3)
        columns = rows // 2
    return -(-rows // (2 * multiple)) * 2 * multiple, -(-columns // multiple) * multiple


@rule("megatron.model.transformer.ParallelSelfAttention.__init__; megatron.model.norms.get_norm; "
      "megatron.model.word_embeddings.Embedding.__init__", GPT_NEOX)  # fmt: skip
def neox_shape(settings: ModelSettings, tensor: int = 1) -> ModelShape:
    """Return the shape of a model with GPT-NeoX's settings (`neox_args`) on `tensor` tensor-parallel ranks."""
    hidden, heads = settings.hidden_size, settings.num_attention_heads
    experts = settings.get(ModelSettings.moe_num_experts, 1) or 1
    return ModelShape(
        layers=settings.num_layers,
        hidden=hidden,
        vocabulary=settings.padded_vocab_size,
        tied=not settings.get(ModelSettings.no_weight_tying, False),
        tensor=tensor,
        experts=experts,
        experts_here=experts // (settings.get(ModelSettings.moe_expert_parallel_size, 1) or 1),
        expert_interval=settings.get(ModelSettings.moe_expert_interval, 1) or 1,
        keys=hidden // heads * (settings.num_kv_heads or heads),
        inner=mlp_widths(settings),
        attention_bias=settings.use_bias_in_attn_linear,
        mlp_bias=settings.use_bias_in_mlp,
        norm=settings.norm,
        positions=settings.max_position_embeddings if settings.get(ModelSettings.pos_emb, "") == "learned" else 0,
    )


def _experts(mlp: ModuleSpec, shape: ModelShape) -> ModuleSpec:
    """Return DeepSpeed's MoE layer, which replaces an MLP: a gate, and the experts of one rank."""
    gate = module("gate", linear("wg", shape.hidden, shape.experts, bias=False))
    copies = (replace(mlp, name=str(number), expert=True) for number in range(shape.experts_here))
    experts = module("experts", module_list("deepspeed_experts", *copies))
    return module("mlp", module("moe", module("deepspeed_moe", gate, experts)))


# --- rows of the `job` table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelLists:
    """Lists that describe a model in a row of the `job` table."""

    parameters: list[TensorRow] = field(default_factory=list)
    buffers: list[TensorRow] = field(default_factory=list)
    modules: list[ModuleRow] = field(default_factory=list)  # those that run
    decaying: list[int] = field(default_factory=list)
    """Numbers of the parameters with weight decay: all except biases and those of norms."""
    plain: list[int] = field(default_factory=list)  # numbers of the other parameters

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)


def model_lists(root: ModuleSpec, dtype: str) -> ModelLists:
    """Return the lists of a model with parameters of a dtype."""
    lists = ModelLists()
    numbers: dict[str, int] = {}
    for prefix, spec in _walk(root, ""):
        own = []
        for name, shape in spec.parameters:
            number = numbers[prefix + name] = len(lists.parameters)
            row = TensorRow(name=prefix + name, shape=[*shape], dtype=dtype, trainable=True)
            if spec.expert:
                row.expert = True
            lists.parameters.append(row)
            (lists.plain if spec.norm or name.endswith("bias") else lists.decaying).append(number)
            own.append(number)
        if spec.shared:
            own.append(numbers[spec.shared])
        lists.buffers.extend(
            TensorRow(name=prefix + name, shape=[*shape], dtype=kind) for name, shape, kind in spec.buffers
        )
        if spec.runs:
            lists.modules.append(ModuleRow(name=prefix.rstrip("."), parameters=own))
    return lists


def _walk(spec: ModuleSpec, prefix: str) -> Iterator[tuple[str, ModuleSpec]]:
    """Yield each module, parents first, with the prefix of its parameters' names."""
    inner = f"{prefix}{spec.name}." if spec.name else prefix
    yield inner, spec
    for child in spec.children:
        yield from _walk(replace(child, expert=True) if spec.expert else child, inner)
