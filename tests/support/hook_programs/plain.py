"""python plain.py FOLDER: trainings in plain PyTorch on two ranks; writes the times of each section."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from hook_programs.tensor_parallel import Reduce

WIDTH = 8
times: dict[str, list[int]] = {}
dist.init_process_group("gloo")


def section(function: Callable[[], None]) -> None:
    begin = time.monotonic_ns()
    function()
    times[function.__name__] = [begin, time.monotonic_ns()]


apply: Any = Reduce.apply


class Parallel(torch.nn.Module):
    """A simplified tensor-parallel layer."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def block(self, x: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = apply(self.inner(x))
        return reduced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return self.block(x)
        recomputed: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.recompute)
        return recomputed


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: torch.nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    model.train()


first = Parallel()
first_optimizer = torch.optim.SGD(first.parameters(), lr=0.1)


@section
def tensor_parallel() -> None:
    for _ in range(2):
        train(first, first_optimizer)
        evaluate(first)


@section
def another_optimizer() -> None:
    """A second optimizer belongs to the step, and does not end it."""
    second = Parallel()
    second_optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    train(second, second_optimizer)
    train(first, first_optimizer)


@section
def recomputed_reentrantly() -> None:
    model = Parallel(recompute=True)
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    first_optimizer.step()


@section
def recomputed() -> None:
    model = Parallel(recompute=False)
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    first_optimizer.step()


class Communicating(torch.optim.SGD):
    """An optimizer with a communication call of its own, which may fail."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        dist.all_reduce(torch.ones(3))
        if self.fails:
            raise KeyError("no step")
        return super().step(closure)


@section
def failing_optimizer() -> None:
    optimizer = Communicating(first.parameters(), lr=0.1)
    first_optimizer.step()
    optimizer.fails = True
    try:
        optimizer.step()
    except KeyError:
        dist.all_reduce(torch.ones(5))  # after the failure, this is no longer in the optimizer
    first_optimizer.step()


@section
def accumulated() -> None:
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, 3), broadcast_buffers=False)
    for _ in range(2):
        with replica.no_sync():
            replica(torch.ones(2, WIDTH)).sum().backward()
        replica(torch.ones(2, WIDTH)).sum().backward()
        first_optimizer.step()


@section
def compiled() -> None:
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, 3), broadcast_buffers=False)
    model = torch.compile(replica, backend="aot_eager")
    model(torch.ones(2, WIDTH)).sum().backward()
    first_optimizer.step()


@section
def sharded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        first_optimizer.step()
    evaluate(model)


(Path(sys.argv[1]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(times))
dist.destroy_process_group()
