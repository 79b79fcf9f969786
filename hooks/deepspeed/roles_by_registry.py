"""The parallel dimension of each group of a DeepSpeed program, from DeepSpeed's own registries."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import torch.distributed as dist

Role = tuple[Any, str, str]
"""Group or None, role, and source of the role."""

# Global of `deepspeed.utils.groups` -> role. Globals that this version of DeepSpeed does not have are skipped.
_GROUPS: Final = (
    ("_DATA_PARALLEL_GROUP", "data"),
    ("_ZERO_PARAM_INTRA_PARALLEL_GROUP", "data"),
    ("_ALL_TO_ALL_GROUP", "data"),
    ("_EXPERT_DATA_PARALLEL_GROUP", "data"),
    ("_EXPERT_PARALLEL_GROUP", "expert"),
    ("_TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
)
_SEQUENCE: Final = (("_SEQUENCE_DATA_PARALLEL_GROUP", "data"), ("_SEQUENCE_PARALLEL_GROUP", "sequence"))
_ENGINE: Final = ("seq_data_parallel_group", "data_parallel_group")
# Method of a Megatron-style mpu -> role. A pipeline's grid is such an mpu.
_MPU: Final = (
    ("get_data_parallel_group", "data"),
    ("get_pipe_parallel_group", "pipeline"),
    ("get_pipeline_model_parallel_group", "pipeline"),
    ("get_slice_parallel_group", "tensor"),
    ("get_tensor_model_parallel_group", "tensor"),
    ("get_sequence_parallel_group", "sequence"),
)
# Only for an mpu without any of the methods below: in other mpus, this group also contains the pipeline's stages or,
# in DeepSpeed's parallel_state_sp (which has the last one), consists of the ranks that share a sequence.
_MODEL_PARALLEL: Final = ("get_model_parallel_group", "tensor")
_OTHER_METHODS: Final = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "initialize_sequence_parallel")


def roles(engine: Any) -> Iterator[Role]:
    """Yield the roles of an engine's groups; later ones take precedence."""
    from deepspeed.utils import groups

    yield from _zero_roles(engine)
    for name in _ENGINE:
        yield getattr(engine, name, None), "data", f"DeepSpeedEngine.{name}"
    yield from _registry_roles(groups, _GROUPS)
    try:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
    except ImportError:
        pass  # a DeepSpeed without sequence parallelism
    else:
        yield from _registry_roles(parallel_state_sp, _SEQUENCE)
    yield from _mpu_roles(getattr(engine, "mpu", None))
    yield from _pipeline_roles(engine)


def message_roles(engine: Any) -> Iterator[Role]:
    """Yield the roles of messages: a pipeline's stages send through torch's default group."""
    if getattr(engine, "is_pipe_parallel", False):
        yield dist.group.WORLD, "pipeline", "deepspeed.runtime.pipe.p2p"


def _pipeline_roles(engine: Any) -> Iterator[Role]:
    """Yield the roles of a pipeline's groups; its "model parallel" group holds one replica of the model."""
    grid = getattr(engine, "grid", None)
    if grid is None:
        return
    has_tensor = grid.slice_parallel_size > 1
    role = ("model" if has_tensor else "pipeline") if grid.pipe_parallel_size > 1 else "tensor"
    yield grid.get_model_parallel_group(), role, f"{type(grid).__name__}.get_model_parallel_group"
    for tied in engine.module.tied_comms.values():
        yield tied["group"], "pipeline", f"{type(engine.module).__name__}.tied_comms"


def _zero_roles(engine: Any) -> Iterator[Role]:
    """Yield the roles of ZeRO's groups. If one is torch's default group, no registry has it."""
    yield getattr(engine.optimizer, "dp_process_group", None), "data", "ZeROOptimizer.dp_process_group"
    groups = (getattr(parameter, "ds_process_group", None) for parameter in engine.module.parameters())
    for group in {id(group): group for group in groups}.values():
        yield group, "data", "Parameter.ds_process_group"


def _registry_roles(registry: ModuleType, names: tuple[tuple[str, str], ...]) -> Iterator[Role]:
    for name, role in names:
        value = getattr(registry, name, None)
        for group in value.values() if isinstance(value, dict) else (value,):
            yield group, role, registry.__name__


def _mpu_roles(mpu: Any) -> Iterator[Role]:
    model_parallel = () if any(hasattr(mpu, name) for name in _OTHER_METHODS) else (_MODEL_PARALLEL,)
    for name, role in (*model_parallel, *_MPU):
        getter = getattr(mpu, name, None)
        if getter is not None:
            try:
                yield getter(), role, f"{getattr(mpu, '__name__', type(mpu).__name__)}.{name}"
            except Exception:
                continue  # the mpu has not made this group
