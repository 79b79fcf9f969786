"""What GPT-NeoX passes on of its keys: DeepSpeed's configuration, and its models' attribute `neox_args`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from .config import NeoxConfig
from .program_config import ProgramConfig

_MODEL_SETTINGS: Final = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size", "no_weight_tying",
    "gpt_j_residual", "hidden_dropout", "attention_dropout", "checkpoint_activations", "checkpoint_num_layers",
    "checkpoint_reentrant", "model_parallel_size", "sequence_parallel", "sequence_parallel_size",
    "context_parallel_size", "moe_num_experts", "moe_expert_interval", "moe_expert_parallel_size", "moe_top_k",
    "moe_train_capacity_factor", "moe_min_capacity", "moe_token_dropping", "fp32_allreduce", "gradient_clipping",
    "precision",
)  # fmt: skip

_PROGRAM_SETTINGS: Final = (
    "norm", "pos_emb", "max_position_embeddings", "activation", "num_kv_heads", "intermediate_size", "expansion_factor",
    "mlp_multiple_of", "use_bias_in_attn_linear", "use_bias_in_mlp", "partition_activations", "fp16_lm_cross_entropy",
    "train_iters", "eval_interval", "eval_iters",
)  # fmt: skip


def deepspeed_config(config: NeoxConfig, micro_batch: int, accumulation: int, verbose: bool) -> dict[str, Any]:
    """Return the dictionary for ``deepspeed.initialize``.

    With `verbose`, DeepSpeed prints and measures every few steps, if the files say so.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": dict(config.zero_optimization),
        # The optimizer is PyTorch's; with offloading, DeepSpeed would require its own, which it compiles on first use.
        "zero_force_ds_cpu_optimizer": False,
        **config.deepspeed_keys,
    }
    if config.precision != "fp32":
        settings[config.precision] = {**config.precision_block, "enabled": True}
    if config.pipe_parallel_size > 1:
        settings["pipeline"] = {"use_reentrant": config.checkpoint_reentrant, **settings.get("pipeline", {})}
    if not verbose:
        # GPT-NeoX's files switch these on. They print every few steps, and the timers wait for the device at each call.
        settings.update(steps_per_print=10**9, wall_clock_breakdown=False)
    return settings


def neox_args(config: NeoxConfig, micro_batch: int, accumulation: int) -> SimpleNamespace:
    """Return the settings that determine what a model communicates, by GPT-NeoX's names."""
    settings = {name: getattr(config, name) for name in _MODEL_SETTINGS}
    if isinstance(config, ProgramConfig):
        program_settings = {name: getattr(config, name) for name in _PROGRAM_SETTINGS}
        settings |= {name: value for name, value in program_settings.items() if value is not None}
        settings |= {"program": "NeoXArgs", "is_pipe_parallel": config.pipe_parallel_size > 0}
    batch = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    return SimpleNamespace(**settings, **batch)
