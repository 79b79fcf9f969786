"""Modules of GPT-NeoX's program without a pipeline, by its own names. They determine when ZeRO-3 gathers what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from commtrace.theory.model_shapes import GATED, ModelShape, ModuleSpec, embedding, gpt_neox_layers, module
from commtrace.theory.rules.registry import GPT_NEOX, rule

from .program_config import ProgramConfig


@rule("megatron.model.gpt2_model.GPT2ModelPipe.init_specs, to_sequential; "
      "megatron.model.transformer.ParallelSelfAttention.__init__, ParallelMLP.__init__; "
      "megatron.model.word_embeddings.Embedding.__init__; megatron.model.activations.get_activation",
      GPT_NEOX)  # fmt: skip
def sequential_model(config: ProgramConfig, shape: ModelShape) -> ModuleSpec:
    """Return one torch.nn.Sequential of numbered layers, including two functions and a tied head."""
    _, block, norm, head = gpt_neox_layers(shape)
    tokens = embedding("word_embeddings", shape.vocabulary, shape.hidden)
    positions = [embedding("position_embeddings", shape.positions, shape.hidden)] * bool(shape.positions)
    layers = (
        module("", tokens, *positions, module("embedding_dropout")),
        module(""),
        *_layers(config, block),
        module(""),
        module("", replace(norm, name="norm")),
        module("", *[replace(head, name="final_linear")] * (not shape.tied)),
    )
    numbered = (replace(layer, name=str(number)) for number, layer in enumerate(layers))
    return module("", module("sequential", *numbered))


def _layers(config: ProgramConfig, block: ModuleSpec) -> Iterator[ModuleSpec]:
    first_norm, attention, last_norm, mlp = block.children
    queries, dense = attention.children
    linear1, linear2 = (replace(part, name=f"linear{number}") for number, part in enumerate(mlp.children, 1))
    gate = [module("activation_func")] * (config.activation in GATED)
    rotary = [module("rotary_emb")] * (config.pos_emb == "rotary")
    for kind in config.attention_kinds:
        softmax = [module("scale_mask_softmax")] * (kind != "flash")
        inner = module("attention", queries, *rotary, *softmax, module("attention_dropout"), dense)
        yield module("", first_norm, inner, last_norm, module("mlp", *gate, linear1, linear2))
