"""python what_if_overlap.py SCHEME [NAME=VALUE ...]: a training that overlaps its communication, or does not.

SCHEME: buckets (all_reduces of the program's own in hooks of backward), or fsdp2. Computation sleeps, so that transfers
have the processors for themselves. Values: steps, layers, mib (gradients of a layer), forward_ms and backward_ms (of a
layer), background (0: each call is waited for; 1: buckets until backward is over; fsdp2: parameters are prefetched).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commtrace

SCHEME = sys.argv[1]
OPTIONS: dict[str, Any] = {
    "steps": 12, "layers": 6, "mib": 1.0, "forward_ms": 30.0, "backward_ms": 60.0, "background": 0,
}  # fmt: skip
for argument in sys.argv[2:]:
    name, _, value = argument.partition("=")
    OPTIONS[name] = type(OPTIONS[name])(value)


class Sleep(torch.autograd.Function):
    """Forward and backward take longer, without using a processor."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(OPTIONS["forward_ms"] / 1000)
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(OPTIONS["backward_ms"] / 1000)
        return gradient


class Layer(nn.Module):
    """A layer with as many bytes of weights as `mib` says, and hardly any computation: all layers have the same.

    Backward has twice as many operations as forward, so that a dry run takes its time for twice that of forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, int(OPTIONS["mib"] * (1 << 20)) // 256) * 0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = x[:, None].expand(-1, 64) @ self.weight
        return Sleep.apply(x + product.mean(dim=1))  # type: ignore[no-untyped-call, no-any-return]


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*(Layer() for _ in range(OPTIONS["layers"])))
    pending = {"buckets": buckets, "fsdp2": fsdp2}[SCHEME](model)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    x = torch.ones(4, requires_grad=True)
    for _ in range(OPTIONS["steps"]):
        model(x).square().mean().backward()
        for work in pending:
            work.wait()
        pending.clear()
        optimizer.step()
        optimizer.zero_grad()
        commtrace.step()
    dist.barrier()
    dist.destroy_process_group()


def buckets(model: nn.Sequential) -> list[Any]:
    """All_reduce each gradient when it is ready. Return the list of calls in the background."""
    pending: list[Any] = []

    def reduce(parameter: torch.Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=bool(OPTIONS["background"]))
        if work is not None:
            pending.append(work)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return pending


def fsdp2(model: nn.Sequential) -> list[Any]:
    """Shard each layer; in the background, parameters of all layers are gathered as early as possible."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    root: Any = fully_shard(model, mesh=mesh)
    if OPTIONS["background"]:
        layers: list[Any] = [*model]
        root._set_unshard_async_op(True)
        for number, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 3])
            layer.set_modules_to_backward_prefetch(layers[max(0, number - 2) : number][::-1])
    return []


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main()
