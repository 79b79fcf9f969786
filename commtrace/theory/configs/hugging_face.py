"""Models of transformers by their `config.json`: the trees of the decoders that most others are variants of.

As transformers 4.57 builds them (`modeling_llama.py`, `modeling_gpt2.py`, `modeling_gpt_neox.py`; a test compares every
parameter and buffer where that library is installed); the families that share llama's tree are named in LLAMA.
Adapters, quantized weights and heads other than the language model's are not told here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import ModuleSpec, embedding, linear, module_list, norm, numbered_copies

LLAMA: Final = ("llama", "mistral", "qwen2")
"""Values of `model_type` with llama's tree."""


class ModelConfig:
    """A config.json, whose numbers are asked for by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number from 1. Raises NotPredictedError for anything else."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NotPredictedError(f"{name} in the model's configuration is {value!r}; it is a whole number from 1")
        return value

    def share(self, name: str, default: float) -> float:
        """A number."""
        return float(self._values.get(name) or default)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name)
        return default if value is None else bool(value)


def model(values: Mapping[str, Any]) -> ModuleSpec:
    """The tree of the model with its language-modelling head. Raises NotPredictedError for other families."""
    kind = str(values.get("model_type"))
    if kind not in _MODELS:
        raise NotPredictedError(f"models of type {kind} have no rules yet; there are {', '.join(sorted(_MODELS))}")
    return _MODELS[kind](ModelConfig(values), kind)


def hidden_size(values: Mapping[str, Any]) -> int:
    """Width of the model: `hidden_size`, which GPT-2 calls `n_embd`."""
    return ModelConfig(values).number("hidden_size" if "hidden_size" in values else "n_embd")


def _llama(config: ModelConfig, kind: str) -> ModuleSpec:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    head = config.number("head_dim", hidden // heads)
    pairs = config.number("num_key_value_heads", heads)
    biased = kind == "qwen2" or config.flag("attention_bias", False)
    inner, mlp_biased = config.number("intermediate_size"), config.flag("mlp_bias", False)
    attention = ModuleSpec(
        "self_attn",
        parts=(
            linear("q_proj", hidden, heads * head, bias=biased),
            linear("k_proj", hidden, pairs * head, bias=biased),
            linear("v_proj", hidden, pairs * head, bias=biased),
            linear("o_proj", heads * head, hidden, bias=biased and kind != "qwen2"),
        ),
    )
    mlp = ModuleSpec(
        "mlp",
        parts=(
            linear("gate_proj", hidden, inner, bias=mlp_biased),
            linear("up_proj", hidden, inner, bias=mlp_biased),
            linear("down_proj", inner, hidden, bias=mlp_biased),
            ModuleSpec("act_fn"),
        ),
    )
    norms = (norm("input_layernorm", hidden, bias=False), norm("post_attention_layernorm", hidden, bias=False))
    layer = ModuleSpec("", parts=(attention, mlp, *norms))
    decoder = ModuleSpec(
        "model",
        parts=(
            embedding("embed_tokens", config.number("vocab_size"), hidden),
            module_list("layers", *numbered_copies(layer, config.number("num_hidden_layers"))),
            norm("norm", hidden, bias=False),
            ModuleSpec("rotary_emb", buffers=(("inv_freq", (head // 2,), "float32"),)),
        ),
    )
    tied = config.flag("tie_word_embeddings", False)
    return ModuleSpec(
        "", parts=(decoder, _head("lm_head", hidden, config, "model.embed_tokens.weight" if tied else ""))
    )


def _head(name: str, hidden: int, config: ModelConfig, tied: str) -> ModuleSpec:
    return ModuleSpec(name, shared=tied) if tied else linear(name, hidden, config.number("vocab_size"), bias=False)


def _gpt2(config: ModelConfig, kind: str) -> ModuleSpec:
    hidden, positions = config.number("n_embd"), config.number("n_positions", 1024)
    inner = config.number("n_inner", 4 * hidden)
    # Conv1D: as linear, with inputs and outputs exchanged.
    attention = ModuleSpec(
        "attn",
        parts=(
            _conv("c_attn", hidden, 3 * hidden),
            _conv("c_proj", hidden, hidden),
            *_parts("attn_dropout", "resid_dropout"),
        ),
        buffers=(("bias", (1, 1, positions, positions), "bool"), ("masked_bias", (), "float32")),
    )
    mlp = ModuleSpec(
        "mlp", parts=(_conv("c_fc", hidden, inner), _conv("c_proj", inner, hidden), *_parts("act", "dropout"))
    )
    layer = ModuleSpec("", parts=(norm("ln_1", hidden), attention, norm("ln_2", hidden), mlp))
    decoder = ModuleSpec(
        "transformer",
        parts=(
            embedding("wte", config.number("vocab_size"), hidden),
            embedding("wpe", positions, hidden),
            ModuleSpec("drop"),
            module_list("h", *numbered_copies(layer, config.number("n_layer"))),
            norm("ln_f", hidden),
        ),
    )
    tied = config.flag("tie_word_embeddings", True)
    return ModuleSpec("", parts=(decoder, _head("lm_head", hidden, config, "transformer.wte.weight" if tied else "")))


def _conv(name: str, inputs: int, outputs: int) -> ModuleSpec:
    return ModuleSpec(name, (("weight", (inputs, outputs)), ("bias", (outputs,))))


def _parts(*names: str) -> tuple[ModuleSpec, ...]:
    return tuple(ModuleSpec(name) for name in names)


def _gpt_neox(config: ModelConfig, kind: str) -> ModuleSpec:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    head = hidden // config.number("num_attention_heads")
    biased = config.flag("attention_bias", True)
    attention = ModuleSpec(
        "attention",
        parts=(
            linear("query_key_value", hidden, 3 * hidden, bias=biased),
            linear("dense", hidden, hidden, bias=biased),
        ),
    )
    mlp = ModuleSpec(
        "mlp", parts=(linear("dense_h_to_4h", hidden, inner), linear("dense_4h_to_h", inner, hidden), ModuleSpec("act"))
    )
    layer = ModuleSpec(
        "",
        parts=(
            norm("input_layernorm", hidden),
            norm("post_attention_layernorm", hidden),
            *_parts("post_attention_dropout", "post_mlp_dropout"),
            attention,
            mlp,
        ),
    )
    rotary = int(head * config.share("rotary_pct", 0.25))
    decoder = ModuleSpec(
        "gpt_neox",
        parts=(
            embedding("embed_in", config.number("vocab_size"), hidden),
            ModuleSpec("emb_dropout"),
            module_list("layers", *numbered_copies(layer, config.number("num_hidden_layers"))),
            norm("final_layer_norm", hidden),
            ModuleSpec("rotary_emb", buffers=(("inv_freq", (rotary // 2,), "float32"),)),
        ),
    )
    tied = config.flag("tie_word_embeddings", False)
    return ModuleSpec(
        "", parts=(decoder, _head("embed_out", hidden, config, "gpt_neox.embed_in.weight" if tied else ""))
    )


_MODELS: Final[dict[str, Callable[[ModelConfig, str], ModuleSpec]]] = {
    **dict.fromkeys(LLAMA, _llama),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
