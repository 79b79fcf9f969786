"""python own_pipeline.py: a pipeline of two stages that a program writes itself, as picotron does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

STEPS, MICRO_BATCHES, WIDTH = 3, 2, 4


def main() -> None:
    """Send weights before the training; train; evaluate after each step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        exchange(rank, stage.weight)  # no activity of a step, although it requires a gradient
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            if rank == 0:
                activation = stage(torch.ones(2, WIDTH))
                dist.send(activation, 1)
                gradient = torch.empty_like(activation)
                dist.recv(gradient, 1)
                activation.backward(gradient)
            else:
                received = torch.empty(2, WIDTH, requires_grad=True)
                dist.recv(received, 0)
                stage(received).sum().backward()
                assert received.grad is not None
                dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            exchange(rank, torch.ones(2, WIDTH, requires_grad=True))
    dist.destroy_process_group()


def exchange(rank: int, tensor: torch.Tensor) -> None:
    """Send a tensor from rank 0 to rank 1."""
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


main()
