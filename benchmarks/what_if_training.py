"""python what_if_training.py SCHEME [NAME=VALUE ...]: a training whose network, computation or late rank is changed.

SCHEME: ddp, zero1, zero2 (DeepSpeed's) or fsdp2. Values: steps, width, layers, samples, bucket_mb, dtype, sent (type of
messages of ddp and fsdp2), late (a rank), late_ms; unit_mb: layers are one unit of fsdp2 as soon as they hold so much;
widths, such as 512,1024,256: those of the layers' inputs and of the output, instead of width and layers; backward_ms:
time that backward sleeps for each MiB of gradients, before they are ready.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SCHEME = sys.argv[1]
OPTIONS: dict[str, Any] = {
    "steps": 30, "width": 512, "layers": 8, "samples": 256, "bucket_mb": 4.0, "unit_mb": 0.0, "dtype": "float32",
    "sent": "float32", "late": -1, "late_ms": 0.0, "widths": "", "backward_ms": 0.0,
}  # fmt: skip
for argument in sys.argv[2:]:
    name, _, value = argument.partition("=")
    OPTIONS[name] = type(OPTIONS[name])(value)


class Late(nn.Module):
    """One rank computes longer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == OPTIONS["late"]:
            time.sleep(OPTIONS["late_ms"] / 1000)
        return x


class Sleep(torch.autograd.Function):
    """Backward takes longer, without using a processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """Backward sleeps for each MiB of a layer's gradients."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.seconds = OPTIONS["backward_ms"] / 1000 * layer.weight.nbytes / (1 << 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.seconds) if self.seconds else x  # type: ignore[no-untyped-call]


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {int(os.environ["LOCAL_RANK"]) % (os.cpu_count() or 1)})
    dist.init_process_group("gloo")
    widths = [*map(int, filter(None, OPTIONS["widths"].split(",")))] or [OPTIONS["width"]] * (OPTIONS["layers"] + 1)
    linear = [nn.Linear(*sizes) for sizes in itertools.pairwise(widths)]
    layers = [module for layer in linear for module in (layer, Slow(layer), nn.ReLU())]
    model: Any = nn.Sequential(Late(), *layers).to(getattr(torch, OPTIONS["dtype"]))
    step = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "fsdp2": fsdp2}[SCHEME](model)
    x = torch.randn(OPTIONS["samples"], widths[0]).to(getattr(torch, OPTIONS["dtype"]))
    for _ in range(OPTIONS["steps"]):
        step(x)
    dist.barrier()
    dist.destroy_process_group()


def ddp(model: Any) -> Any:
    """Return a step of DDP."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=OPTIONS["bucket_mb"])
    if OPTIONS["sent"] == "bfloat16":
        # DDP rejects the hook itself, by its name, without CUDA.
        replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return stepper(replica, torch.optim.SGD(replica.parameters(), 0.001))


def zero1(model: Any) -> Any:
    """Return a step of DDP with a sharded optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=OPTIONS["bucket_mb"])
    return stepper(replica, ZeroRedundancyOptimizer(replica.parameters(), torch.optim.SGD, lr=0.001))


def zero2(model: Any) -> Any:
    """Return a step of DeepSpeed's ZeRO-2."""
    from zero_engine import zero_engine

    settings = {"stage": 2, "reduce_bucket_size": int(OPTIONS["bucket_mb"] * (1 << 20)) // 4}
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    engine = zero_engine(model, optimizer, stage=2, samples=OPTIONS["samples"], zero_optimization=settings)

    def step(x: torch.Tensor) -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def fsdp2(model: Any) -> Any:
    """Return a step of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sent = getattr(torch, OPTIONS["sent"])
    policy = MixedPrecisionPolicy(param_dtype=sent, reduce_dtype=sent)
    for unit in units([layer for layer in model if isinstance(layer, nn.Linear)]):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return stepper(model, torch.optim.SGD(model.parameters(), 0.001))


def units(layers: list[nn.Linear]) -> Iterator[list[nn.Module]]:
    """Yield consecutive layers, at least one, that hold `unit_mb` together."""
    unit: list[nn.Module] = []
    for layer in layers:
        unit.append(layer)
        if sum(parameter.nbytes for own in unit for parameter in own.parameters()) >= OPTIONS["unit_mb"] * (1 << 20):
            yield unit
            unit = []
    if unit:
        yield unit


def stepper(model: Any, optimizer: Any) -> Any:
    """Return a function that trains one step."""

    def step(x: torch.Tensor) -> None:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
