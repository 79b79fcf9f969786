"""From a file's keys to the checked fields of :class:`NeoxConfig`, one function per group of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fsdp_settings import fsdp_settings
from .yaml_files import Reader

_INITS = {name: name for name in ("normal", "scaled_normal", "small_init", "wang_init")}
_DECAYS = {name: name for name in ("constant", "linear", "cosine", "exponential")}
_PRECISIONS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "float32": "fp32", "bfloat16": "bf16"}
_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "cpu_torch_adam": "adam"}

# GPT-NeoX's tokenizers need their vocabulary files; here they choose the size of the vocabulary, which is what the
# communication depends on. GPT-2's size is the default, as in GPT-NeoX.
_VOCABS = {"gpt2bpetokenizer": "words", "chartokenizer": "bytes", "charleveltokenizer": "bytes"}
_VOCABS |= {"words": "words", "bytes": "bytes", "hftokenizer": "words", "hfgpt2tokenizer": "words"}

# GPT-NeoX switches that make another model or another communication pattern, with the values that stand for the one
# built here. The first value is GPT-NeoX's default. Anything else is refused: training something else silently, and
# drawing conclusions from its communication, would be worse than not training.
_FIXED: dict[str, tuple[Any, ...]] = {
    "pos_emb": ("learned", "rotary"),  # the default is refused below, with its own advice
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

# Keys whose meaning is DeepSpeed's own: they are handed on as they are.
_DEEPSPEED_KEYS = (
    "communication_data_type",
    "data_types",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "comms_logger",
    "flops_profiler",
    "steps_per_print",
    "wall_clock_breakdown",
)


def model_fields(reader: Reader) -> dict[str, Any]:
    """The model's shape."""
    fields = {
        "num_layers": reader.integer("num_layers"),
        "hidden_size": reader.integer("hidden_size"),
        "num_attention_heads": reader.integer("num_attention_heads"),
        "seq_length": reader.integer("seq_length"),
        "rotary_pct": reader.number("rotary_pct", 1.0, high=1.0),
        "rotary_emb_base": reader.number("rotary_emb_base", 10000, low=1.0),
        "layernorm_epsilon": reader.number("layernorm_epsilon", 1e-5),
        "hidden_dropout": reader.number("hidden_dropout", 0.0, high=0.999),
        "attention_dropout": reader.number("attention_dropout", 0.0, high=0.999),
        "gpt_j_residual": reader.flag("gpt_j_residual", False),
        "no_weight_tying": reader.flag("no_weight_tying", False),
        "init_method": reader.choice("init_method", "normal", _INITS),
        "output_layer_init_method": reader.choice("output_layer_init_method", "scaled_normal", _INITS),
        "init_method_std": reader.number("init_method_std", 0.02),
        "checkpoint_activations": reader.flag("checkpoint_activations", False),
        "checkpoint_num_layers": reader.integer("checkpoint_num_layers", 1),
        # Not a key of GPT-NeoX: GPT-NeoX always checkpoints reentrantly (DeepSpeed's function), hence the default.
        "checkpoint_reentrant": reader.flag("checkpoint_reentrant", True),
    }
    _check_shape(reader, fields)
    return fields


def _check_shape(reader: Reader, fields: Mapping[str, Any]) -> None:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden % heads:
        raise reader.error("hidden_size", f"it must be a multiple of num_attention_heads, which is {heads}")
    rotary = int(hidden // heads * fields["rotary_pct"])
    if rotary < 2 or rotary % 2:
        raise reader.error(
            "rotary_pct",
            f"it rotates {rotary} of the {hidden // heads} dimensions of a head (hidden_size / num_attention_heads), "
            "and pairs are needed: choose it so that the number is even and at least 2",
        )
    shared = reader.integer("model_parallel_size", 1)
    if heads % shared:
        raise reader.error("model_parallel_size", f"it must divide num_attention_heads, which is {heads}")
    if shared > 1 and fields["attention_dropout"]:
        raise reader.error(
            "attention_dropout", "tensor-parallel ranks would drop the same of different heads; set it to 0"
        )
    positions = reader.integer("max_position_embeddings", fields["seq_length"])
    if positions < fields["seq_length"]:
        raise reader.error("max_position_embeddings", f"give at least seq_length, which is {fields['seq_length']}")


def refuse_what_is_not_built(reader: Reader) -> None:
    """Raise for switches that ask for another model or another kind of parallelism."""
    for key, allowed in _FIXED.items():
        if reader.raw(key, allowed[0]) not in allowed:
            instead = "leave the key out" if allowed[-1] is None else f"set it to {allowed[-1]!r}"
            raise reader.error(key, f"this trainer does not build that; {instead}")
    if reader.raw("pos_emb", "learned") != "rotary":
        raise reader.error("pos_emb", "this trainer builds rotary positions only; set pos_emb to rotary")
    attention = reader.raw("attention_config")
    if attention is not None and any(word not in ("global", "flash") for word in _words(attention)):
        raise reader.error("attention_config", 'this trainer builds full causal attention: "global" or "flash"')


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [word for part in value for word in _words(part)] if isinstance(value, list) else []


def data_fields(reader: Reader) -> dict[str, Any]:
    """Text, vocabulary and seed."""
    split = reader.numbers("split", (969, 30, 1), 3)
    if split[0] == 0:
        raise reader.error("split", "the first share is the training's and must not be 0")
    return {
        "vocab": reader.choice("tokenizer_type", "GPT2BPETokenizer", _VOCABS),
        "make_vocab_size_divisible_by": reader.integer("make_vocab_size_divisible_by", 128),
        "model_parallel_size": reader.integer("model_parallel_size", 1),
        # GPT-NeoX takes 0 for DeepSpeed's plain engine and 1 for its pipeline engine with a single stage. No
        # activations travel in either, and its files say 1 whatever the ZeRO stage; here both mean the plain one, which
        # takes any.
        "pipe_parallel_size": max(1, reader.integer("pipe_parallel_size", 0, low=0)),
        "pipe_partition_method": _partition_method(reader),
        "sequence_parallel": _sequence_parallel(reader),
        **_shared_sequences(reader),
        **_experts(reader),
        "fp32_allreduce": reader.flag("fp32_allreduce", False),
        "fsdp": fsdp_settings(reader),
        "train_share": split[0] / sum(split),
        "seed": reader.integer("seed", 1234, low=0),
    }


def _partition_method(reader: Reader) -> str:
    method = str(reader.raw("pipe_partition_method", "type:transformer|mlp"))
    if method not in ("uniform", "parameters") and not method.startswith("type:"):
        raise reader.error("pipe_partition_method", "DeepSpeed knows uniform, parameters and type:REGULAR-EXPRESSION")
    return method


def check_pipeline(reader: Reader, stages: int, layers: int, zero_stage: int) -> None:
    """Raise for what DeepSpeed's pipeline cannot do."""
    if stages > max(1, layers):
        raise reader.error("pipe_parallel_size", f"a stage has a layer at least, and num_layers is {layers}")
    shared = ("sequence_parallel", "sequence_parallel_size", "context_parallel_size", "moe_num_experts", "num_experts")
    for key in shared:
        if stages > 1 and int(reader.raw(key, 0)) > (key != "sequence_parallel"):
            raise reader.error(key, "this trainer does not build it together with pipe_parallel_size; leave one out")
    if stages > 1 and zero_stage > 1:
        key = "zero_optimization" if reader.raw("zero_stage") is None else "zero_stage"
        raise reader.error(
            key, "DeepSpeed's pipeline goes with ZeRO-0 and ZeRO-1 alone; take one of them, or pipe_parallel_size 1"
        )


def _sequence_parallel(reader: Reader) -> bool:
    """Megatron's, among tensor-parallel ranks; among fewer than two there is nothing to share."""
    wanted, shared = reader.flag("sequence_parallel", False), reader.integer("model_parallel_size", 1)
    if wanted and shared > 1:
        length = reader.integer("seq_length")
        if length % shared:
            raise reader.error(
                "sequence_parallel",
                f"model_parallel_size, which is {shared}, must divide seq_length, which is {length}",
            )
        if reader.number("hidden_dropout", 0.0):
            raise reader.error(
                "hidden_dropout", "ranks would drop the same of different parts of the sequence; set it to 0"
            )
    return wanted and shared > 1


def _shared_sequences(reader: Reader) -> dict[str, int]:
    """Ranks that share sequences: as Ulysses (DeepSpeed's key), or in a ring (GPT-NeoX's, where 0 means 1)."""
    sizes = {key: max(reader.integer(key, 1, low=0), 1) for key in ("sequence_parallel_size", "context_parallel_size")}
    wanted = [key for key, size in sizes.items() if size > 1]
    others = [*wanted, *(["model_parallel_size"] if reader.integer("model_parallel_size", 1) > 1 else [])]
    if wanted and len(others) > 1:
        raise reader.error(wanted[0], f"this trainer does not build it together with {others[1]}; set one of them to 1")
    length, heads = reader.integer("seq_length"), reader.integer("num_attention_heads")
    for key in wanted:
        if length % sizes[key]:
            raise reader.error(key, f"it must divide seq_length, which is {length}")
    if heads % sizes["sequence_parallel_size"]:
        raise reader.error("sequence_parallel_size", f"it must divide num_attention_heads, which is {heads}")
    if sizes["context_parallel_size"] > 1 and reader.number("attention_dropout", 0.0):
        raise reader.error("attention_dropout", "attention in a ring drops nothing; set it to 0")
    return sizes


def _experts(reader: Reader) -> dict[str, Any]:
    """Mixtures of experts; GPT-NeoX before its second version called some of these keys otherwise."""
    count = "num_experts" if reader.raw("moe_num_experts") is None else "moe_num_experts"
    interval = "expert_interval" if reader.raw("moe_expert_interval") is None else "moe_expert_interval"
    fields = {
        "moe_num_experts": max(reader.integer(count, 1, low=0), 1),
        "moe_expert_interval": reader.integer(interval, 1),
        "moe_expert_parallel_size": reader.integer("moe_expert_parallel_size", 1),
        "moe_top_k": reader.integer("moe_top_k", 1),
        "moe_train_capacity_factor": reader.number("moe_train_capacity_factor", 1.0),
        "moe_min_capacity": reader.integer("moe_min_capacity", 4, low=0),
        # GPT-NeoX's default is not to drop any; then how much travels depends on the data.
        "moe_token_dropping": reader.flag("moe_token_dropping", False),
        "moe_loss_coeff": reader.number("moe_loss_coeff", 0.1),
    }
    experts, ranks = fields["moe_num_experts"], fields["moe_expert_parallel_size"]
    if experts % ranks:
        raise reader.error("moe_expert_parallel_size", f"it must divide {count}, which is {experts}")
    if fields["moe_top_k"] > experts:
        raise reader.error("moe_top_k", f"there are no more experts than {count} says, which is {experts}")
    for key in ("model_parallel_size", "sequence_parallel_size", "context_parallel_size"):
        if experts > 1 and reader.integer(key, 1, low=0) > 1:
            raise reader.error(key, "this trainer does not build it together with experts; set it to 1")
    return fields


def precision_fields(reader: Reader) -> dict[str, Any]:
    """fp32, fp16 or bf16, and the block with its loss scaling.

    A ``precision`` key (or the command line's) wins over the blocks, whose loss scaling stays in force.
    """
    blocks = {"fp16": reader.block("fp16"), "bf16": reader.block("bf16"), "fp32": {}}
    enabled = [name for name, block in blocks.items() if block.get("enabled")]
    if len(enabled) == 2 and reader.raw("precision") is None:
        raise reader.error("bf16", "fp16 is enabled too; enable one of them, or say which with precision")
    precision = reader.choice("precision", enabled[0] if enabled else "fp32", _PRECISIONS)
    # "fp16" and "type" inside the block are GPT-NeoX's own; DeepSpeed refuses keys that it does not know.
    block = {key: value for key, value in blocks[precision].items() if key not in ("enabled", "fp16", "type")}
    return {"precision": precision, "precision_block": block}


def optimizer_fields(reader: Reader) -> dict[str, Any]:
    """Adam and its learning rate's schedule."""
    reader.inside("optimizer").choice("type", "Adam", _OPTIMIZERS)
    params = reader.inside("optimizer").inside("params")
    return {
        "lr": params.number("lr", 0.001),
        "betas": params.numbers("betas", (0.9, 0.999), 2),
        "eps": params.number("eps", 1e-8),
        "min_lr": reader.number("min_lr", 0.0),
        "weight_decay": reader.number("weight_decay", 0.1),
        "gradient_clipping": reader.number("gradient_clipping", 1.0),
        "lr_decay_style": reader.choice("lr_decay_style", "linear", _DECAYS),
        "lr_decay_iters": reader.integer("lr_decay_iters", reader.integer("train_iters")),
        "warmup": reader.number("warmup", 0.01, high=1.0),
    }


def batch_fields(reader: Reader) -> dict[str, Any]:
    """Batch sizes, of which any two give the third, and the number of steps."""
    accumulation = "gas" if reader.raw("gradient_accumulation_steps") is None else "gradient_accumulation_steps"
    return {
        "micro_batch": _optional_integer(reader, "train_micro_batch_size_per_gpu"),
        "gradient_accumulation": _optional_integer(reader, accumulation),
        "train_batch_size": _optional_integer(reader, "train_batch_size"),
        "train_iters": reader.integer("train_iters"),
    }


def _optional_integer(reader: Reader, key: str) -> int | None:
    return None if reader.raw(key) is None else reader.integer(key)


def zero_block(reader: Reader) -> dict[str, Any]:
    """ZeRO's block. Only the stage is read here; DeepSpeed checks the rest, which is its own."""
    block = reader.block("zero_optimization")
    stage = reader.raw("zero_stage", block.get("stage", 0))
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        key = "zero_optimization" if reader.raw("zero_stage") is None else "zero_stage"
        raise reader.error(key, "ZeRO's stage is 0, 1, 2 or 3")
    return {**block, "stage": stage}


def deepspeed_keys(reader: Reader) -> dict[str, Any]:
    """Keys whose meaning is DeepSpeed's: handed on as they are."""
    found = {key: reader.raw(key) for key in _DEEPSPEED_KEYS if reader.raw(key) is not None}
    if reader.flag("fp32_allreduce", False):
        found["communication_data_type"] = "fp32"
    return {**found, **reader.block("deepspeed_extra_args")}
