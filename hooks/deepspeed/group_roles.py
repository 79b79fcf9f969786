"""Which parallel dimension each group of a DeepSpeed program serves, as DeepSpeed's own registries say."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

import torch.distributed as dist

Role = tuple[Any, str, str]
"""(group, role, who says so); a group may be None."""

# A name of `deepspeed.utils.groups` -> role; a registry that this DeepSpeed does not have is left out.
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
# A Megatron-style unit; a pipeline's grid is one, too.
_UNIT: Final = (
    ("get_data_parallel_group", "data"),
    ("get_pipe_parallel_group", "pipeline"),
    ("get_pipeline_model_parallel_group", "pipeline"),
    ("get_slice_parallel_group", "tensor"),
    ("get_tensor_model_parallel_group", "tensor"),
    ("get_sequence_parallel_group", "sequence"),
)
# Only of a unit that has none of the other names for it: elsewhere a pipeline's stages are in this group as well.
_OLD_TENSOR: Final = ("get_model_parallel_group", "tensor")
# DeepSpeed's parallel_state_sp (which has the last one) means the ranks that share a sequence by it.
_NOT_OLD: Final = ("get_tensor_model_parallel_group", "get_slice_parallel_group", "initialize_sequence_parallel")


def roles(engine: Any) -> Iterator[Role]:
    """The most telling last."""
    from deepspeed.utils import groups

    yield from _partitioned(engine)
    for name in _ENGINE:
        yield getattr(engine, name, None), "data", f"DeepSpeedEngine.{name}"
    yield from _registered(groups, _GROUPS)
    try:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
    except ImportError:
        pass  # a DeepSpeed without sequence parallelism
    else:
        yield from _registered(parallel_state_sp, _SEQUENCE)
    yield from _unit(getattr(engine, "mpu", None))
    yield from _pipeline(engine)


def message_roles(engine: Any) -> Iterator[Role]:
    """A pipeline's stages send to each other through torch's default group (deepspeed.runtime.pipe.p2p)."""
    if getattr(engine, "is_pipe_parallel", False):
        yield dist.group.WORLD, "pipeline", "deepspeed.runtime.pipe.p2p"


def _pipeline(engine: Any) -> Iterator[Role]:
    """Of a pipeline, what its grid calls model parallel: all ranks that hold one copy of the model."""
    grid = getattr(engine, "grid", None)
    if grid is None:
        return
    several = grid.slice_parallel_size > 1
    role = ("model" if several else "pipeline") if grid.pipe_parallel_size > 1 else "tensor"
    yield grid.get_model_parallel_group(), role, f"{type(grid).__name__}.get_model_parallel_group"
    for tied in engine.module.tied_comms.values():
        yield tied["group"], "pipeline", f"{type(engine.module).__name__}.tied_comms"


def _partitioned(engine: Any) -> Iterator[Role]:
    """ZeRO-3's groups, which may be torch's default group itself and then stand in no registry."""
    yield getattr(engine.optimizer, "dp_process_group", None), "data", "ZeROOptimizer.dp_process_group"
    groups = (getattr(parameter, "ds_process_group", None) for parameter in engine.module.parameters())
    for group in {id(group): group for group in groups}.values():
        yield group, "data", "Parameter.ds_process_group"


def _registered(registry: ModuleType, names: tuple[tuple[str, str], ...]) -> Iterator[Role]:
    for name, role in names:
        found = getattr(registry, name, None)
        for group in found.values() if isinstance(found, dict) else (found,):
            yield group, role, registry.__name__


def _unit(mpu: Any) -> Iterator[Role]:
    old = () if any(hasattr(mpu, name) for name in _NOT_OLD) else (_OLD_TENSOR,)
    for name, role in (*old, *_UNIT):
        getter = getattr(mpu, name, None)
        if getter is not None:
            try:
                yield getter(), role, f"{getattr(mpu, '__name__', type(mpu).__name__)}.{name}"
            except Exception:
                continue  # not set up
