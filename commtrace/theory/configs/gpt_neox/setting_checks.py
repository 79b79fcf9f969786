"""Checks of GPT-NeoX settings: whether there are rules for the model, and whether settings fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from commtrace.errors import ConfigError

from .field_types import NOT_A_BLOCK, SettingError, raise_first_failed

if TYPE_CHECKING:
    from .config import NeoxConfig

# GPT-NeoX settings that change the model or the communication pattern, with the values that have rules. The first
# value is GPT-NeoX's default. Anything else is refused: a prediction for another model would be wrong.
FIXED_SETTINGS: Final[dict[str, tuple[Any, ...]]] = {
    "pos_emb": ("learned", "rotary"),  # the default is refused below, with its own message
    "norm": ("layernorm",),
    "activation": ("gelu",),
    "gpt_j_tied": (False,),
    "model_arch": ("gpt2",),
    "mlp_type": ("regular",),
    "use_qk_layernorm": (False,),
    "use_bias_in_attn_linear": (True,),
    "use_bias_in_norms": (True,),
    "moe_type": ("deepspeed",),
    "moe_use_residual": (False,),
    "moe_glu": (False,),
    "moe_jitter_eps": (None,),
    "enable_expert_tensor_parallelism": (False,),
    "num_kv_heads": (None,),
    "num_unique_layers": (None,),
    "sliding_window_width": (None,),
}

_SEQUENCE_SIZES: Final = ("sequence_parallel_size", "context_parallel_size")


def refuse_other_models(values: Mapping[str, Any]) -> None:
    """Raise SettingError for settings of models without rules."""
    for key, allowed in FIXED_SETTINGS.items():
        if values.get(key, allowed[0]) not in allowed:
            instead = "leave the key out" if allowed[-1] is None else f"set it to {allowed[-1]!r}"
            raise SettingError(key, f"it is not supported; {instead}")
    is_other = any(name not in ("global", "flash") for name in _names(values.get("attention_config")))
    raise_first_failed(
        (values.get("pos_emb") != "rotary", "pos_emb", "only rotary positions are supported; set pos_emb to rotary"),
        (is_other, "attention_config", 'only full causal attention is supported: "global" or "flash"'),
    )


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [name for item in value for name in _names(item)] if isinstance(value, list) else []


def block(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a copy of a block, empty where it is not set. Raise SettingError where it is not a block."""
    value = values.get(key, {})
    if not isinstance(value, dict):
        raise SettingError(key, NOT_A_BLOCK)
    return dict(value)


def check_combinations(config: NeoxConfig) -> None:
    """Raise SettingError for the first setting that does not fit the others."""
    heads, length, tensor_ranks = config.num_attention_heads, config.seq_length, config.model_parallel_size
    experts, stages, sequence_ranks = config.moe_num_experts, config.pipe_parallel_size, config.sequence_parallel_size
    experts_key = "moe_num_experts" if "moe_num_experts" in config.origins else "num_experts"
    zero_key = "zero_stage" if "zero_stage" in config.origins else "zero_optimization"
    shared = [key for key in (*_SEQUENCE_SIZES, "model_parallel_size") if getattr(config, key) > 1]
    together = "it is not supported together with"
    raise_first_failed(
        (config.hidden_size % heads, "hidden_size", f"it must be a multiple of num_attention_heads, which is {heads}"),
        (heads % tensor_ranks, "model_parallel_size", f"it must divide num_attention_heads, which is {heads}"),
        (config.sequence_parallel and length % tensor_ranks, "sequence_parallel",
         f"model_parallel_size, which is {tensor_ranks}, must divide seq_length, which is {length}"),
        (len(shared) > 1, "".join(shared[:1]), f"{together} {''.join(shared[1:2])}; set one of them to 1"),
        *((length % getattr(config, key), key, f"it must divide seq_length, which is {length}")
          for key in _SEQUENCE_SIZES),
        (heads % sequence_ranks, "sequence_parallel_size", f"it must divide num_attention_heads, which is {heads}"),
        (experts % config.moe_expert_parallel_size, "moe_expert_parallel_size",
         f"it must divide {experts_key}, which is {experts}"),
        (config.moe_top_k > experts, "moe_top_k",
         f"it must not exceed {experts_key}, which is {experts}"),
        *((experts > 1, key, f"{together} experts; set it to 1") for key in shared),
        (stages > config.num_layers, "pipe_parallel_size",
         f"each stage needs at least one layer, and num_layers is {config.num_layers}"),
        *((stages > 1 and getattr(config, key) > 1, shown, f"{together} pipe_parallel_size; leave one out")
          for key, shown in (*zip(_SEQUENCE_SIZES, _SEQUENCE_SIZES, strict=True), ("moe_num_experts", experts_key))),
        (stages > 1 and config.zero_stage > 1, zero_key,
         "DeepSpeed's pipeline supports ZeRO-0 and ZeRO-1 only; use one of them, or set pipe_parallel_size to 1"),
    )  # fmt: skip


def check_engine(config: NeoxConfig, engine: str) -> None:
    """Check that an engine ("deepspeed", "ddp" or "fsdp") supports the settings.

    Raises:
        ConfigError: It does not; the message has the setting and what to do.
    """
    is_deepspeed, is_zero_3 = engine == "deepspeed", engine == "deepspeed" and config.zero_stage == 3
    refused = (
        (config.pipe_parallel_size > 1 and not is_deepspeed,
         f"pipeline parallelism is DeepSpeed's; set pipe_parallel_size to 1 with --engine {engine}"),
        (config.model_parallel_size > 1 and is_zero_3,
         "tensor parallelism is supported with ZeRO 0 to 2; set model_parallel_size to 1 with ZeRO-3"),
        (config.sequence_parallel_size > 1 and not is_deepspeed,
         f"sequence_parallel_size is DeepSpeed's; set it to 1 with --engine {engine}"),
        (config.sequence_parallel_size > 1 and is_zero_3,
         "Ulysses is supported with ZeRO 0 to 2; set sequence_parallel_size to 1 with ZeRO-3"),
        (config.moe_num_experts > 1 and (not is_deepspeed or is_zero_3),
         "experts are DeepSpeed's, with ZeRO 0 to 2; leave moe_num_experts out, or change the engine"),
    )  # fmt: skip
    for is_refused, message in refused:
        if is_refused:
            raise ConfigError(message)
