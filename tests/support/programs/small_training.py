"""python small_training.py SETTINGS: a small training in one of torch's parallel schemes, perhaps with a fault.

SETTINGS is a JSON object with the fields of `Settings`. Whatever a fault changes is at its `if` below.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BATCH = 2
EXPERT_BATCH = 6


@dataclass
class Settings:
    """Settings of a training."""

    scheme: str  # "ddp", "fsdp2", "hsdp", "tensor", "pipeline" or "experts"
    blocks: int = 3
    width: int = 8
    steps: int = 4
    micro_batches: int = 1
    syncs_last: bool = True  # only the last micro-batch reduces gradients
    dtype: str = "float32"  # of gathered parameters (FSDP2)
    reduce_dtype: str = "float32"
    reshards: bool = True
    recomputes: bool = False
    clips: bool = False
    saves: list[int] = field(default_factory=list)  # steps after which a checkpoint is saved
    evaluates: list[int] = field(default_factory=list)
    logs: bool = False  # reduce the loss of each step
    bucket_mb: float = 1.0
    fault: str = ""


class Block(nn.Module):
    """Two linear layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + cast(torch.Tensor, self.down(torch.relu(self.up(x))))


class ExpertBlock(nn.Module):
    """A linear layer with a residual connection, and a mixture of experts, one on each of two ranks."""

    def __init__(self, width: int, dispatcher: Any, times: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.experts = Block(width)
        self.dispatcher, self.times = dispatcher, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(x)
        chosen = (torch.arange(len(x)) % 3 > 1).long()[:, None]  # each third token has the second expert
        for _ in range(self.times):
            dispatched = self.dispatcher.dispatch(x, chosen)
        return cast(torch.Tensor, self.dispatcher.combine(self.experts(dispatched), x))


def expert_block(settings: Settings, number: int, mesh: DeviceMesh) -> ExpertBlock:
    """Return a block whose tokens travel along the dimension "ep" of a mesh."""
    # The stand-in for torchtitan's module, also where torchtitan is installed.
    sys.path.insert(0, str(Path(__file__).parents[1] / "hook_programs"))
    dispatchers: Any = importlib.import_module("torchtitan.models.common.token_dispatcher")
    fault = settings.fault if number == 1 else ""
    dispatcher = dispatchers.AllToAllTokenDispatcher(mesh["ep"], dropped=int(fault == "dropped token"))
    return ExpertBlock(settings.width, dispatcher, times=1 + (fault == "tokens sent twice"))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, settings: Settings, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            Block(settings.width) if mesh is None else expert_block(settings, number, mesh)
            for number in range(settings.blocks)
        )
        self.head = nn.Linear(settings.width, settings.width, bias=False)
        self.recomputes = settings.recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return cast(torch.Tensor, self.head(x))


def parallel(settings: Settings) -> Any:
    """Return the model of a scheme."""
    if settings.scheme == "experts":
        return _with_experts(settings)
    model, fault = Model(settings), settings.fault
    if fault == "frozen block":
        model.blocks[1].requires_grad_(False)
    if settings.scheme == "ddp":
        return _replicated(model, settings)
    if settings.scheme == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for number, block in enumerate(model.blocks):
            if not (fault == "unparallelized block" and number == 1):
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    return _sharded(model, settings)


def _with_experts(settings: Settings) -> Model:
    """Return a model whose experts are sharded among the ranks that have the same ones, and all else among all."""
    experts = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("efsdp", "ep"))
    everything = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model, whole = Model(settings, experts), set[nn.Parameter]()
    blocks = cast(list[ExpertBlock], [*model.blocks])
    if settings.fault == "whole experts":  # nobody reduces their gradients
        whole = {*blocks[1].experts.parameters()}
    for block in blocks:
        if not whole & {*block.experts.parameters()}:
            fully_shard(block.experts, mesh=experts["efsdp"], reshard_after_forward=settings.reshards)
        fully_shard(block, mesh=everything, reshard_after_forward=settings.reshards, ignored_params=whole)
    fully_shard(model, mesh=everything, ignored_params=whole)
    return model


def _replicated(model: nn.Module, settings: Settings) -> DistributedDataParallel:
    bucket = 0.0005 if settings.fault == "smaller buckets" else settings.bucket_mb
    unused = settings.fault == "unused parameters"
    replica = DistributedDataParallel(model, bucket_cap_mb=bucket, find_unused_parameters=unused)
    if settings.fault == "16-bit gradients":
        replica.register_comm_hook(None, fp16_compress_hook)
    if settings.fault == "doubled bucket":
        replica.register_comm_hook(None, lambda _, bucket: _reduce_twice(bucket))
    return replica


def _reduce_twice(bucket: Any) -> Any:
    """Reduce a bucket of gradients twice."""
    dist.all_reduce(bucket.buffer())
    return allreduce_hook(cast(Any, None), bucket)


_REDUCED: Final = {"64-bit reduction": "float64", "16-bit reduction": "bfloat16"}
"""Type in which a fault lets a block's gradients be reduced."""


def _sharded(model: Model, settings: Settings) -> Model:
    mesh = _mesh(settings)
    fault = settings.fault
    for number, block in enumerate(model.blocks):
        chosen = number == 1
        if chosen and fault == "unsharded block":
            continue
        dtype = "bfloat16" if chosen and fault == "16-bit block" else settings.dtype
        reduced = _REDUCED.get(fault, settings.reduce_dtype) if chosen else settings.reduce_dtype
        reshards = settings.reshards and not (chosen and fault == "unresharded block")
        policy = MixedPrecisionPolicy(getattr(torch, dtype), getattr(torch, reduced))
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    policy = MixedPrecisionPolicy(getattr(torch, settings.dtype), getattr(torch, settings.reduce_dtype))
    if fault == "kept block":
        cast(FSDPModule, model.blocks[1]).set_reshard_after_backward(False)
    root = True if fault == "resharded root" else False if not settings.reshards else None
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=root)
    return model


def _mesh(settings: Settings) -> DeviceMesh:
    if settings.scheme == "hsdp":
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


@contextlib.contextmanager
def synced(model: Any, settings: Settings, number: int) -> Iterator[None]:
    """Let the backward pass of a micro-batch reduce gradients, or not."""
    reduces = number == settings.micro_batches - 1 or not settings.syncs_last or settings.fault == "forgotten no_sync"
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduces)
        if settings.fault == "local replicas":
            model.set_requires_all_reduce(False)
    with contextlib.nullcontext() if reduces or settings.scheme != "ddp" else model.no_sync():
        yield


def run_step(model: Any, settings: Settings, optimizer: torch.optim.Optimizer) -> None:
    """Train one step."""
    fault = settings.fault
    uneven = fault == "uneven batch" and dist.get_rank() == 0
    rows = EXPERT_BATCH if settings.scheme == "experts" else BATCH
    inputs = torch.ones(rows + uneven, settings.width, requires_grad=True)
    loss = torch.zeros(())
    for number in range(settings.micro_batches):
        with synced(model, settings, number):
            loss = model(inputs).square().mean()
            loss.backward()
    if fault == "doubled reduction":
        for parameter in model.parameters():
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
    if fault == "full tensor":
        next(model.blocks[0].parameters()).full_tensor()
    if fault == "gathered block":
        model.blocks[1].unshard()
        model.blocks[1].reshard()
    # torch does not clip gradients on several meshes, or DTensors and others, together.
    if settings.clips and fault != "unclipped" and settings.scheme not in ("tensor", "experts"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if settings.logs or fault == "reduced loss":
        dist.all_reduce(loss.detach())


def train(settings: Settings) -> None:
    """Train a model that each rank has, whole or in shards."""
    model = parallel(settings)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    for step in range(settings.steps):
        run_step(model, settings, optimizer)
        if step in settings.evaluates:
            model.eval()
            with torch.no_grad():
                model(torch.ones(EXPERT_BATCH if settings.scheme == "experts" else BATCH, settings.width))
            model.train()
        if step in settings.saves:
            save(model, settings)


def save(model: Any, settings: Settings) -> None:
    """Save a checkpoint, in shards or as a whole."""
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=settings.blocks % 2 == 0))
    if settings.blocks % 2:
        state_dict_saver.save({"model": state}, checkpoint_id=folder[0])


def train_pipeline(settings: Settings) -> None:
    """Train a stage on each rank."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    width = settings.width * (2 if settings.fault == "wider activations" else 1)
    micro_batches = settings.micro_batches + 1 + (settings.fault == "more micro-batches")
    torch.manual_seed(1)
    block = Block(width)
    stage = PipelineStage(block, rank, stages, torch.device("cpu"), input_args=torch.ones(BATCH, width))
    schedule_of = ScheduleGPipe if settings.blocks % 2 else Schedule1F1B
    schedule: Any = schedule_of(stage, micro_batches, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    batch = torch.ones(BATCH * micro_batches, width)
    for _ in range(settings.steps):
        last = {"target": batch} if rank == stages - 1 else {}
        schedule.step(*([batch] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train as the settings say."""
    settings = Settings(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    (train_pipeline if settings.scheme == "pipeline" else train)(settings)
    dist.barrier()
    dist.destroy_process_group()


main()
