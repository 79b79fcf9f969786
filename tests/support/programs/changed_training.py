"""changed_training.py STEPS CHANGE: a training under DDP with one change in its communication, or "none"."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def calls_of_the_program(step: int, change: str, alone: dist.ProcessGroup) -> None:
    """Reduce some numbers, like programs that collect statistics."""
    sizes = [3, 5]
    if change == "order" and step == 1:
        sizes.reverse()
    if change == "more" and step == 2:
        sizes.append(7)
    for size in sizes:
        dist.all_reduce(torch.zeros(size))
    of_one_rank = change == "size" and step == 1 and dist.get_rank() == 1
    dist.all_reduce(torch.zeros(12 if of_one_rank else 11), group=alone)


def main() -> None:
    """Train."""
    steps, change = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert isinstance(alone, dist.ProcessGroup)
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.5 if change == "bucket" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        calls_of_the_program(step, change, alone)
    dist.barrier()
    dist.destroy_process_group()


main()
