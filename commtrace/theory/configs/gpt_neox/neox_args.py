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
        sequence_parallel=config.sequence_parallel,
        sequence_parallel_size=config.sequence_parallel_size,
        context_parallel_size=config.context_parallel_size,
        moe_num_experts=config.moe_num_experts,
        moe_expert_interval=config.moe_expert_interval,
        moe_expert_parallel_size=config.moe_expert_parallel_size,
        moe_top_k=config.moe_top_k,
        moe_train_capacity_factor=config.moe_train_capacity_factor,
        moe_min_capacity=config.moe_min_capacity,
        moe_token_dropping=config.moe_token_dropping,
        fp32_allreduce=config.fp32_allreduce,
        gradient_clipping=config.gradient_clipping,
        precision=config.precision,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
    )
