"""Model-parallel unit: which ranks share a model, and which hold the same part of it.

Ranks are in GPT-NeoX's order, tensor parallelism innermost: with two tensor-parallel ranks of eight, 0 and 1 share a
model, and 0, 2, 4 and 6 hold the same half of it. Methods have the names of GPT-NeoX's `megatron.mpu`, which DeepSpeed
calls; groups have Megatron-Core's descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from .config import TrainingConfig
from .sequence import RING, ULYSSES, WHOLE, Parts
from .tensor_parallel import ALONE, Shares


class Mpu:
    """Process groups for tensor parallelism over `tensor` neighbouring ranks. Collective: all ranks construct it."""

    def __init__(self, tensor: int) -> None:
        world = dist.get_world_size()
        self._tensor = tensor_group(tensor)
        self._data = _own_group((range(at, world, tensor) for at in range(tensor)), "DATA_PARALLEL_GROUP")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of ranks that share a model; in GPT-NeoX the tensor-parallel ones only."""
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number in the group that shares its model."""
        return self._tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that share a model."""
        return self._tensor.size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of ranks that hold the same part of the model."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number in its data-parallel group."""
        return self._data.rank()

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks that hold the same part of the model."""
        return self._data.size()


def tensor_group(tensor: int) -> dist.ProcessGroup:
    """Return this rank's group of `tensor` neighbouring ranks."""
    starts = range(0, dist.get_world_size(), tensor)
    return _own_group((range(at, at + tensor) for at in starts), "TENSOR_MODEL_PARALLEL_GROUP")


def _own_group(groups: Iterable[range], description: str) -> dist.ProcessGroup:
    """Create all groups, on every rank in the same order; return this rank's group."""
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group([*ranks], group_desc=description)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    return own


def make_mpu(config: TrainingConfig) -> Any:
    """Return the model-parallel unit; None with neither tensor parallelism nor Ulysses. Needs the process group.

    Under Ulysses it is DeepSpeed's own module.
    """
    if config.sequence_parallel_size > 1:
        from deepspeed.runtime.sequence_parallel import parallel_state_sp  # type: ignore[import-untyped, unused-ignore]

        parallel_state_sp.initialize_sequence_parallel(config.sequence_parallel_size)
        return parallel_state_sp
    return Mpu(config.model_parallel_size) if config.model_parallel_size > 1 else None


def parts_of(config: TrainingConfig, mpu: Any) -> Parts:
    """Return this rank's part of each sequence."""
    if config.sequence_parallel_size > 1:
        group, way = mpu.get_sequence_parallel_group(), ULYSSES
    elif config.context_parallel_size > 1:
        size = config.context_parallel_size
        every = range(0, dist.get_world_size(), size)
        group, way = _own_group((range(at, at + size) for at in every), "CONTEXT_PARALLEL_GROUP"), RING
    else:
        return WHOLE
    return Parts(group.rank(), group.size(), group, way)


def shares_of(config: TrainingConfig, mpu: Any) -> Shares:
    """Return this rank's part of the model or the sequences. Collective: all ranks call it."""
    if config.model_parallel_size == 1:
        return Shares(parts=parts_of(config, mpu))
    return _shares(config, mpu.get_model_parallel_group())


def tensor_shares(config: TrainingConfig) -> Shares:
    """Return this rank's part of a pipeline stage; DeepSpeed creates the other groups."""
    return _shares(config, tensor_group(config.model_parallel_size)) if config.model_parallel_size > 1 else ALONE


def _shares(config: TrainingConfig, group: dist.ProcessGroup) -> Shares:
    return Shares(group.rank(), group.size(), group, wide=config.fp32_allreduce, sequence=config.sequence_parallel)
