"""Job rows of a pipeline's stages, from a configuration: who has which layers, and what a stage's engine is set to."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import ModelShape, ModuleSpec, gpt_neox_layers, model_lists, module_list
from commtrace.theory.rules.deepspeed.pipeline import BLOCK, EMBEDDING
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule

from .deepspeed_job_row import deepspeed_row, precision_of
from .rank_layout import ELEMENT_TYPES, RankLayout

_TIED: Final = "embed"


@dataclass(frozen=True)
class StageDivision:
    """How a model is divided over stages, and what of it is recomputed."""

    stages: int
    method: str = "type:transformer|mlp"
    interval: int = 0
    """Layers that are recomputed together, 0: none."""


def stage_rows(
    figures: ModelShape, config: Mapping[str, Any], layout: RankLayout, division: StageDivision
) -> tuple[dict[str, Any], ...]:
    """A row for each stage of GPT-NeoX's model; `config` is DeepSpeed's. Raises NotPredictedError for settings."""
    parts = _parts(figures)
    names = layer_names(figures.layers, figures.tied)
    bounds = stage_bounds(names, [_elements(parts[name]) for name in names], division)
    settings = pipeline_settings(config)
    found = []
    for number in range(division.stages):
        begin, end = bounds[number], bounds[number + 1]
        has_tied = figures.tied and number in (0, division.stages - 1)
        numbered = {str(at): parts[names[at]] for at in range(begin, end) if not figures.tied or names[at] != EMBEDDING}
        tied = parts[EMBEDDING] if has_tied else None
        row = deepspeed_row(_stage(numbered, tied), config, layout)
        row |= {"engine": "PipelineEngine", "pipeline_stages": division.stages, "grad_accum_dtype": _summed_in(config)}
        row["optimizer"] = pipeline_optimizer_wrapper(config, row)
        if row["optimizer"] == "BF16_Optimizer":
            row.pop("check_grad_overflow", None)  # which this one does not have
        row["pipeline"] = {
            **settings,
            "stage": number,
            "bounds": bounds,
            "layers": names[begin:end],
            "activation_checkpoint_interval": settings["activation_checkpoint_interval"] or division.interval,
            "attention_mask": True,
            "bool_tensors": False,
            "dynamic_shape": False,
            # Models are made in fp32 and cast by the engine.
            "tied": [{"parameter": f"tied_modules.{_TIED}.weight", "ranks": 2, "first_dtype": "float32"}] * has_tied,
        }
        found.append(row)
    return tuple(found)


def _parts(figures: ModelShape) -> dict[str, ModuleSpec]:
    """The layers by name; the functions have no parameters."""
    embedding, block, norm, head = gpt_neox_layers(figures)
    functions = {name: ModuleSpec(name) for name in ("_pre_transformer_block", "_post_transformer_block")}
    return {EMBEDDING: embedding, BLOCK: block, "NormPipe": norm, "ParallelLinearPipe": head, **functions}


def _stage(numbered: Mapping[str, ModuleSpec], tied: ModuleSpec | None) -> ModuleSpec:
    """As PipelineModule registers it: first what is tied, then layers by their numbers, but functions."""
    first = (module_list("tied_modules", replace(tied, name=_TIED)),) if tied is not None else ()
    parts = (replace(part, name=number) for number, part in numbered.items() if _has_parameters(part))
    return ModuleSpec("", parts=(*first, *parts))


def _has_parameters(part: ModuleSpec) -> bool:
    return bool(part.parameters or part.parts)


def _elements(part: ModuleSpec) -> int:
    return sum(math.prod(one["shape"]) for one in model_lists(part, "float32").parameters)


def _summed_in(config: Mapping[str, Any]) -> str:
    named = (config.get("data_types") or {}).get("grad_accum_dtype") or precision_of(config)
    if named not in {**ELEMENT_TYPES, **{name: name for name in ELEMENT_TYPES.values()}}:
        raise NotPredictedError(f"data_types.grad_accum_dtype is {named}; DeepSpeed knows fp32, fp16 and bf16")
    return ELEMENT_TYPES.get(named, named)


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("megatron.model.gpt2_model.GPT2ModelPipe.init_specs", GPT_NEOX)
def layer_names(layers: int, tied: bool) -> list[str]:
    """In order, as DeepSpeed finds them where it divides layers by type; two are functions."""
    inner = ["_pre_transformer_block", *[BLOCK] * layers, "_post_transformer_block", "NormPipe"]
    return [EMBEDDING, *inner, EMBEDDING if tied else "ParallelLinearPipe"]


@rule("deepspeed.runtime.pipe.module.PipelineModule._partition_layers, _find_layer_type", DEEPSPEED)
def stage_bounds(names: Sequence[str], elements: Sequence[int], division: StageDivision) -> list[int]:
    """Where each stage begins, and the last one ends: as many layers each, or parameters, or of a kind."""
    method = division.method.lower()
    if method == "uniform":
        return partition_uniform(len(names), division.stages)
    if method == "parameters":
        return partition_balanced(elements, division.stages)
    wanted = re.compile(method.split(":")[1], re.IGNORECASE)
    return partition_balanced([int(bool(wanted.search(name))) for name in names], division.stages)


@rule("deepspeed.runtime.utils.partition_uniform", DEEPSPEED)
def partition_uniform(items: int, parts: int) -> list[int]:
    """What does not divide goes to the first parts, one each."""
    if items <= parts:
        return [min(part, items) for part in range(parts + 1)]
    each, rest = divmod(items, parts)
    return [part * each + min(part, rest) for part in range(parts + 1)]


@rule("deepspeed.runtime.utils.partition_balanced", DEEPSPEED)
def partition_balanced(weights: Sequence[int], parts: int) -> list[int]:
    """The least difference between the heaviest and the lightest part; of several ways the last part begins latest."""
    items = len(weights)
    if items <= parts:
        return partition_uniform(items, parts)
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    nothing = (math.inf, math.inf, math.inf, 0)  # cost, heaviest, lightest, where the last part begins
    best = [[nothing] * (parts + 1) for _ in range(items + 1)]
    best[0][0] = (0, 0, math.inf, 0)
    for end in range(1, items + 1):
        for part in range(1, min(end, parts) + 1):
            for begin in range(end):
                _, heaviest, lightest, _ = best[begin][part - 1]
                held = sums[end] - sums[begin]
                heaviest, lightest = max(heaviest, held), min(lightest, held)
                if best[end][part][0] >= heaviest - lightest:
                    best[end][part] = (heaviest - lightest, heaviest, lightest, begin)
    bounds = [items]
    for part in range(parts, 0, -1):
        bounds.append(best[bounds[-1]][part][3])
    return bounds[::-1]


@rule("deepspeed.runtime.config.get_pipeline_config; deepspeed.runtime.pipe.engine.PipelineEngine.__init__ "
      "(use_reentrant)", DEEPSPEED)  # fmt: skip
def pipeline_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The block `pipeline` with what it leaves out."""
    given = config.get("pipeline") or {}
    defaults = {"pipe_partitioned": True, "grad_partitioned": True, "activation_checkpoint_interval": 0}
    found = {name: given.get(name, default) for name, default in defaults.items()}
    reentrant = given.get("use_reentrant")
    return {**found, "use_reentrant": True if reentrant is None else reentrant}


@rule("deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check (in a pipeline)", DEEPSPEED)
def pipeline_optimizer_wrapper(config: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What DeepSpeed puts around the optimizer: in a pipeline BF16_Optimizer where bf16 goes without ZeRO."""
    plain = row["zero_stage"] == 0 and precision_of(config) == "bf16"
    return "BF16_Optimizer" if plain else str(row["optimizer"])
