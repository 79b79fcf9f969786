"""GPT-NeoX settings as in files: whether there are rules for the model, and the values that several keys determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .field_types import NOT_A_BLOCK, SettingError, raise_first_failed

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

PRECISIONS: Final = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "bfloat16": "bf16"}

# Keys of DeepSpeed, which are passed on unchanged.
DEEPSPEED_KEYS: Final = (
    "communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients",
    "comms_logger", "flops_profiler", "steps_per_print", "wall_clock_breakdown",
)  # fmt: skip


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


def precision_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fp32, fp16 or bf16, and its block.

    A `precision` key (or the command line's) overrides the blocks, except for their loss scaling.
    """
    blocks = {"fp16": block(values, "fp16"), "bf16": block(values, "bf16")}
    enabled = [name for name, settings in blocks.items() if settings.get("enabled")]
    if len(enabled) == 2 and "precision" not in values:
        raise SettingError("bf16", "fp16 is enabled too; enable one of them, or set precision")
    precision = values.get("precision", enabled[0] if enabled else "fp32")
    chosen = blocks.get(PRECISIONS.get(str(precision).lower(), ""), {})
    # "fp16" and "type" inside the block are GPT-NeoX's own; DeepSpeed rejects unknown keys.
    kept = {key: value for key, value in chosen.items() if key not in ("enabled", "fp16", "type")}
    return {"precision": precision, "precision_block": kept}


def zero_block(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ZeRO's block with its stage. Raise SettingError for another stage than 0 to 3."""
    zero = block(values, "zero_optimization")
    stage = values.get("zero_stage", zero.get("stage", 0))
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        key = "zero_stage" if "zero_stage" in values else "zero_optimization.stage"
        raise SettingError(key, "ZeRO's stage must be 0, 1, 2 or 3")
    return {**zero, "stage": stage}


def deepspeed_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that DeepSpeed gets unchanged."""
    keys = {key: values[key] for key in DEEPSPEED_KEYS if key in values}
    if values.get("fp32_allreduce") is True:
        keys["communication_data_type"] = "fp32"
    return {**keys, **block(values, "deepspeed_extra_args")}
