"""Rows of the `job` table for this example's `--engine fsdp`: the block `fsdp`, and tensor parallelism by DTensors."""

from __future__ import annotations

from commtrace.job_row import JobRow, StyleRow
from commtrace.theory.configs.rank_layout import ELEMENT_TYPES, RankLayout
from commtrace.theory.configs.torch_job_rows import fsdp_row
from commtrace.theory.job import NotPredictedError
from commtrace.theory.model_shapes import ModelShape, ModuleSpec, gpt_neox_model, model_lists
from examples.gpt_neox.config import TrainingConfig, check_fsdp

from .tensor_plan import local_shape, tensor_plan


def fsdp_rows(config: TrainingConfig, layout: RankLayout) -> list[JobRow]:
    """Return a job's row. Raise ConfigError for impossible settings, NotPredictedError for settings without rules."""
    check_fsdp(config)
    sizes = (config.num_layers, config.hidden_size, config.padded_vocab_size, not config.no_weight_tying)
    model = gpt_neox_model(ModelShape(*sizes))  # fully_shard and DTensors begin with the whole model
    tensor_ranks = layout.tensor_parallel_size
    plan = tensor_plan(model, sequence_parallel=config.fsdp.sequence_parallel) if tensor_ranks > 1 else []
    # With one data-parallel rank, no ranks are left for fully_shard.
    is_tensor_only = layout.data_parallel_size == 1 and plan
    row = _dtensor_row(model, config.precision) if is_tensor_only else _sharded_row(model, config, layout, plan)
    if plan:
        row.tensor_parallel_size, row.tensor_plan = tensor_ranks, plan
    return [row]


def _dtensor_row(model: ModuleSpec, precision: str) -> JobRow:
    if precision == "fp16":
        raise NotPredictedError("fp16 with tensor parallelism alone has no rules yet")
    lists = model_lists(model, ELEMENT_TYPES[precision])
    return JobRow(
        source="dtensor",
        engine="parallelize_module",
        data_parallel_size=1,
        optimizer="AdamW",
        foreach=False,
        parameters=lists.parameters,
        buffers=lists.buffers,
    )


def _sharded_row(model: ModuleSpec, config: TrainingConfig, layout: RankLayout, plan: list[StyleRow]) -> JobRow:
    settings, shards = config.fsdp, config.fsdp.shards(layout.data_parallel_size)
    row = fsdp_row(model, config.precision, layout, "fp32" if config.fp32_allreduce else None)
    for unit in row.units:
        parameters = [row.parameters[number] for number in unit.parameters]
        unit.shapes = [local_shape(parameter, plan, layout.tensor_parallel_size) for parameter in parameters]
        unit.shards, unit.copies = shards, layout.data_parallel_size // shards
        if settings.reshard_after_forward is not None:
            unit.reshard_after_forward = settings.reshard_after_forward
    # Whether the first micro-batch, in which the job is captured, is the last one.
    is_last = layout.gradient_accumulation_steps == 1
    row.reduce_grads = row.all_reduce_grads = is_last or settings.sync_every_micro_batch
    row.reshard_after_backward = is_last or settings.reshard_after_backward
    return row
