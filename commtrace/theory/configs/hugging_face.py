"""Hugging Face decoder models from their `config.json`.

The modules are those of the installed transformers (`modeling_llama.py`, `modeling_gpt2.py`, `modeling_gpt_neox.py`),
or of its version 5.24 where none is installed: releases differ in buffers, which DDP broadcasts, and in names. A test
compares every parameter and buffer where that library is installed. LLAMA names the families that share llama's
modules. Adapters, quantized weights and heads other than language-modelling heads have no rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import ModuleSpec, embedding, linear, module, module_list, norm, numbered_copies

from .versions_in_use import version_in_use

Family: TypeAlias = tuple[ModuleSpec, str, bool]
"""The decoder, with the token embedding first; the head's name; whether they share a matrix by default."""

LLAMA: Final = ("llama", "mistral", "qwen2")
"""Values of `model_type` with llama's modules."""


_NEWEST: Final = (5, 24)
"""Version of transformers that these modules were last compared with."""


class ModelConfig:
    """A config.json, with typed access by name, and the version of transformers that reads it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.version = version_in_use("transformers", _NEWEST)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raise NotPredictedError for anything else."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NotPredictedError(
                f"{name} in the model's configuration is {value!r}; give a whole number of at least 1"
            )
        return value

    def fraction(self, name: str, default: float) -> float:
        """Return a number; the default where it is missing or 0."""
        return float(self._values.get(name) or default)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean; the default where it is missing."""
        value = self._values.get(name)
        return default if value is None else bool(value)


def model(values: Mapping[str, Any]) -> ModuleSpec:
    """Return the model with its language-modelling head. Raise NotPredictedError for other families."""
    kind = str(values.get("model_type"))
    if kind not in _MODELS:
        raise NotPredictedError(f"models of type {kind} have no rules yet; give one of {', '.join(sorted(_MODELS))}")
    config = ModelConfig(values)
    decoder, head, tied_by_default = _MODELS[kind](config, kind)
    tokens = decoder.children[0]
    if config.flag("tie_word_embeddings", tied_by_default):
        return module("", decoder, ModuleSpec(head, shared=f"{decoder.name}.{tokens.name}.weight"))
    ((_, (vocabulary, hidden)),) = tokens.parameters
    return module("", decoder, linear(head, hidden, vocabulary, bias=False))


def hidden_size(values: Mapping[str, Any]) -> int:
    """Return the width of the model: `hidden_size`, which GPT-2 calls `n_embd`."""
    return ModelConfig(values).number("hidden_size" if "hidden_size" in values else "n_embd")


def _llama(config: ModelConfig, kind: str) -> Family:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    head = config.number("head_dim", hidden // heads)
    key_value_heads = config.number("num_key_value_heads", heads)
    has_bias = kind == "qwen2" or config.flag("attention_bias", False)
    inner, mlp_bias = config.number("intermediate_size"), config.flag("mlp_bias", False)
    attention = module(
        "self_attn",
        linear("q_proj", hidden, heads * head, bias=has_bias),
        linear("k_proj", hidden, key_value_heads * head, bias=has_bias),
        linear("v_proj", hidden, key_value_heads * head, bias=has_bias),
        linear("o_proj", heads * head, hidden, bias=has_bias and kind != "qwen2"),
    )
    mlp = module(
        "mlp",
        linear("gate_proj", hidden, inner, bias=mlp_bias),
        linear("up_proj", hidden, inner, bias=mlp_bias),
        linear("down_proj", inner, hidden, bias=mlp_bias),
        module("act_fn"),
    )
    norms = (norm("input_layernorm", hidden, bias=False), norm("post_attention_layernorm", hidden, bias=False))
    decoder = module(
        "model",
        embedding("embed_tokens", config.number("vocab_size"), hidden),
        module_list("layers", *numbered_copies(module("", attention, mlp, *norms), config.number("num_hidden_layers"))),
        norm("norm", hidden, bias=False),
        _rotary(config, head),
    )
    return decoder, "lm_head", False


def _rotary(config: ModelConfig, width: int) -> ModuleSpec:
    """Return the rotary embedding of so many elements of a head."""
    names = ("inv_freq", "original_inv_freq") if config.version >= (5, 0) else ("inv_freq",)
    return ModuleSpec("rotary_emb", buffers=tuple((name, (width // 2,), "float32") for name in names))


def _gpt2(config: ModelConfig, kind: str) -> Family:
    hidden, positions = config.number("n_embd"), config.number("n_positions", 1024)
    inner = config.number("n_inner", 4 * hidden)
    attention = ModuleSpec(
        "attn",
        children=(
            _conv1d("c_attn", hidden, 3 * hidden),
            _conv1d("c_proj", hidden, hidden),
            module("attn_dropout"),
            module("resid_dropout"),
        ),
        buffers=_gpt2_masks(config, positions),
    )
    mlp = module(
        "mlp", _conv1d("c_fc", hidden, inner), _conv1d("c_proj", inner, hidden), module("act"), module("dropout")
    )
    layer = module("", norm("ln_1", hidden), attention, norm("ln_2", hidden), mlp)
    decoder = module(
        "transformer",
        embedding("wte", config.number("vocab_size"), hidden),
        embedding("wpe", positions, hidden),
        module("drop"),
        module_list("h", *numbered_copies(layer, config.number("n_layer"))),
        norm("ln_f", hidden),
    )
    return decoder, "lm_head", True


def _gpt2_masks(config: ModelConfig, positions: int) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    if config.version >= (5, 2):
        return ()
    mask = ("bias", (1, 1, positions, positions), "bool")
    return (mask,) if config.version >= (5, 0) else (mask, ("masked_bias", (), "float32"))


def _conv1d(name: str, inputs: int, outputs: int) -> ModuleSpec:
    """Return transformers' Conv1D: a linear layer whose weight is transposed."""
    return ModuleSpec(name, (("weight", (inputs, outputs)), ("bias", (outputs,))))


def _gpt_neox(config: ModelConfig, kind: str) -> Family:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    head = hidden // config.number("num_attention_heads")
    has_bias = config.flag("attention_bias", True)
    attention = module(
        "attention",
        linear("query_key_value", hidden, 3 * hidden, bias=has_bias),
        linear("dense", hidden, hidden, bias=has_bias),
    )
    mlp = module("mlp", linear("dense_h_to_4h", hidden, inner), linear("dense_4h_to_h", inner, hidden), module("act"))
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    layer = module("", *norms, module("post_attention_dropout"), module("post_mlp_dropout"), attention, mlp)
    rotary = int(head * config.fraction("rotary_pct", 0.25))
    decoder = module(
        "gpt_neox",
        embedding("embed_in", config.number("vocab_size"), hidden),
        module("emb_dropout"),
        module_list("layers", *numbered_copies(layer, config.number("num_hidden_layers"))),
        norm("final_layer_norm", hidden),
        _rotary(config, rotary),
    )
    return decoder, "lm_head" if config.version >= (5, 14) else "embed_out", False


_MODELS: Final[dict[str, Callable[[ModelConfig, str], Family]]] = {
    **dict.fromkeys(LLAMA, _llama),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
