"""Tree of the modules of GPT-NeoX's model without a pipeline, as they run under ZeRO-3. No log records it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from commtrace.theory.job import Job, ModuleNode, refuse
from commtrace.theory.rules.registry import GPT_NEOX, rule

_LAYER: Final = ("input_layernorm", "attention", "post_attention_layernorm", "mlp")
_LAYER_OF_GPT_J: Final = ("input_layernorm", "post_attention_layernorm", "attention", "mlp")
_MLP: Final = ("linear1", "activation_func", "linear2")
_POSITIONS: Final = ("learned", "rotary", "none")
_KNOWN_MODULES: Final = {
    "": {"word_embeddings", "position_embeddings", "embedding_dropout", "norm", "final_linear", *_LAYER},
    "attention": {"query_key_value", "rotary_emb", "scale_mask_softmax", "attention_dropout", "dense"},
    "mlp": {*_MLP},
}
"""Modules with rules: within a layer of the model, within attention, and within the MLP."""


@rule("megatron.model.utils.SequentialWrapper.forward; megatron.model.gpt2_model.GPT2ModelPipe.to_sequential", GPT_NEOX)
def executed_model(job: Job) -> ModuleNode:
    """Return the model with its layers, which it calls itself, as children. A tied head has the embedding's weight.

    The module `sequential`, whose layers they are, is not called. Logs may list it as idle, and it is no node then.
    """
    layers, positions = job.root.children, job.model.pos_emb
    if [_name(job, child) for child in layers] == ["sequential"]:
        layers = layers[0].children
    names = [job.row.modules[layer.number].name for layer in layers]
    is_other = len(names) < 2 or not all(name.startswith("sequential.") for name in names)
    refuse(
        (is_other, "the modules in the log are not those of GPT-NeoX"),
        (positions not in _POSITIONS, f"GPT-NeoX under ZeRO-3 with {positions} positions has no rules yet"),
    )
    first, *others, last = (executed_module(job, layer) for layer in layers)
    if not job.model.no_weight_tying:
        last = replace(last, parameters=first.children[0].parameters)
    return replace(job.root, children=(first, *others, last))


@rule("megatron.model.transformer.ParallelTransformerLayer.forward, ParallelSelfAttention.forward, "
      "ParallelMLP.forward; megatron.model.word_embeddings.Embedding.forward", GPT_NEOX)  # fmt: skip
def executed_module(job: Job, module: ModuleNode) -> ModuleNode:
    """Return a module with its children in the order in which they run, which is not that of their construction.

    Flash attention does not run its dropout module. A module's `borrowed` parameters are biases that children return.
    """
    order = (*(_LAYER_OF_GPT_J if job.model.gpt_j_residual else _LAYER), *_MLP)
    named = {_name(job, child): executed_module(job, child) for child in module.children}
    unknown = named.keys() - _KNOWN_MODULES.get(_name(job, module), _KNOWN_MODULES[""])
    refuse(*((True, f"GPT-NeoX's module {name} under ZeRO-3 has no rules yet") for name in unknown))
    if "scale_mask_softmax" not in named:
        named.pop("attention_dropout", None)
    children = [named[name] for name in sorted(named, key=lambda name: order.index(name) if name in order else 0)]
    returned = returned_biases(job, module)
    borrowed = (number for child in children for number in returned_biases(job, child) if number not in returned)
    return replace(
        module,
        children=tuple(children),
        borrowed=tuple(borrowed),
        outputs=0 if _name(job, module) == "rotary_emb" else 1 + len(returned),
        reads_input=_name(job, module) == "position_embeddings",
    )


@rule("megatron.mpu.layers.ColumnParallelLinear.forward, RowParallelLinear.forward (skip_bias_add)", GPT_NEOX)
def returned_biases(job: Job, module: ModuleNode) -> tuple[int, ...]:
    """Return the biases that a module returns instead of adding: three linear layers, attention and the MLP do so."""
    name = _name(job, module)
    if name in ("dense", "linear1", "linear2"):
        return tuple(number for number in module.parameters if job.parameters[number].name.endswith(".bias"))
    last = {"attention": "dense", "mlp": "linear2"}.get(name)
    returning = (child for child in module.children if _name(job, child) == last)
    return tuple(number for child in returning for number in returned_biases(job, child))


@rule("megatron.model.utils.SequentialWrapper.forward, _is_checkpointable", GPT_NEOX)
def checkpointed_segments(job: Job, root: ModuleNode) -> list[tuple[int, int]]:
    """Return (first, end) of each recomputed segment: checkpoint_num_layers layers, all of them transformer layers."""
    interval = job.model.checkpoint_num_layers
    is_layer = [any(_name(job, child) == "attention" for child in layer.children) for layer in root.children]
    segments = [(first, min(first + interval, len(is_layer))) for first in range(0, len(is_layer), interval)]
    return [(first, end) for first, end in segments if all(is_layer[first:end])]


def _name(job: Job, module: ModuleNode) -> str:
    """Return the last component of a module's name."""
    return job.row.modules[module.number].name.rpartition(".")[2]
