"""Training with PyTorch's FSDP2 (``fully_shard``) or HSDP.

With tensor parallelism, FSDP shards each rank's part of the model; if no ranks are left for data parallelism, the model
is only tensor-parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from commtrace.theory.configs.gpt_neox.engine_settings import neox_args

from .config import TrainingConfig
from .dtensor_parallel import clip_gradients, parallelize
from .layers import Block
from .model import GPTNeoX, language_model_loss, weight_decay_groups
from .schedule import make_scheduler


class FsdpEngine:
    """Engine with FSDP2. Units are the transformer layers, and the model itself with embedding, last norm and head.

    Parameters stay in fp32. With bf16 they are gathered and used as bf16; gradients are reduced as bf16, or with
    `fp32_allreduce` as fp32.
    """

    def __init__(self, config: TrainingConfig, device: torch.device, micro_batch: int, accumulation: int) -> None:
        self._settings = config.fsdp
        with device:
            model = GPTNeoX(config)
        model.neox_args = neox_args(config, micro_batch, accumulation)
        tensor, data = config.model_parallel_size, config.data_parallel(dist.get_world_size())
        mesh = make_mesh(device.type, data, self._settings.shards(data), tensor)
        if config.precision == "bf16" and data == 1:
            model.to(torch.bfloat16)  # without FSDP there are no fp32 copies
        if tensor > 1:
            parallelize(model, mesh["tensor"], along_sequence=self._settings.sequence_parallel)
        self._model: Any = shard(model, config, _data(mesh)) if data > 1 else model
        self._tensor, self._sharded = tensor, data > 1
        groups = weight_decay_groups(model, config.weight_decay)
        # Not foreach with tensor parallelism: plain tensors and DTensors cannot be updated together.
        self._optimizer = torch.optim.AdamW(
            groups, lr=1.0, betas=(config.betas[0], config.betas[1]), eps=config.eps, foreach=tensor == 1
        )
        self._scheduler = make_scheduler(config, self._optimizer)
        self._clipping = config.gradient_clipping

    @staticmethod
    def initialise(backend: str) -> None:
        """Create the process group, from the environment."""
        dist.init_process_group(backend)

    def train_step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one optimizer step; return the mean loss of this rank's micro-batches (a scalar, without gradient)."""
        losses = []
        for index, batch in enumerate(micro_batches):
            self._synchronise(index == len(micro_batches) - 1)
            loss = language_model_loss(self._model(batch[:, :-1]), batch[:, 1:])
            torch.autograd.backward(loss / len(micro_batches))
            losses.append(loss.detach())
        self._update()
        return torch.stack(losses).mean()

    def _synchronise(self, last: bool) -> None:
        if not self._sharded:
            return
        self._model.set_is_last_backward(last)
        self._model.set_requires_gradient_sync(last or self._settings.sync_every_micro_batch)
        self._model.set_reshard_after_backward(last or self._settings.reshard_after_backward)

    def _update(self) -> None:
        if self._clipping:
            clip = clip_gradients if self._tensor > 1 else torch.nn.utils.clip_grad_norm_
            clip(self._model.parameters(), self._clipping)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Release the model and destroy the process group."""
        del self._model, self._optimizer, self._scheduler
        dist.destroy_process_group()


def make_mesh(device: str, data: int, shards: int, tensor: int) -> DeviceMesh:
    """Create the mesh: replicas outermost, then the ranks that shard parameters, tensor parallelism innermost.

    Dimensions of size 1 are left out, except "shard" with data parallelism.
    """
    sizes = {"replicate": data // shards, "shard": shards, "tensor": tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or (name == "shard" and data > 1)}
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _data(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh without its tensor dimension."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tensor"]
    return mesh[tuple(names)]


def shard(model: GPTNeoX, config: TrainingConfig, mesh: DeviceMesh) -> Any:
    """Apply fully_shard to the layers and to the model."""
    param_dtype = torch.bfloat16 if config.precision == "bf16" else None
    reduce_dtype = torch.float32 if config.fp32_allreduce else None
    for unit in [*(layer for layer in model.layers.values() if isinstance(layer, Block)), model]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=config.fsdp.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        )
    return model
