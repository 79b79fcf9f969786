"""Row of the `job` table for a model under DeepSpeed's engine, from a configuration.

The hooks capture the same row when a job is set up: the model's lists (`model_shapes.model_lists`) and the settings.
Settings that the configuration leaves out have DeepSpeed's defaults, in the version `registry.DEEPSPEED`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from math import ceil
from typing import Any, Final

from commtrace.job_facts import MISSING
from commtrace.job_row import JobRow, ZeroSettings
from commtrace.theory.job import NotPredictedError, refuse
from commtrace.theory.model_shapes import ModelLists, ModuleSpec, model_lists
from commtrace.theory.rules.gradients import buckets_reaching_limit, buckets_within_limit
from commtrace.theory.rules.registry import DEEPSPEED, rule

from .rank_layout import ELEMENT_TYPES, RankLayout


def deepspeed_row(model: ModuleSpec, config: Mapping[str, Any], layout: RankLayout, *, groups: int = 2) -> JobRow:
    """Return the row of a model under DeepSpeed's engine.

    Args:
        model: The model.
        config: DeepSpeed's JSON, without "auto".
        layout: Ranks and batch sizes.
        groups: Parameter groups of the optimizer; 2: biases and norms form a second one, without weight decay.

    Raises:
        NotPredictedError: If a setting has no rules.
    """
    precision = precision_of(config)
    zero = zero_settings(_block(config, "zero_optimization"))
    lists = model_lists(model, ELEMENT_TYPES[precision])
    decay_groups = [lists.decaying, lists.plain] if groups == 2 else [[*range(len(lists.parameters))]]
    optimizer_groups = split_expert_groups(lists, decay_groups)
    stage: int = zero["stage"]
    data_parallel_size = layout.data_parallel_size * layout.context_parallel_size
    return JobRow(
        source="deepspeed",
        engine="DeepSpeedEngine",
        zero_stage=stage,
        zero=ZeroSettings.read(zero),
        world_size=layout.world_size,
        data_parallel_size=data_parallel_size,
        sequence_parallel_size=layout.sequence_parallel_size,
        sequence_data_parallel_size=layout.reducing,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_stages=1,
        micro_batch_size=layout.micro_batch_size,
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
        train_batch_size=layout.micro_batch_size * layout.gradient_accumulation_steps * data_parallel_size,
        precision=precision,
        communication_data_type=communication_type(config, precision, layout.sequence_parallel_size),
        gradient_clipping=float(config.get("gradient_clipping") or 0.0),
        optimizer=optimizer_wrapper(config, precision, stage),
        basic_optimizer=basic_optimizer(config),
        optimizer_groups=[
            part for group in optimizer_groups if group for part in sub_groups(lists, group, zero, layout.reducing)
        ],
        check_grad_overflow=checks_overflow(config, precision) if stage in (1, 2) else MISSING,
        norm_dtype="float64",
        moe=any(parameter.expert for parameter in lists.parameters),
        expert_parallel_sizes=[layout.expert_parallel_size] if layout.expert_parallel_size else [],
        parameters=lists.parameters,
        buffers=lists.buffers,
        modules=lists.modules if stage == 3 else MISSING,
    )


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the precision that is enabled, else "fp32"."""
    blocks = {"fp16": ("fp16",), "bf16": ("bf16", "bfloat16")}
    enabled = [name for name, keys in blocks.items() if any(_block(config, key).get("enabled") for key in keys)]
    if len(enabled) > 1:
        raise NotPredictedError("fp16 and bf16 are both enabled")
    return enabled[0] if enabled else "fp32"


def _block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise NotPredictedError(f"{key} is not a block of keys and values: {value!r:.60}")
    return value


_ZERO_DEFAULTS: Final[dict[str, Any]] = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "use_multi_rank_bucket_allreduce": True,
    "overlap_comm": None,
    "compute_grad_norm": True,
    "sub_group_size": 1_000_000_000,
    "prefetch_bucket_size": 50_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": sys.maxsize,
    "max_live_parameters": 1_000_000_000,
    "max_reuse_distance": 1_000_000_000,
    "module_granularity_threshold": 0,
    "zero_hpz_partition_size": 1,
    "memory_efficient_linear": True,
    "allgather_sequential": False,
    "round_robin_gradients": False,
    "parameter_alignment": False,
    "use_all_reduce_for_fetch_params": False,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "enable_sanity_checks": False,
}


@rule("deepspeed.runtime.zero.config.DeepSpeedZeroConfig; "
      "deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer (allgather_sequential)",
      DEEPSPEED)  # fmt: skip
def zero_settings(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return all ZeRO settings, without the prefix "stage3_". Those that the block leaves out have defaults."""
    given = {key.removeprefix("stage3_"): value for key, value in block.items()}
    settings = {
        name: _like_default(name, given.get(name, default), default) for name, default in _ZERO_DEFAULTS.items()
    }
    stage = settings["stage"]
    refuse(
        (stage not in range(4), f"zero_optimization.stage is {stage}; ZeRO's stages are 0 to 3"),
        *((name in given, f"zero_optimization.{name}: MiCS was removed from DeepSpeed; {DEEPSPEED[1]} rejects it")
          for name in ("mics_shard_size", "mics_hierarchical_params_gather")),
        *((given.get(name) not in (None, {}, -1), f"zero_optimization.{name} has no rules yet")
          for name in ("offload_param", "offload_optimizer", "zenflow")),
        (settings["module_granularity_threshold"],
         "zero_optimization.stage3_module_granularity_threshold has no rules yet"),
    )  # fmt: skip
    if settings["overlap_comm"] is None:
        settings["overlap_comm"] = stage == 3
    if settings["allgather_sequential"] and stage == 3:
        settings["prefetch_bucket_size"] = 1  # as the engine does
    return settings


def _like_default(name: str, value: Any, default: Any) -> Any:
    """Return the value in the type of the default; 5e8 counts as a whole number."""
    kind = type(default)
    if kind is int and isinstance(value, float) and value == int(value):
        return int(value)
    if default is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        expected = "a whole number" if kind is int else "true or false"
        raise NotPredictedError(f"zero_optimization.{name} is {value!r}; give {expected}")
    return value


@rule("deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups", DEEPSPEED)
def sub_groups(lists: ModelLists, group: Sequence[int], zero: Mapping[str, Any], ranks: int) -> list[list[int]]:
    """Return the sub-groups of an optimizer group, which ZeRO-3 splits where a rank's parts reach sub_group_size."""
    if int(zero["stage"]) < 3:
        return [[*group]]
    numbers, elements = iter(group), (ceil(_elements(lists, number) / ranks) for number in group)
    buckets = buckets_reaching_limit(elements, [int(zero["sub_group_size"])])
    return [[*islice(numbers, len(bucket))] for bucket in buckets]


def _elements(lists: ModelLists, number: int) -> int:
    return lists.parameters[number].elements


_EXPERT_ELEMENTS: Final = 178_956_971  # max_group_size: not a setting of GPT-NeoX


@rule("deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer", DEEPSPEED)
def split_expert_groups(lists: ModelLists, groups: Sequence[list[int]]) -> list[list[int]]:
    """Return the groups with experts in separate groups of up to max_group_size elements, after the others."""
    split = [[number for number in group if not lists.parameters[number].expert] for group in groups]
    for group in groups:
        experts = [number for number in group if lists.parameters[number].expert]
        buckets = buckets_within_limit((_elements(lists, number) for number in experts), _EXPERT_ELEMENTS)
        split += [[experts[position] for position in bucket] for bucket in buckets]
    return split


@rule("deepspeed.runtime.engine.DeepSpeedEngine.communication_data_type (from the configuration)", DEEPSPEED)
def communication_type(config: Mapping[str, Any], precision: str, sequence: int = 1) -> str:
    """Return the configured type for communicating gradients, by default the parameters', or fp32 with Ulysses."""
    prefix, default = ("", precision) if sequence == 1 else ("seq_parallel_", "fp32")
    named = str(config.get(f"{prefix}communication_data_type") or default).lower()
    if named not in ELEMENT_TYPES:
        raise NotPredictedError(f"communication_data_type is {named}; DeepSpeed accepts fp32, fp16 and bf16")
    return ELEMENT_TYPES[named]


@rule("deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer (check_grad_overflow)", DEEPSPEED)
def checks_overflow(config: Mapping[str, Any], precision: str) -> bool:
    """Return whether overflow is checked: always in fp16, and in bf16 unless it is switched off."""
    if precision == "bf16":
        return bool((_block(config, "bf16") or _block(config, "bfloat16")).get("check_grad_overflow", True))
    return precision == "fp16"


@rule("deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check", DEEPSPEED)
def optimizer_wrapper(config: Mapping[str, Any], precision: str, stage: int) -> str:
    """Return the class in which DeepSpeed wraps the optimizer."""
    accumulated = _block(config, "data_types").get("grad_accum_dtype")
    if stage == 0:
        return basic_optimizer(config) if precision == "fp32" else "FP16_UnfusedOptimizer"
    if stage == 1 and precision == "bf16" and accumulated in ("fp32", "float32"):
        return "BF16_Optimizer"
    return "DeepSpeedZeroOptimizer_Stage3" if stage == 3 else "DeepSpeedZeroOptimizer"


def basic_optimizer(config: Mapping[str, Any]) -> str:
    """Return the optimizer's class, AdamW by default. DeepSpeed's Adam (FusedAdam on a device) communicates like it."""
    named = _block(config, "optimizer").get("type")
    return "AdamW" if named is None or str(named).lower() in ("adam", "adamw") else str(named)
