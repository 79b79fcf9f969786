"""GPT-NeoX's YAML files as a planned job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from commtrace.errors import ConfigError
from commtrace.job_row import JobRow, ModelSettings
from commtrace.theory.configs.deepspeed_job_row import deepspeed_row
from commtrace.theory.configs.pipeline_job_rows import StageDivision, stage_rows
from commtrace.theory.configs.plan_options import JobPlan, PlanOptions
from commtrace.theory.configs.rank_layout import ELEMENT_TYPES, RankLayout
from commtrace.theory.configs.torch_job_rows import ddp_row, fsdp_row
from commtrace.theory.model_shapes import ModelShape, gpt_neox_model, neox_shape

from .config import NeoxConfig, check_engine, load_config
from .engine_settings import deepspeed_config, neox_args
from .program_config import ProgramConfig
from .program_modules import sequential_model
from .yaml_files import find_file, read_file

_EXAMPLE_KEYS: Final = {
    "sequence_parallel_size", "context_parallel_size", "moe_expert_parallel_size", "moe_token_dropping",
    "checkpoint_reentrant",
}  # fmt: skip
"""Keys of commtrace's GPT-NeoX example that GPT-NeoX does not have: files with one of them are for the example."""


class EngineRows(NamedTuple):
    """An engine's configuration class, and the function that makes job rows from it, one for each pipeline stage."""

    config_type: type[NeoxConfig]
    rows: Callable[[Any, RankLayout], Sequence[JobRow]]


def plan_gpt_neox(files: Sequence[str], world: int, options: PlanOptions) -> JobPlan:
    """Return the job that GPT-NeoX's files describe; arguments and errors as in `job_plan.plan_job`."""
    overrides = {
        "zero_stage": options.zero_stage,
        "precision": options.precision,
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.accumulation,
        "vocabulary": options.vocabulary,
    }
    engine = options.engine or "deepspeed"
    config_type, make_rows = ENGINE_ROWS[engine]
    if config_type is ProgramConfig and _EXAMPLE_KEYS & {key for name in files for key in read_file(find_file(name))}:
        config_type, make_rows = EngineRows(NeoxConfig, plain_or_staged_rows)
    config = load_config(files, overrides, config_type)
    check_engine(config, engine)
    data = config.data_parallel(world)
    layout = RankLayout(world, data, *config.batch_shape(data), **config.parallel_sizes)
    rows = tuple(make_rows(config, layout))
    for row in rows:
        row.model = _model_settings(config, layout)
    return JobPlan(rows, layout, _assumed(config))


def model_shape(config: NeoxConfig, layout: RankLayout) -> ModelShape:
    """Return the shape of a rank's part of the model."""
    return neox_shape(_model_settings(config, layout), layout.tensor_parallel_size)


def _model_settings(config: NeoxConfig, layout: RankLayout) -> ModelSettings:
    arguments = neox_args(config, layout.micro_batch_size, layout.gradient_accumulation_steps)
    return ModelSettings.read(vars(arguments), "model.")


def plain_or_staged_rows(
    config: NeoxConfig, layout: RankLayout, *, staged_from: int = 2, groups: int = 2, initial_type: str = "float32"
) -> Sequence[JobRow]:
    """Return DeepSpeed's row or, if pipe_parallel_size is at least `staged_from`, one for each stage of its pipeline.

    The optimizer has `groups` parameter groups, and the model is made in the element type `initial_type`.
    """
    shape = model_shape(config, layout)
    settings = deepspeed_config(config, layout.micro_batch_size, layout.gradient_accumulation_steps, verbose=False)
    if config.pipe_parallel_size < staged_from:
        return [deepspeed_row(gpt_neox_model(shape), settings, layout, groups=groups)]
    interval = config.checkpoint_num_layers if config.checkpoint_activations else 0
    division = StageDivision(config.stages, config.pipe_partition_method, interval)
    return stage_rows(shape, settings, layout, division, groups=groups, initial_type=initial_type)


def _program_rows(config: ProgramConfig, layout: RankLayout) -> Sequence[JobRow]:
    groups = 2 if config.weight_decay else 1
    if config.zero_stage == 3:
        settings = deepspeed_config(config, layout.micro_batch_size, layout.gradient_accumulation_steps, verbose=False)
        model = sequential_model(config, model_shape(config, layout))
        row = deepspeed_row(model, settings, layout, groups=groups)
        row.partitioned_by_engine = [*range(len(row.parameters))]
        return [row]
    initial_type = ELEMENT_TYPES[config.precision]
    return plain_or_staged_rows(config, layout, staged_from=1, groups=groups, initial_type=initial_type)


def _ddp_rows(config: NeoxConfig, layout: RankLayout) -> Sequence[JobRow]:
    return [ddp_row(gpt_neox_model(model_shape(config, layout)), config.precision, layout)]


def _fsdp_rows(config: NeoxConfig, layout: RankLayout) -> Sequence[JobRow]:
    if "fsdp" in config.origins or config.ranks_per_sample > 1:
        raise ConfigError(
            "GPT-NeoX has no FSDP: it is predicted with PyTorch's defaults and without other parallel dimensions; "
            "leave out the block fsdp, and model_, sequence_ and context_parallel_size"
        )
    model = gpt_neox_model(model_shape(config, layout))
    return [fsdp_row(model, config.precision, layout, "fp32" if config.fp32_allreduce else None)]


def _assumed(config: NeoxConfig) -> tuple[str, ...]:
    experts = "tokens go to experts as unevenly as possible, so payloads are upper bounds (moe_token_dropping is off)"
    is_bounded = config.moe_expert_parallel_size > 1 and not config.moe_token_dropping
    return (
        *((experts,) if is_bounded else ()),
        f"a vocabulary of {config.vocab_size:,} ids, padded to {config.padded_vocab_size:,}",
        "modules are made and run in the order of "
        + ("GPT-NeoX's program" if isinstance(config, ProgramConfig) else "commtrace's GPT-NeoX example"),
    )


ENGINE_ROWS: Final[dict[str, EngineRows]] = {
    "deepspeed": EngineRows(ProgramConfig, _program_rows),
    "ddp": EngineRows(NeoxConfig, _ddp_rows),
    "fsdp": EngineRows(NeoxConfig, _fsdp_rows),
}
"""Job rows by engine. A program that trains differently replaces an entry, as `examples.gpt_neox.theory` does."""
