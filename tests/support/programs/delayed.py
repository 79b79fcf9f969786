"""python delayed.py SCHEME [RANK PHASE MILLISECONDS STEPS]: a training whose computation is sleep, and one late rank.

SCHEME: ddp, zero1, zero3, tensor or pipeline. PHASE: forward, backward or optimizer. STEPS: "all", or numbers ("5,9").
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commtrace

STEPS = 14
SECONDS = {"forward": 0.02, "backward": 0.03, "optimizer": 0.005}

NOBODY = ("-1", "", "0", "all")
SCHEME, RANK, PHASE, MILLISECONDS, AT = (*sys.argv[1:], *NOBODY)[:5] if len(sys.argv) == 2 else sys.argv[1:]
step = 0


def compute(phase: str) -> None:
    """Sleep; the late rank sleeps longer."""
    time.sleep(SECONDS[phase])
    if dist.get_rank() == int(RANK) and phase == PHASE and (AT == "all" or str(step) in AT.split(",")):
        time.sleep(float(MILLISECONDS) / 1000)


class Nap(torch.autograd.Function):
    """Computation in forward and in backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        compute("forward")
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        compute("backward")
        return gradients[0].clone()


class Net(nn.Module):
    """Two layers, with the computation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Nap.apply(self.first(x)))  # type: ignore[no-any-return, no-untyped-call]


def ddp() -> None:
    global step
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):  # noqa: B007
        model(torch.randn(4, 64)).sum().backward()
        compute("optimizer")
        optimizer.step()
        optimizer.zero_grad()


def zero(stage: int) -> None:
    global step
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, which takes minutes
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = Net()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(STEPS):  # noqa: B007
        engine.backward(engine(torch.randn(4, 64)).sum())
        engine.step()


def tensor() -> None:
    global step
    for step in range(STEPS):  # noqa: B007
        commtrace.step()
        for phase in ("forward", "backward"):
            with commtrace.phase(phase):
                for _ in range(2):
                    compute(phase)
                    dist.all_reduce(torch.zeros(1000))


def pipeline() -> None:
    global step
    rank, last, buffer = dist.get_rank(), dist.get_world_size() - 1, torch.zeros(1000)
    for step in range(STEPS):  # noqa: B007
        commtrace.step()
        for phase, source, target in (("forward", rank - 1, rank + 1), ("backward", rank + 1, rank - 1)):
            with commtrace.phase(phase):
                for _ in range(2):
                    if 0 <= source <= last:
                        dist.recv(buffer, source)
                    compute(phase)
                    if 0 <= target <= last:
                        dist.send(buffer, target)
        with commtrace.phase("optimizer"):
            dist.all_reduce(torch.zeros(1))  # the norm of the gradients


torch.manual_seed(0)
dist.init_process_group("gloo")
{"ddp": ddp, "zero1": lambda: zero(1), "zero3": lambda: zero(3), "tensor": tensor, "pipeline": pipeline}[SCHEME]()
dist.destroy_process_group()
