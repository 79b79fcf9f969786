"""python theory.py ORDERS: one training after the other in the same processes, each traced into a log of its own.

ORDERS is a JSON file: a list of {"log": directory, "port": for the process group, "arguments": of the GPT-NeoX
workload}, or, for a small model under plain DDP, {"log", "port", "ddp": keyword arguments of DistributedDataParallel}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import commtrace
from commtrace.workloads.gpt_neox import train
from commtrace.workloads.gpt_neox.leave import let_threads_finish


def ddp(arguments: dict[str, Any]) -> None:
    """A few steps of a model that has buffers and a parameter that is not trained."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    layers = [torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 7)]
    model = torch.nn.Sequential(*layers)
    model[0].bias.requires_grad_(False)
    replica = torch.nn.parallel.DistributedDataParallel(model, **arguments)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    steps = 4 if arguments.get("static_graph") else 3  # until they are alike
    for _ in range(steps):
        replica(torch.randn(3, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    # The reducer holds the group's last reference and lets go of it with Python's lock held: its destructor waits for
    # gloo's thread, which must not wait for that lock to release a tensor then.
    let_threads_finish()


def main(orders: list[dict[str, Any]]) -> None:
    """All of them."""
    for order in orders:
        os.environ["MASTER_PORT"] = str(order["port"])
        commtrace.start(order["log"])
        if "ddp" in order:
            ddp(order["ddp"])
        elif train.main(order["arguments"]):
            sys.exit(1)
        commtrace.stop()
        gc.collect()


with open(sys.argv[1]) as file:
    main(json.load(file))
