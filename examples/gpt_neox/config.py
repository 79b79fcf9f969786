"""Training configuration: GPT-NeoX's keys. commtrace itself reads only those that determine communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field, field_validator, model_validator

from commtrace.errors import ConfigError
from commtrace.theory.configs.gpt_neox import config as neox
from commtrace.theory.configs.gpt_neox.field_types import (
    NOT_A_BLOCK,
    REQUIRED,
    Count,
    CountOrZero,
    NonNegativeNumber,
    OptionalCount,
    SettingError,
    choice,
    number_with_message,
    with_message,
)
from commtrace.theory.configs.gpt_neox.setting_checks import DEEPSPEED_KEYS, FIXED_SETTINGS, block
from commtrace.theory.configs.gpt_neox.yaml_files import Setting

from .fsdp_settings import FsdpSettings

_INITS: Final = {name: name for name in ("normal", "scaled_normal", "small_init", "wang_init")}
_DECAYS: Final = {name: name for name in ("constant", "linear", "cosine", "exponential")}

# Keys that configurations read besides those of their fields.
_OTHER_KEYS: Final = ("attention_config", "zero_stage", "fp16", "bf16", "deepspeed_extra_args")


def _split_commas(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def _optimizer_parameter(name: str) -> AliasPath:
    return AliasPath("optimizer", "params", name)


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), number_with_message("it must be a number from 0 to 1")]
Betas = Annotated[
    tuple[NonNegativeNumber, NonNegativeNumber],
    BeforeValidator(_split_commas),
    with_message("it must be 2 numbers, such as 0.9, 0.999"),
]
Split = Annotated[
    tuple[NonNegativeNumber, NonNegativeNumber, NonNegativeNumber],
    BeforeValidator(_split_commas),
    with_message("it must be 3 numbers, such as 969, 30, 1"),
]


class TrainingConfig(neox.NeoxConfig):
    """A checked training configuration. Fields have GPT-NeoX's names, where they exist, and GPT-NeoX's defaults."""

    max_position_embeddings: OptionalCount = None
    rotary_pct: Share = 1.0
    rotary_emb_base: Annotated[
        float, Field(ge=1, allow_inf_nan=False), number_with_message("it must be a number of at least 1")
    ] = 10000.0
    layernorm_epsilon: NonNegativeNumber = 1e-5
    init_method: Annotated[str, choice(_INITS)] = "normal"
    output_layer_init_method: Annotated[str, choice(_INITS)] = "scaled_normal"
    init_method_std: NonNegativeNumber = 0.02
    split: Split = (969, 30, 1)
    seed: CountOrZero = 1234
    fsdp: FsdpSettings = FsdpSettings()
    moe_loss_coeff: NonNegativeNumber = 0.1
    lr: NonNegativeNumber = Field(0.001, validation_alias=_optimizer_parameter("lr"))
    betas: Betas = Field((0.9, 0.999), validation_alias=_optimizer_parameter("betas"))
    eps: NonNegativeNumber = Field(1e-8, validation_alias=_optimizer_parameter("eps"))
    min_lr: NonNegativeNumber = 0.0
    weight_decay: NonNegativeNumber = 0.1
    train_iters: Count = REQUIRED
    lr_decay_style: Annotated[str, choice(_DECAYS)] = "linear"
    lr_decay_iters: Count = REQUIRED  # default: train_iters
    warmup: Share = 0.01
    unknown_keys: tuple[str, ...] = ()  # keys of the files that have no effect here

    @classmethod
    def from_settings(cls, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the values of merged settings, with the fields that depend on several keys."""
        values = super().from_settings(settings)
        block(values, "fsdp")
        if not isinstance(values.get("optimizer", {}).get("params", {}), dict):
            raise SettingError("optimizer.params", NOT_A_BLOCK)
        values.setdefault("lr_decay_iters", values.get("train_iters"))
        return {**values, "unknown_keys": _unknown_keys(settings, values)}

    @field_validator("split")
    @classmethod
    def _trains_on_something(cls, split: Split) -> Split:
        if not split[0]:
            raise ValueError("the first share is for training and must not be 0")
        return split

    @model_validator(mode="after")
    def _check_training(self) -> TrainingConfig:
        """Refuse settings that this model or its parallel layers cannot compute."""
        if self.rotary_dims < 2 or self.rotary_dims % 2:
            raise SettingError(
                "rotary_pct",
                f"it rotates {self.rotary_dims} of the {self.head_size} dimensions of a head (hidden_size / "
                "num_attention_heads), and pairs are needed: choose it so that the number is even and at least 2",
            )
        if (self.max_position_embeddings or self.seq_length) < self.seq_length:
            raise SettingError("max_position_embeddings", f"it must be at least seq_length, which is {self.seq_length}")
        if self.model_parallel_size > 1 and self.attention_dropout:
            message = "tensor-parallel ranks would use the same dropout mask for different heads; set it to 0"
            raise SettingError("attention_dropout", message)
        if self.context_parallel_size > 1 and self.attention_dropout:
            raise SettingError("attention_dropout", "ring attention has no dropout; set it to 0")
        if self.sequence_parallel and self.hidden_dropout:
            message = "ranks would use the same dropout mask for different parts of the sequence; set it to 0"
            raise SettingError("hidden_dropout", message)
        return self

    @property
    def train_share(self) -> float:
        """Share of the text that is trained on."""
        return self.split[0] / sum(self.split)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dims(self) -> int:
        """Rotated dimensions of a head."""
        return int(self.head_size * self.rotary_pct)


def load_config(files: Sequence[str], overrides: Mapping[str, Any] | None = None) -> TrainingConfig:
    """Read and check the configuration of a training; arguments and errors as in commtrace's `load_config`."""
    return neox.load_config(files, overrides or {}, TrainingConfig)


def check_fsdp(config: TrainingConfig) -> None:
    """Refuse settings that `--engine fsdp` cannot train. Raise ConfigError with the setting and the fix."""
    ranks, length = config.model_parallel_size, config.seq_length
    if config.context_parallel_size > 1:
        raise ConfigError("ring attention is not available with --engine fsdp; set context_parallel_size to 1")
    if config.sequence_parallel:
        raise ConfigError("sequence_parallel is Megatron's; with --engine fsdp use fsdp.sequence_parallel instead")
    if config.fsdp.sequence_parallel and length % ranks:
        raise ConfigError(
            f"fsdp.sequence_parallel: model_parallel_size, which is {ranks}, must divide seq_length, which is {length}"
        )


def _unknown_keys(settings: Mapping[str, Setting], values: Mapping[str, Any]) -> tuple[str, ...]:
    known = {*FIXED_SETTINGS, *DEEPSPEED_KEYS, *_OTHER_KEYS}
    for name, field in TrainingConfig.model_fields.items():
        alias = field.validation_alias
        if isinstance(alias, AliasChoices):
            # If the new name is set, the old one has no effect.
            new, old = (str(choice) for choice in alias.choices)
            known |= {new} if new in values else {new, old}
        else:
            known.add(str(alias.path[0]) if isinstance(alias, AliasPath) else alias or name)
    return tuple(sorted({*settings} - known))
