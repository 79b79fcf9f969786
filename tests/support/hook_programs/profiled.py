"""A DDP and an FSDP2 training that torch.profiler records: `profiled.py ddp|fsdp FOLDER`. A trace per rank."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

STEPS = 3


def main(kind: str, folder: str) -> None:
    """Train with all steps in the trace."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 16))
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True) as profiler:
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            loss = torch.ones(8)
            dist.all_reduce(loss)
            dist.barrier()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
