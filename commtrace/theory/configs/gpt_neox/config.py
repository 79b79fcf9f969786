"""One training as GPT-NeoX's files describe it: typed, checked and complete before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commtrace.errors import ConfigError

from . import parse
from .fsdp_settings import FsdpSettings
from .yaml_files import COMMAND_LINE, Reader, Setting, find_file, merge, read_file

GPT2_VOCAB = 50257
BYTE_VOCAB = 256


@dataclass(frozen=True)
class NeoxConfig:
    """A checked training description. Names are GPT-NeoX's where GPT-NeoX has one; defaults are GPT-NeoX's.

    ``origins`` says for each key that was set where it was set, for messages.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    rotary_pct: float
    rotary_emb_base: float
    layernorm_epsilon: float
    hidden_dropout: float
    attention_dropout: float
    gpt_j_residual: bool
    no_weight_tying: bool
    init_method: str
    output_layer_init_method: str
    init_method_std: float
    checkpoint_activations: bool
    checkpoint_num_layers: int
    checkpoint_reentrant: bool
    vocab: str
    make_vocab_size_divisible_by: int
    model_parallel_size: int
    pipe_parallel_size: int
    pipe_partition_method: str
    sequence_parallel: bool
    sequence_parallel_size: int
    context_parallel_size: int
    fp32_allreduce: bool
    fsdp: FsdpSettings
    moe_num_experts: int
    moe_expert_interval: int
    moe_expert_parallel_size: int
    moe_top_k: int
    moe_train_capacity_factor: float
    moe_min_capacity: int
    moe_token_dropping: bool
    moe_loss_coeff: float
    train_share: float
    seed: int
    precision: str
    precision_block: Mapping[str, Any]
    zero_optimization: Mapping[str, Any]
    lr: float
    min_lr: float
    betas: tuple[float, ...]
    eps: float
    weight_decay: float
    gradient_clipping: float
    lr_decay_style: str
    lr_decay_iters: int
    warmup: float
    micro_batch: int | None
    gradient_accumulation: int | None
    train_batch_size: int | None
    train_iters: int
    deepspeed_keys: Mapping[str, Any]
    unknown_keys: tuple[str, ...]
    origins: Mapping[str, str]

    @property
    def vocab_size(self) -> int:
        """Token ids that the tokenizer can produce, before padding."""
        return BYTE_VOCAB if self.vocab == "bytes" else GPT2_VOCAB

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: padded as GPT-NeoX does it, so that tensor-parallel ranks would get equal shares."""
        multiple = self.make_vocab_size_divisible_by * self.model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def rotary_dims(self) -> int:
        """How many of a head's dimensions are rotated."""
        return int(self.head_size * self.rotary_pct)

    @property
    def zero_stage(self) -> int:
        """ZeRO's stage, 0 to 3."""
        return int(self.zero_optimization.get("stage", 0))

    @property
    def shared(self) -> dict[str, int]:
        """Ranks that share a model, sequences or experts, by the dimension's name."""
        return {
            "tensor": self.model_parallel_size,
            "sequence": self.sequence_parallel_size,
            "context": self.context_parallel_size,
            "experts": self.moe_expert_parallel_size if self.moe_num_experts > 1 else 0,
        }

    @property
    def ranks_of_a_sample(self) -> int:
        """Ranks that work on the same samples: they share the model, or the sequences."""
        return self.model_parallel_size * self.sequence_parallel_size * self.context_parallel_size

    def data_parallel(self, world_size: int) -> int:
        """Ranks that get samples of their own: what is left of so many by those that share a model or a sequence."""
        model = self.pipe_parallel_size * self.model_parallel_size
        if self.pipe_parallel_size > 1 and world_size % model:
            raise ConfigError(
                f"{self.origins.get('pipe_parallel_size', 'no file')}: pipe_parallel_size: {self.pipe_parallel_size}, "
                f"times model_parallel_size {self.model_parallel_size}, does not divide the {world_size} ranks of this "
                "job; start a multiple of it, or change it"
            )
        shared = ("model_parallel_size", "sequence_parallel_size", "context_parallel_size")
        for key in (*shared, "moe_expert_parallel_size"):
            size = getattr(self, key)
            if world_size % size:
                raise ConfigError(
                    f"{self.origins.get(key, 'no file')}: {key}: {size} does not divide the {world_size} ranks of "
                    "this job; start a multiple of it, or change it"
                )
        return world_size // (self.pipe_parallel_size * self.ranks_of_a_sample)

    def batch_shape(self, data_parallel: int) -> tuple[int, int]:
        """(micro-batch, gradient accumulation steps) for that many data-parallel ranks.

        As in DeepSpeed any two of total batch, micro-batch and accumulation give the third.
        """
        micro, steps, total = self.micro_batch, self.gradient_accumulation, self.train_batch_size
        if total is None:
            return micro or 1, steps or 1
        if micro is None:
            micro = total // (data_parallel * (steps or 1))
        if steps is None:
            steps = total // (data_parallel * max(micro, 1))
        if micro * steps * data_parallel != total or total == 0:
            raise ConfigError(
                f"{self.origins['train_batch_size']}: train_batch_size: {total} is not train_micro_batch_size_per_gpu "
                f"({micro}) * gradient_accumulation_steps ({steps}) * data-parallel ranks ({data_parallel}); change "
                "one of them, or leave train_batch_size out"
            )
        return micro, steps


def load_config(files: Sequence[str], overrides: Mapping[str, Any] | None = None) -> NeoxConfig:
    """Read GPT-NeoX files (later ones win, and ``overrides`` win over all) and check them.

    ``overrides`` has GPT-NeoX's keys with underscores; values of None are left out. Raises :class:`ConfigError`.
    """
    layers = [read_file(find_file(name)) for name in files]
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    layers.append({key: Setting(value, COMMAND_LINE) for key, value in given.items()})
    return config_from(Reader(merge(layers)))


def config_from(reader: Reader) -> NeoxConfig:
    """The checked configuration of merged settings."""
    parse.refuse_what_is_not_built(reader)
    fields = {
        **parse.model_fields(reader),
        **parse.data_fields(reader),
        **parse.precision_fields(reader),
        **parse.optimizer_fields(reader),
        **parse.batch_fields(reader),
        "zero_optimization": parse.zero_block(reader),
        "deepspeed_keys": parse.deepspeed_keys(reader),
    }
    parse.check_pipeline(
        reader, fields["pipe_parallel_size"], fields["num_layers"], fields["zero_optimization"]["stage"]
    )
    # Last, because only now every key that means something has been asked for.
    return NeoxConfig(**fields, unknown_keys=tuple(reader.unknown()), origins=reader.origins())
