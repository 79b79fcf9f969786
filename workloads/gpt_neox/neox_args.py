"""The keys that GPT-NeoX's models carry about themselves."""

from __future__ import annotations

from types import SimpleNamespace

from .config import NeoxConfig


def neox_args(config: NeoxConfig, micro_batch: int, accumulation: int) -> SimpleNamespace:
    """What GPT-NeoX's models carry as `neox_args`: the keys that decide what travels through the model."""
    return SimpleNamespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        seq_length=config.seq_length,
        padded_vocab_size=config.padded_vocab_size,
        no_weight_tying=config.no_weight_tying,
        gpt_j_residual=config.gpt_j_residual,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        checkpoint_activations=config.checkpoint_activations,
        checkpoint_num_layers=config.checkpoint_num_layers,
        checkpoint_reentrant=config.checkpoint_reentrant,
        model_parallel_size=config.model_parallel_size,
        fp32_allreduce=config.fp32_allreduce,
        gradient_clipping=config.gradient_clipping,
        precision=config.precision,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
    )
