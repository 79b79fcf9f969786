"""The job row of a DeepSpeed engine: everything that determines what it communicates.

It is read once, when the engine is built. `commtrace.theory` derives the expected calls from it alone.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch.nn import Embedding

from commtrace.hooks.torch.model_facts import (
    architecture,
    available,
    buffers,
    dtype_name,
    grouped,
    modules,
    parameters,
)
from commtrace.job_row import JobRow, ModuleRow, ZeroSettings
from commtrace.patching import record_before_call

from .pipeline_job import describe_stage

arguments: Final[weakref.WeakKeyDictionary[Any, Any]] = weakref.WeakKeyDictionary()
"""The program's arguments for each engine (`args` of `deepspeed.initialize`)."""

# For each engine with ZeRO-3: indices of the parameters that were not yet partitioned when it broadcast its model.
_partitioned_later: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def _unpartitioned(engine: Any) -> list[int]:
    """Return indices of the parameters that are not partitioned yet. Raises LookupError for other stages."""
    if int(engine.zero_optimization_stage()) != 3:
        raise LookupError
    states = (getattr(parameter, "ds_status", None) for _, parameter in engine.module.named_parameters())
    return [number for number, state in enumerate(states) if state is None]


note_partitioned: Final = record_before_call(_partitioned_later, _unpartitioned)
"""Wrapper of `DeepSpeedEngine._broadcast_model`."""


# Behaviour of DeepSpeed before it had these settings of `zero_optimization`, and the first version that has them.
_OLD_BEHAVIOUR: Final = {
    "enable_sanity_checks": False,  # 0.17
    "allgather_sequential": False,  # 0.18
    "parameter_alignment": False,  # 0.19
    "compute_grad_norm": True,  # 0.19
}


def describe(engine: Any) -> JobRow:
    """Return a row of the `job` table, without settings that this version of DeepSpeed does not have."""
    return JobRow(
        source="deepspeed",
        engine=type(engine).__name__,
        zero_stage=available(lambda: int(engine.zero_optimization_stage())),
        zero=available(lambda: ZeroSettings.read({**_OLD_BEHAVIOUR, **_json_settings(engine._config.zero_config)})),
        partitioned_by_engine=available(lambda: _partitioned_later[engine]),
        world_size=available(lambda: engine.world_size),
        data_parallel_size=available(lambda: _data_parallel_size(engine)),
        sequence_data_parallel_size=available(lambda: engine.seq_dp_world_size),
        sequence_parallel_size=available(lambda: engine.sequence_parallel_size),
        tensor_parallel_size=available(lambda: _tensor_parallel_size(engine)),
        tensor_parallel_rank=available(lambda: _tensor_parallel_rank(engine)),
        pipeline_stages=available(lambda: getattr(engine, "num_stages", 1)),
        pipeline=available(lambda: describe_stage(engine)),
        micro_batch_size=available(lambda: engine.train_micro_batch_size_per_gpu()),
        gradient_accumulation_steps=available(lambda: engine.gradient_accumulation_steps()),
        train_batch_size=available(lambda: engine.train_batch_size()),
        precision=available(lambda: _precision(engine)),
        grad_accum_dtype=available(lambda: dtype_name(engine.get_data_types()[1])),
        communication_data_type=available(lambda: dtype_name(engine.communication_data_type)),
        gradient_clipping=available(lambda: engine.gradient_clipping()),
        prescale_gradients=available(lambda: engine._config.prescale_gradients),
        gradient_predivide_factor=available(lambda: engine.gradient_predivide_factor()),
        sparse_gradients=available(lambda: engine._config.sparse_gradients_enabled),
        optimizer=available(lambda: type(engine.optimizer).__name__),
        basic_optimizer=available(lambda: type(engine.basic_optimizer).__name__),
        optimizer_groups=available(lambda: _optimizer_groups(engine)),
        check_grad_overflow=available(lambda: _checks_overflow(engine.optimizer)),
        norm_dtype=available(_norm_dtype),
        moe=available(lambda: engine.has_moe_layers),
        expert_parallel_sizes=available(_expert_parallel_sizes),
        modules=available(lambda: modules_of(engine)),
        embeddings=available(lambda: _embeddings(engine)),
        parameters=available(lambda: parameters(engine.module)),
        buffers=available(lambda: buffers(engine.module)),
        model=available(lambda: architecture(engine.module, arguments.get(engine))),
    )


def _tensor_parallel_size(engine: Any) -> int:
    """Return the tensor-parallel size; with a pipeline, the engine's model-parallel size counts the stages as well."""
    grid = getattr(engine, "grid", None)
    return int(engine.mp_world_size if grid is None else grid.slice_parallel_size)


def _tensor_parallel_rank(engine: Any) -> int:
    """Return the rank within the tensor-parallel group. Raises AttributeError without an mpu."""
    grid = getattr(engine, "grid", None)
    return int(engine.mpu.get_model_parallel_rank() if grid is None else grid.get_slice_parallel_rank())


def _data_parallel_size(engine: Any) -> int:
    """Return the data-parallel size, which an mpu with sequence parallelism only (parallel_state_sp) does not have."""
    size: int | None = engine.dp_world_size
    return engine.seq_dp_world_size // engine.sequence_parallel_size if size is None else size


def _optimizer_groups(engine: Any) -> list[list[int]]:
    """Return indices of the parameters in each of the optimizer's groups or, with ZeRO-3, sub-groups."""
    optimizer = engine.optimizer
    names = ("bit16_groups", "fp16_groups", "bf16_groups")
    groups = next((values for name in names if (values := getattr(optimizer, name, None))), None)
    return grouped(engine.module, groups or [group["params"] for group in optimizer.param_groups])


def _checks_overflow(optimizer: Any) -> bool:
    """Return check_grad_overflow of an optimizer of ZeRO-1 or ZeRO-2; before DeepSpeed 0.17, the dtype decides."""
    if not hasattr(optimizer, "check_grad_overflow"):
        return dtype_name(optimizer.dtype) == "float16"
    return bool(optimizer.check_grad_overflow)


def _norm_dtype() -> str:
    from deepspeed.runtime.zero import utils

    # Before DeepSpeed 0.19, norms have double precision on every device.
    return dtype_name(utils.get_norm_dtype()) if hasattr(utils, "get_norm_dtype") else "float64"


def modules_of(engine: Any) -> list[ModuleRow]:
    """Return the modules at which ZeRO-3 gathers parameters. Raises LookupError for other stages."""
    if int(engine.zero_optimization_stage()) < 3:
        raise LookupError
    from deepspeed.utils.z3_leaf_module import z3_leaf_module

    return modules(engine.module, z3_leaf_module)


def _embeddings(engine: Any) -> list[int]:
    """Return the indices of embeddings in `modules_of`. Their input is integers, which have no gradient."""
    named = dict(engine.module.named_modules())
    return [number for number, row in enumerate(modules_of(engine)) if isinstance(named[row.name], Embedding)]


def _expert_parallel_sizes() -> list[int]:
    from deepspeed.utils import groups

    return sorted({group.size() for group in groups._EXPERT_PARALLEL_GROUP.values()})


def _precision(engine: Any) -> str:
    if engine.fp16_enabled():
        return "fp16"
    return "bf16" if engine.bfloat16_enabled() else "fp32"


def _json_settings(config: Any) -> dict[str, Any]:
    """Return a pydantic model's settings as JSON values, without None."""
    return {name: value for name, value in config.model_dump(mode="json").items() if value is not None}
