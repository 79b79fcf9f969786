"""python purposes.py FOLDER: calls of known purposes on two ranks; writes the times of each section."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._attention import _templated_ring_attention
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH = 8
times: dict[str, list[int]] = {}
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def section(function: Callable[[], None]) -> None:
    begin = time.monotonic_ns()
    function()
    times[function.__name__] = [begin, time.monotonic_ns()]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Model(torch.nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def train(model: Callable[..., torch.Tensor], rows: int = 2) -> None:
    model(torch.ones(rows, WIDTH, requires_grad=True)).sum().backward()


def sharded(reentrant: bool | None = None) -> Model:
    model = Model(reentrant)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(reentrant: bool | None = None) -> Model:
    model = Model(reentrant)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


@section
def ddp() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH))
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        train(replica)


@section
def ddp_with_a_hook() -> None:
    replica = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH), init_sync=False)
    replica.register_comm_hook(state=None, hook=allreduce_hook)
    train(replica)


@section
def fsdp() -> None:
    model = sharded()
    train(model)
    first: Any = model.layers[0]
    first.unshard()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@section
def fsdp_recomputed() -> None:
    train(sharded(reentrant=True))


@section
def tensors() -> None:
    train(tensor_parallel())


@section
def tensors_recomputed() -> None:
    train(tensor_parallel(reentrant=True))


class Transposed(torch.nn.Module):
    # Few objects are as large as this, so that its memory is soon used for another.
    __slots__ = tuple(f"unused{number}" for number in range(29))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        columns: torch.Tensor = rows.redistribute(placements=[Shard(1)]).to_local()
        return columns.reshape(x.shape)


@section
def tensors_repeated() -> None:
    """Repeated steps of three models, of which each has modules where the last one's were; calls of no module."""
    former: set[int] = set()
    for number in range(3):
        model = torch.nn.Sequential(
            OrderedDict((f"transposed{number}_{position}", Transposed()) for position in range(16))
        )
        addresses = set(map(id, model))
        assert not former or former & addresses, "no module is where one was"
        for _ in range(3):
            model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        former = addresses
        del model
        gc.collect()
    for _ in range(2):
        Transposed().forward(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()


@section
def pipeline() -> None:
    rank = dist.get_rank()
    stage = PipelineStage(Block(), rank, 2, torch.device("cpu"), input_args=torch.ones(1, WIDTH))
    stage.group = dist.group.WORLD
    schedule = Schedule1F1B(stage, 3, loss_fn=lambda output, target: (output - target).sum())
    if rank == 0:
        schedule.step(torch.ones(3, WIDTH))
    else:
        schedule.step(target=torch.ones(3, WIDTH))


@section
def checkpoints() -> None:
    model = sharded()
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    state_dict_loader.load({"model": model.state_dict()}, checkpoint_id=folder[0])


@section
def fsdp1() -> None:
    model = FullyShardedDataParallel(Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    train(model)
    model.clip_grad_norm_(1.0)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query @ key.transpose(-2, -1)
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


@section
def ring() -> None:
    cp = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    query, key, value = (torch.ones(1, 1, 4, WIDTH) for _ in range(3))
    _templated_ring_attention(cp.get_group(), 2, attend, query, key, value, is_causal=True)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The stand-in beside this file.
        module: Any = importlib.import_module("torchtitan.models.common.token_dispatcher")
        self.dispatcher = module.AllToAllTokenDispatcher(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = torch.tensor([[0]] * (len(x) - 1) + [[1]])
        combined: torch.Tensor = self.dispatcher.combine(2 * self.dispatcher.dispatch(x, experts), x)
        return combined


@section
def experts() -> None:
    """A model with one layer of experts, whose first expert gets three tokens of four."""
    train(torch.nn.Sequential(Experts()), rows=4)


class Functions(torch.nn.Module):
    """Reduces in one autograd function and gathers in another, of the stand-ins beside this file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
        loss: Any = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
        result: torch.Tensor = loss.CrossEntropy.apply(mappings.Reduce.apply(x))
        return result


@section
def functions() -> None:
    train(Functions())


@section
def functions_recomputed() -> None:
    """In both ways, and the program's own call last."""
    layer = Functions()
    for reentrant in (True, False):
        train(functools.partial(checkpoint, layer, use_reentrant=reentrant))
    dist.all_reduce(torch.ones(3))


@section
def own() -> None:
    dist.all_reduce(torch.ones(3))
    parameter: Any = next(sharded().parameters())
    parameter.full_tensor()


(Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(times))
dist.destroy_process_group()
