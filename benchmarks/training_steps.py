"""Trainings of a small transformer, as benchmarks use them: on the process group that exists, in each scheme a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

Step = Callable[[], object]


class Size(NamedTuple):
    """Size of a model and of a micro-batch."""

    layers: int
    width: int
    tokens: int
    samples: int


TINY: Final = Size(layers=6, width=32, tokens=8, samples=2)
"""Little computation, for valgrind, which makes it forty times slower."""


def model(size: Size) -> Any:
    """Return the transformer."""
    from torch import nn

    layers = [
        nn.TransformerEncoderLayer(size.width, 4, 4 * size.width, dropout=0.0, batch_first=True)
        for _ in range(size.layers)
    ]
    return nn.Sequential(*layers)


def inputs(size: Size) -> Any:
    """Return a micro-batch."""
    import torch

    return torch.randn(size.samples, size.tokens, size.width)


def by_torch(size: Size, wrap: Callable[[Any], Any]) -> Step:
    """Return a step of a model that torch parallelizes."""
    import torch

    trained, batch = wrap(model(size)), inputs(size)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)

    def step() -> None:
        trained(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone() -> Step:
    """Return a step of one layer on one rank, which leaves little of anything else in the caches."""
    return by_torch(Size(layers=1, width=256, tokens=64, samples=2), lambda whole: whole)


def ddp(size: Size) -> Step:
    """Return a step of DDP with several buckets."""
    from torch.nn.parallel import DistributedDataParallel

    bucket_mb = size.width**2 * 12 * 4 / 1e6  # about a layer
    return by_torch(size, lambda whole: DistributedDataParallel(whole, bucket_cap_mb=bucket_mb))


def fsdp2(size: Size) -> Step:
    """Return a step of FSDP2 with each layer sharded."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(whole: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in whole:
            fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        return whole

    return by_torch(size, shard)


def zero(size: Size, stage: int) -> Step:
    """Return a step of DeepSpeed's ZeRO."""
    import torch
    from zero_engine import zero_engine

    net, batch = model(size), inputs(size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    engine = zero_engine(net, optimizer, stage=stage, samples=size.samples)

    def step() -> None:
        engine.backward(engine(batch).square().mean())
        engine.step()

    return step


SCHEMES: Final[dict[str, Callable[[Size], Step]]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "ZeRO-1": partial(zero, stage=1),
    "ZeRO-3": partial(zero, stage=3),
}
