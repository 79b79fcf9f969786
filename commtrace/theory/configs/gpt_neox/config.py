"""GPT-NeoX's configuration: the keys that determine what is communicated, read from files and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from commtrace.errors import ConfigError
from commtrace.theory.configs.rank_layout import complete_batch_sizes

from . import setting_checks
from .field_types import (
    REQUIRED,
    Boolean,
    Count,
    CountOrZero,
    Dropout,
    NonNegativeNumber,
    OptionalCount,
    ParallelSize,
    choice,
    config_error,
    raise_first_failed,
)
from .yaml_files import COMMAND_LINE, Setting, find_file, merge, read_file

GPT2_VOCAB: Final = 50257
BYTE_VOCAB: Final = 256

_OPTIMIZERS: Final = {"adam": "adam", "adamw": "adam", "cpu_torch_adam": "adam"}

# GPT-NeoX's tokenizers need their vocabulary files. Here they only determine the size of the vocabulary, on which
# communication depends. GPT-2's size is the default, as in GPT-NeoX.
_VOCABS: Final = {
    "gpt2bpetokenizer": "words", "chartokenizer": "bytes", "charleveltokenizer": "bytes",
    "words": "words", "bytes": "bytes", "hftokenizer": "words", "hfgpt2tokenizer": "words",
}  # fmt: skip

_SHARING_KEYS: Final = ("model_parallel_size", "sequence_parallel_size", "context_parallel_size")
"""Keys of the parallel dimensions in which ranks share the model or sequences, and so work on the same samples."""

_SEQUENCE_SIZES: Final = ("sequence_parallel_size", "context_parallel_size")

Config = TypeVar("Config", bound="NeoxConfig")


def _partition_method(value: Any) -> str:
    method = str(value)
    if method not in ("uniform", "parameters") and not method.startswith("type:"):
        raise ValueError("DeepSpeed accepts uniform, parameters and type:REGULAR-EXPRESSION")
    return method


class NeoxConfig(BaseModel):
    """A checked configuration. Names and defaults are those of GPT-NeoX, unless a field says otherwise."""

    model_config = ConfigDict(frozen=True)

    num_layers: Count = REQUIRED
    hidden_size: Count = REQUIRED
    num_attention_heads: Count = REQUIRED
    seq_length: Count = REQUIRED
    hidden_dropout: Dropout = 0.0
    attention_dropout: Dropout = 0.0
    gpt_j_residual: Boolean = False
    no_weight_tying: Boolean = False
    checkpoint_activations: Boolean = False
    checkpoint_num_layers: Count = 1
    checkpoint_reentrant: Boolean = True
    """Not a key of GPT-NeoX, which always checkpoints reentrantly (DeepSpeed's function); hence the default."""
    vocab: Annotated[str, choice(_VOCABS)] = Field("words", validation_alias="tokenizer_type")
    vocabulary: OptionalCount = None
    """Not a key of GPT-NeoX: the tokenizer's number of ids, which replaces the one that follows from its name."""
    make_vocab_size_divisible_by: Count = 128

    model_parallel_size: Count = 1
    pipe_parallel_size: ParallelSize = 1
    """GPT-NeoX takes 0 for DeepSpeed's plain engine and 1 for its pipeline engine with a single stage. Neither sends
    activations, and GPT-NeoX's files have 1 with every ZeRO stage; here both mean the plain engine."""
    pipe_partition_method: Annotated[str, BeforeValidator(_partition_method)] = "type:transformer|mlp"
    sequence_parallel: Boolean = False  # Megatron's, among tensor-parallel ranks: False if there is only one
    sequence_parallel_size: ParallelSize = 1
    context_parallel_size: ParallelSize = 1
    fp32_allreduce: Boolean = False

    # The second names are those of GPT-NeoX before version 2.
    moe_num_experts: ParallelSize = Field(1, validation_alias=AliasChoices("moe_num_experts", "num_experts"))
    moe_expert_interval: Count = Field(1, validation_alias=AliasChoices("moe_expert_interval", "expert_interval"))
    moe_expert_parallel_size: Count = 1
    moe_top_k: Count = 1
    moe_train_capacity_factor: NonNegativeNumber = 1.0
    moe_min_capacity: CountOrZero = 4
    moe_token_dropping: Boolean = False  # without it, payloads depend on the data

    optimizer_type: Annotated[str, choice(_OPTIMIZERS)] = Field("adam", validation_alias=AliasPath("optimizer", "type"))
    gradient_clipping: NonNegativeNumber = 1.0
    micro_batch: OptionalCount = Field(None, validation_alias="train_micro_batch_size_per_gpu")
    gradient_accumulation: OptionalCount = Field(
        None, validation_alias=AliasChoices("gradient_accumulation_steps", "gas")
    )
    train_batch_size: OptionalCount = None

    precision: Annotated[str, choice(setting_checks.PRECISIONS)] = "fp32"
    precision_block: dict[str, Any] = {}  # the block `fp16` or `bf16`, with its loss scaling
    zero_optimization: dict[str, Any] = {}
    """ZeRO's block. Only the stage is checked here; DeepSpeed checks the rest."""
    deepspeed_keys: dict[str, Any] = {}  # keys that DeepSpeed gets unchanged
    origins: dict[str, str] = {}  # the file that set each key, for messages

    @model_validator(mode="before")
    @classmethod
    def _validate_settings(cls, settings: dict[str, Setting]) -> dict[str, Any]:
        return cls.from_settings(settings)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the values of merged settings, with the fields that several keys determine."""
        values = _without_nulls({key: setting.value for key, setting in settings.items()})
        cls.refuse_other_models(values)
        setting_checks.block(values, "optimizer")
        return {
            **values,
            **setting_checks.precision_keys(values),
            "zero_optimization": setting_checks.zero_block(values),
            "deepspeed_keys": setting_checks.deepspeed_keys(values),
            "origins": {key: settings[key].source for key in values if key in settings},
        }

    @classmethod
    def refuse_other_models(cls, values: Mapping[str, Any]) -> None:
        """Raise SettingError for settings of models without rules."""
        setting_checks.refuse_other_models(values)

    @field_validator("sequence_parallel")
    @classmethod
    def _check_sequence_parallel(cls, enabled: bool, info: ValidationInfo) -> bool:
        if enabled and info.data.get("pipe_parallel_size", 1) > 1:
            raise ValueError("it has no rules yet with several pipeline stages (pipe_parallel_size)")
        return enabled and bool(info.data.get("model_parallel_size", 1) > 1)

    @model_validator(mode="after")
    def _check_combinations(self) -> NeoxConfig:
        """Raise SettingError for the first setting that does not fit the others."""
        heads, length, tensor_ranks = self.num_attention_heads, self.seq_length, self.model_parallel_size
        experts, stages, sequence_ranks = self.moe_num_experts, self.pipe_parallel_size, self.sequence_parallel_size
        experts_key = "moe_num_experts" if "moe_num_experts" in self.origins else "num_experts"
        zero_key = "zero_stage" if "zero_stage" in self.origins else "zero_optimization"
        shared = [key for key in (*_SEQUENCE_SIZES, "model_parallel_size") if getattr(self, key) > 1]
        together = "it is not supported together with"
        raise_first_failed(
            (self.hidden_size % heads, "hidden_size",
             f"it must be a multiple of num_attention_heads, which is {heads}"),
            (heads % tensor_ranks, "model_parallel_size", f"it must divide num_attention_heads, which is {heads}"),
            (self.sequence_parallel and length % tensor_ranks, "sequence_parallel",
             f"model_parallel_size, which is {tensor_ranks}, must divide seq_length, which is {length}"),
            (len(shared) > 1, "".join(shared[:1]), f"{together} {''.join(shared[1:2])}; set one of them to 1"),
            *((length % getattr(self, key), key, f"it must divide seq_length, which is {length}")
              for key in _SEQUENCE_SIZES),
            (heads % sequence_ranks, "sequence_parallel_size", f"it must divide num_attention_heads, which is {heads}"),
            (experts % self.moe_expert_parallel_size, "moe_expert_parallel_size",
             f"it must divide {experts_key}, which is {experts}"),
            (self.moe_top_k > experts, "moe_top_k",
             f"it must not exceed {experts_key}, which is {experts}"),
            *((experts > 1, key, f"{together} experts; set it to 1") for key in shared),
            (stages > self.num_layers, "pipe_parallel_size",
             f"each stage needs at least one layer, and num_layers is {self.num_layers}"),
            *((stages > 1 and getattr(self, key) > 1, shown, f"{together} pipe_parallel_size; leave one out")
              for key, shown in (*((size, size) for size in _SEQUENCE_SIZES), ("moe_num_experts", experts_key))),
            (stages > 1 and self.zero_stage > 1, zero_key,
             "DeepSpeed's pipeline supports ZeRO-0 and ZeRO-1 only; use one of them, or set pipe_parallel_size to 1"),
        )  # fmt: skip
        return self

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer, before padding."""
        return self.vocabulary or (BYTE_VOCAB if self.vocab == "bytes" else GPT2_VOCAB)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, padded as in GPT-NeoX, so that tensor-parallel ranks get equal parts."""
        multiple = self.make_vocab_size_divisible_by * self.model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return max(self.pipe_parallel_size, 1)

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage, 0 to 3."""
        return int(self.zero_optimization.get("stage", 0))

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Numbers of tensor-, sequence-, context- and expert-parallel ranks, by field of `RankLayout`."""
        return {
            "tensor_parallel_size": self.model_parallel_size,
            "sequence_parallel_size": self.sequence_parallel_size,
            "context_parallel_size": self.context_parallel_size,
            "expert_parallel_size": self.moe_expert_parallel_size if self.moe_num_experts > 1 else 0,
        }

    @property
    def ranks_per_sample(self) -> int:
        """Number of ranks that work on the same samples, because they share the model or sequences."""
        return prod(getattr(self, key) for key in _SHARING_KEYS)

    def data_parallel(self, world_size: int) -> int:
        """Return the number of data-parallel ranks, which work on different samples.

        Raises:
            ConfigError: If the parallel sizes do not divide the world size.
        """
        keys = (*_SHARING_KEYS, "moe_expert_parallel_size")
        sizes = {f"{key}: {getattr(self, key)}": getattr(self, key) for key in keys}
        stages, tensor_ranks = self.stages, self.model_parallel_size
        sizes[f"pipe_parallel_size: {stages}, times model_parallel_size {tensor_ranks},"] = stages * tensor_ranks
        for setting, size in sizes.items():
            if world_size % size:
                raise ConfigError(
                    f"{self.origins.get(setting.partition(':')[0], 'no file')}: {setting} does not divide the "
                    f"{world_size} ranks of this job; change it, or the number of ranks"
                )
        return world_size // (self.stages * self.ranks_per_sample)

    def batch_shape(self, data_parallel: int) -> tuple[int, int]:
        """Return `complete_batch_sizes` for a number of data-parallel ranks."""
        source = f"{self.origins.get('train_batch_size', 'no file')}: train_batch_size:"
        sizes = self.micro_batch, self.gradient_accumulation, self.train_batch_size
        return complete_batch_sizes(data_parallel, *sizes, source)


def load_config(files: Sequence[str], overrides: Mapping[str, Any], kind: type[Config]) -> Config:
    """Read and check a configuration.

    Args:
        files: GPT-NeoX YAML files, or names of built-in ones (`13B`). Later ones override earlier ones.
        overrides: GPT-NeoX keys with underscores, which override all files; values of None are left out.
        kind: Class of the configuration.

    Raises:
        ConfigError: For a wrong file, key or value, with the file, the key, the value and what is wrong.
    """
    layers = [read_file(find_file(name)) for name in files]
    layers.append({key: Setting(value, COMMAND_LINE) for key, value in overrides.items() if value is not None})
    settings = merge(layers)
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise config_error(error, settings) from error


def _without_nulls(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block without keys whose value is `null`, which counts as not set."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in block.items()
        if value is not None
    }


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
