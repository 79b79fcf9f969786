"""Rows of the `job` table for the stages of a pipeline, from a configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from commtrace.job_row import JobRow, StageRow, TiedRow
from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import (
    ModelShape,
    ModuleSpec,
    gpt_neox_layers,
    model_lists,
    module_list,
)
from commtrace.theory.rules.deepspeed.pipeline_calls import BLOCK, EMBEDDING
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule

from .deepspeed_job_row import deepspeed_row, precision_of
from .rank_layout import ELEMENT_TYPES, RankLayout

_TIED: Final = "embed"


@dataclass(frozen=True)
class StageDivision:
    """Division of a model into stages: their number, pipe_partition_method, and layers recomputed together (or 0)."""

    stages: int
    method: str = "type:transformer|mlp"
    interval: int = 0


def stage_rows(
    shape: ModelShape,
    config: Mapping[str, Any],
    layout: RankLayout,
    division: StageDivision,
    *,
    groups: int = 2,
    initial_type: str = "float32",
) -> tuple[JobRow, ...]:
    """Return a row for each stage of GPT-NeoX's model, from DeepSpeed's configuration.

    The optimizer has `groups` parameter groups, and the model is made in the element type `initial_type`.

    Raises:
        NotPredictedError: If a setting has no rules.
    """
    parts = _layers(shape)
    names = layer_names(shape.layers, shape.tied)
    elements = [model_lists(parts[name], "float32").elements for name in names]
    bounds = stage_bounds(names, elements, division)
    settings = pipeline_settings(config)
    rows = []
    for number in range(division.stages):
        begin, end = bounds[number], bounds[number + 1]
        has_tied = shape.tied and number in (0, division.stages - 1)
        numbered = {
            str(position): parts[names[position]]
            for position in range(begin, end)
            if not shape.tied or names[position] != EMBEDDING
        }
        tied = parts[EMBEDDING] if has_tied else None
        row = deepspeed_row(_stage(numbered, tied), config, layout, groups=groups)
        row.engine, row.pipeline_stages = "PipelineEngine", division.stages
        row.grad_accum_dtype = _accumulation_type(config)
        row.optimizer = pipeline_optimizer_wrapper(config, row)
        if row.optimizer == "BF16_Optimizer" and row.has(JobRow.check_grad_overflow):
            del row.check_grad_overflow  # BF16_Optimizer does not check
        # The model may be made in another type; the engine casts it.
        tied_weight = TiedRow(parameter=f"tied_modules.{_TIED}.weight", ranks=2, first_dtype=initial_type)
        row.pipeline = StageRow(
            stage=number,
            bounds=bounds,
            layers=names[begin:end],
            pipe_partitioned=settings["pipe_partitioned"],
            grad_partitioned=settings["grad_partitioned"],
            activation_checkpoint_interval=settings["activation_checkpoint_interval"] or division.interval,
            use_reentrant=settings["use_reentrant"],
            attention_mask=True,
            bool_tensors=False,
            dynamic_shape=False,
            tied=[tied_weight] * (has_tied and division.stages > 1),
        )
        rows.append(row)
    return tuple(rows)


def _layers(shape: ModelShape) -> dict[str, ModuleSpec]:
    """Return the layers by name; functions have no parameters."""
    embedding, block, norm, head = gpt_neox_layers(shape)
    functions = {name: ModuleSpec(name) for name in ("_pre_transformer_block", "_post_transformer_block")}
    return {EMBEDDING: embedding, BLOCK: block, "NormPipe": norm, "ParallelLinearPipe": head, **functions}


def _stage(numbered: Mapping[str, ModuleSpec], tied: ModuleSpec | None) -> ModuleSpec:
    """Return a stage as PipelineModule registers it: tied modules, then layers by number, without functions."""
    first = (module_list("tied_modules", replace(tied, name=_TIED)),) if tied is not None else ()
    parts = (replace(part, name=number) for number, part in numbered.items() if part.parameters or part.children)
    return ModuleSpec("", children=(*first, *parts))


def _accumulation_type(config: Mapping[str, Any]) -> str:
    name = (config.get("data_types") or {}).get("grad_accum_dtype") or precision_of(config)
    if name not in {**ELEMENT_TYPES, **{name: name for name in ELEMENT_TYPES.values()}}:
        raise NotPredictedError(f"data_types.grad_accum_dtype is {name}; DeepSpeed accepts fp32, fp16 and bf16")
    return ELEMENT_TYPES.get(name, name)


@rule("megatron.model.gpt2_model.GPT2ModelPipe.init_specs", GPT_NEOX)
def layer_names(layers: int, tied: bool) -> list[str]:
    """Return the names of the layers of GPT-NeoX's pipeline in order. Two of them are functions."""
    inner = ["_pre_transformer_block", *[BLOCK] * layers, "_post_transformer_block", "NormPipe"]
    return [EMBEDDING, *inner, EMBEDDING if tied else "ParallelLinearPipe"]


@rule("deepspeed.runtime.pipe.module.PipelineModule._partition_layers, _find_layer_type", DEEPSPEED)
def stage_bounds(names: Sequence[str], elements: Sequence[int], division: StageDivision) -> list[int]:
    """Return where each stage begins, and the end. Layers, parameters or layers of a kind are divided evenly."""
    method = division.method.lower()
    if method == "uniform":
        return partition_uniform(len(names), division.stages)
    if method == "parameters":
        return partition_balanced(elements, division.stages)
    pattern = re.compile(method.split(":")[1], re.IGNORECASE)
    return partition_balanced([int(bool(pattern.search(name))) for name in names], division.stages)


@rule("deepspeed.runtime.utils.partition_uniform", DEEPSPEED)
def partition_uniform(items: int, parts: int) -> list[int]:
    """Return where each part begins, and the end. A remainder goes to the first parts, one item each."""
    if items <= parts:
        return [min(part, items) for part in range(parts + 1)]
    each, rest = divmod(items, parts)
    return [part * each + min(part, rest) for part in range(parts + 1)]


@rule("deepspeed.runtime.utils.partition_balanced", DEEPSPEED)
def partition_balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return where each part begins, and the end, with the least difference between heaviest and lightest part.

    Among equal partitions, the last part begins as late as possible.
    """
    items = len(weights)
    if items <= parts:
        return partition_uniform(items, parts)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    impossible = (math.inf, math.inf, math.inf, 0)  # cost, heaviest, lightest, where the last part begins
    best = [[impossible] * (parts + 1) for _ in range(items + 1)]
    best[0][0] = (0, 0, math.inf, 0)
    for end in range(1, items + 1):
        for part in range(1, min(end, parts) + 1):
            for begin in range(end):
                _, heaviest, lightest, _ = best[begin][part - 1]
                weight = sums[end] - sums[begin]
                heaviest, lightest = max(heaviest, weight), min(lightest, weight)
                if best[end][part][0] >= heaviest - lightest:
                    best[end][part] = (heaviest - lightest, heaviest, lightest, begin)
    bounds = [items]
    for part in range(parts, 0, -1):
        bounds.append(best[bounds[-1]][part][3])
    return bounds[::-1]


@rule("deepspeed.runtime.config.get_pipeline_config; deepspeed.runtime.pipe.engine.PipelineEngine.__init__ "
      "(use_reentrant)", DEEPSPEED)  # fmt: skip
def pipeline_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of the block `pipeline`. Those that it leaves out have defaults."""
    given = config.get("pipeline") or {}
    defaults = {"pipe_partitioned": True, "grad_partitioned": True, "activation_checkpoint_interval": 0}
    settings = {name: given.get(name, default) for name, default in defaults.items()}
    reentrant = given.get("use_reentrant")
    return {**settings, "use_reentrant": True if reentrant is None else reentrant}


@rule("deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check (in a pipeline)", DEEPSPEED)
def pipeline_optimizer_wrapper(config: Mapping[str, Any], row: JobRow) -> str:
    """Return the class in which DeepSpeed wraps a pipeline's optimizer: for bf16 without ZeRO, BF16_Optimizer."""
    is_bf16_without_zero = row.zero_stage == 0 and precision_of(config) == "bf16"
    return "BF16_Optimizer" if is_bf16_without_zero else row.optimizer
