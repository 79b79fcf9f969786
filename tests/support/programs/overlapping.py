"""python overlapping.py KIND STEPS [lost]: a training that hides communication behind computation, or has lost that.

KIND        hides                                                 "lost"
ddp         the reduction of each bucket, behind later backward   one bucket holds all gradients
async       a reduction that the program starts early             `async_op` is forgotten
prefetch    the next FSDP2 unit's gather, behind forward          the unit is gathered when it is needed
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 512, 6, 128
KIND, STEPS, LOST = sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["lost"]


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def ddp(x: torch.Tensor) -> None:
    model = DistributedDataParallel(layers(), bucket_cap_mb=1000 if LOST else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def asynchronous(x: torch.Tensor) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    statistics = torch.ones(WIDTH * WIDTH)
    for _ in range(STEPS):
        work = dist.all_reduce(statistics, async_op=not LOST)
        model(x).square().mean().backward()
        if work is not None:
            work.wait()
        statistics /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def prefetch(x: torch.Tensor) -> None:
    model = layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    units = [layer for layer in model if isinstance(layer, FSDPModule)]
    for _ in range(STEPS):
        hidden = x
        for layer, following in zip(model, [*units[1:], None], strict=True):
            if following is not None and not LOST:
                following.unshard(async_op=True)
            hidden = layer(hidden)
        hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


torch.set_num_threads(1)
dist.init_process_group("gloo")
{"ddp": ddp, "async": asynchronous, "prefetch": prefetch}[KIND](torch.ones(BATCH, WIDTH))
dist.barrier()
dist.destroy_process_group()
