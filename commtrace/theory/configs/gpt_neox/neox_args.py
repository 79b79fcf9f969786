"""The settings that GPT-NeoX's models carry as their attribute `neox_args`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final

from .config import NeoxConfig

_SETTINGS: Final = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size", "no_weight_tying",
    "gpt_j_residual", "hidden_dropout", "attention_dropout", "checkpoint_activations", "checkpoint_num_layers",
    "checkpoint_reentrant", "model_parallel_size", "sequence_parallel", "sequence_parallel_size",
    "context_parallel_size", "moe_num_experts", "moe_expert_interval", "moe_expert_parallel_size", "moe_top_k",
    "moe_train_capacity_factor", "moe_min_capacity", "moe_token_dropping", "fp32_allreduce", "gradient_clipping",
    "precision",
)  # fmt: skip


def neox_args(config: NeoxConfig, micro_batch: int, accumulation: int) -> SimpleNamespace:
    """Return the settings that decide what travels through a model, by GPT-NeoX's names."""
    return SimpleNamespace(
        **{name: getattr(config, name) for name in _SETTINGS},
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
    )
