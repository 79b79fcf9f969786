"""python theory.py ORDERS: one training after the other in the same processes, each traced into its own log.

ORDERS is a JSON file: a list of {"log": directory, "port": for the process group, "arguments": of the GPT-NeoX
workload}, or, for a small model under plain DDP, {"log", "port", "ddp": keyword arguments of DistributedDataParallel},
or under plain FSDP2 {"log", "port", "fsdp": keyword arguments of fully_shard}, or under a plain DeepSpeed engine
{"log", "port", "deepspeed": its configuration, "zero_init": number of layers made under `deepspeed.zero.Init`}.
Each also has "variables", which are set in the environment.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import commtrace
from examples.gpt_neox import train


def ddp(arguments: dict[str, Any]) -> None:
    """Train a few steps of a model that has buffers and a parameter that is not trained."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    layers = [torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.Tanh(), torch.nn.Linear(40, 7)]
    model = torch.nn.Sequential(*layers)
    model[0].bias.requires_grad_(False)
    replica = torch.nn.parallel.DistributedDataParallel(model, **arguments)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    steps = 4 if arguments.get("static_graph") else 3  # until steps are equal
    for _ in range(steps):
        replica(torch.randn(3, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Delete it before its group: otherwise DDP's reducer releases the group last, and torch then joins gloo's threads
    # while it holds the GIL, for which they may be waiting.
    del replica
    dist.destroy_process_group()


def fsdp(arguments: dict[str, Any]) -> None:
    """Train a few steps of a model with nested units, several dtypes and placements, and a frozen parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    inner = torch.nn.Sequential(torch.nn.Linear(13, 9), torch.nn.Tanh(), torch.nn.Linear(9, 13))
    model = torch.nn.Sequential(torch.nn.Linear(12, 13), inner, torch.nn.LayerNorm(13), torch.nn.Linear(13, 7))
    inner[0].bias.requires_grad_(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(inner[2], mesh=mesh, mp_policy=half, reshard_after_forward=False)
    fully_shard(inner, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    columns = Shard(1)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: columns if p.shape == (13, 12) else None, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(3, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def plain_deepspeed(settings: dict[str, Any], partitioned_layers: int) -> None:
    """Train a few steps of a model whose first layers are partitioned when they are made, the others by the engine."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    sizes = [12, 40, 40, 7]
    layers = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        with deepspeed.zero.Init(config_dict_or_path=settings, enabled=number < partitioned_layers):
            layers.append(torch.nn.Linear(inputs, outputs))
    engine, *_ = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=settings)
    for _ in range(3):
        engine.backward(engine(torch.randn(3, 12)).square().mean())
        engine.step()
    engine.destroy()
    deepspeed.comm.destroy_process_group()  # also clears DeepSpeed's cache of groups


def main(orders: list[dict[str, Any]]) -> None:
    """Run all orders."""
    linear = torch.nn.functional.linear
    for order in orders:
        os.environ.update(order["variables"], MASTER_PORT=str(order["port"]))
        commtrace.start(order["log"])
        if "ddp" in order:
            ddp(order["ddp"])
        elif "fsdp" in order:
            fsdp(order["fsdp"])
        elif "deepspeed" in order:
            plain_deepspeed(order["deepspeed"], order["zero_init"])
        elif train.main(order["arguments"]):
            sys.exit(1)
        commtrace.stop()
        # ZeRO-3 leaves its own function here (memory_efficient_linear), which returns gradients in another order.
        torch.nn.functional.linear = linear
        gc.collect()


with open(sys.argv[1]) as file:
    main(json.load(file))
