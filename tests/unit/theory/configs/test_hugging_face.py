"""Models derived from a Hugging Face `config.json`, compared with those of transformers if it is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: its models are not compared")

import torch
import transformers

from commtrace.theory.configs import hugging_face
from commtrace.theory.model_shapes import model_lists

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 100, "vocab_size": 131,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZES, "num_key_value_heads": 2}),
    "llama, tied and with biases": (
        "LlamaConfig", {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "mistral": ("MistralConfig", {**SIZES, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {**SIZES, "num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 33}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "max_position_embeddings": 40}),
    "gpt_neox, tied": ("GPTNeoXConfig", {**SIZES, "tie_word_embeddings": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_buffers_are_those_of_transformers_in_their_order(name: str) -> None:
    kind, values = CONFIGS[name]
    config = getattr(transformers, kind)(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    derived = model_lists(hugging_face.model(json.loads(config.to_json_string(use_diff=False))), "float32")
    for rows, tensors in ((derived.parameters, model.named_parameters()), (derived.buffers, model.named_buffers())):
        assert [(row.name, tuple(row.shape)) for row in rows] == [(n, tuple(t.shape)) for n, t in tensors]
