"""Configuration of GPT-NeoX's own program, which trains with DeepSpeed: `NeoxConfig` with further keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from commtrace.theory.model_shapes import NORMS
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX

from .config import GPT2_VOCAB, NeoxConfig
from .field_types import Boolean, Count, CountOrZero, NonNegativeNumber, OptionalCount, choice, raise_first_failed

VOCABULARIES: Final = {
    "gpt2bpetokenizer": GPT2_VOCAB, "hfgpt2tokenizer": GPT2_VOCAB, "charleveltokenizer": 512, "hftokenizer": 50277,
}  # fmt: skip
"""Numbers of ids of GPT-NeoX's tokenizers. HFTokenizer's depends on its file: 50,277 with 20B_tokenizer.json, which
GPT-NeoX-20B and Pythia use."""

_WITHOUT_RULES: Final[dict[str, tuple[Any, str]]] = {
    **dict.fromkeys(
        ("te_mha", "te_layernorm_mlp", "te_columnparallel", "te_rowparallel"),
        (False, "layers of Transformer Engine have no rules yet"),
    ),
    "moe_num_experts": (1, "GPT-NeoX's mixtures of experts (MegaBlocks) have no rules yet"),
    "train_impl": ("normal", "training of this kind has no rules yet"),
    "gpt_j_tied": (False, "norms that attention and MLP share have no rules yet"),
    "use_qk_layernorm": (False, "norms of queries and keys have no rules yet"),
    "soft_prompt_tuning": (None, "soft prompts have no rules yet"),
}
"""Keys, each with the only value that has rules, and why others are refused."""

_POSITIONS: Final = {name: name for name in ("learned", "rotary", "sinusoidal", "alibi", "none")}


class ProgramConfig(NeoxConfig):
    """A checked configuration of GPT-NeoX's own program."""

    pipe_parallel_size: CountOrZero = 0
    """0: DeepSpeed's plain engine; 1 or more: its pipeline engine with that many stages."""
    vocab: str = Field("GPT2BPETokenizer", validation_alias="tokenizer_type")
    """Name of the tokenizer."""
    norm: Annotated[str, choice({name: name for name in NORMS})] = "layernorm"
    pos_emb: Annotated[str, choice(_POSITIONS)] = "learned"
    max_position_embeddings: OptionalCount = None
    activation: str = "gelu"
    attention_config: list[Any] = Field([[["global"], "all"]])
    num_kv_heads: OptionalCount = None
    intermediate_size: OptionalCount = None
    expansion_factor: NonNegativeNumber | None = None
    mlp_multiple_of: Count = 1
    use_bias_in_attn_linear: Boolean = True
    use_bias_in_mlp: Boolean = True
    partition_activations: Boolean = False
    fp16_lm_cross_entropy: Boolean = False
    weight_decay: NonNegativeNumber = 0.1
    train_iters: OptionalCount = None
    eval_interval: CountOrZero = 1000
    eval_iters: CountOrZero = 100

    @classmethod
    def refuse_other_models(cls, values: Mapping[str, Any]) -> None:
        """Raise SettingError for settings without rules."""
        raise_first_failed(*(
            (values.get(key, allowed) != allowed, key, reason) for key, (allowed, reason) in _WITHOUT_RULES.items()
        ))  # fmt: skip
        kinds = {name for names, _ in values.get("attention_config") or () for name in names} - {"global", "flash"}
        raise_first_failed(*(
            (True, "attention_config", f"layers of the kind {kind} have no rules yet") for kind in sorted(kinds)
        ))  # fmt: skip

    @model_validator(mode="after")
    def _check_program(self) -> ProgramConfig:
        raise_first_failed(
            (self.vocabulary is None and self.vocab.lower() not in VOCABULARIES, "tokenizer_type",
             "its file determines the number of ids; set it with --vocabulary"),
            (self.zero_stage > 1 and self.pipe_parallel_size, "zero_optimization",
             "GPT-NeoX itself refuses ZeRO-2 and ZeRO-3 with its pipeline engine (pipe_parallel_size of 1 or more)"),
            (self.zero_stage > 1 and self.model_parallel_size > 1, "zero_optimization",
             "GPT-NeoX itself refuses ZeRO-2 and ZeRO-3 with tensor parallelism (model_parallel_size of 2 or more)"),
            (self.precision == "fp16" and not self.zero_stage, "fp16",
             f"without ZeRO, GPT-NeoX {GPT_NEOX[1]} fails in fp16 with DeepSpeed {DEEPSPEED[1]} (cur_scale)"),
        )  # fmt: skip
        return self

    @property
    def attention_kinds(self) -> list[str]:
        """Kind of each layer's attention: "global" or "flash"."""
        groups = [(names, self.num_layers // len(names) if n == "all" else n) for names, n in self.attention_config]
        return [kind for names, count in groups for kind in [*names] * count]

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer, before padding."""
        return self.vocabulary or VOCABULARIES[self.vocab.lower()]
