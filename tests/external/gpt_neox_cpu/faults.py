"""Run a GPT-NeoX script with a fault patched in: faults.py FAULT SCRIPT ARGUMENT ..."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist


def bucket() -> None:
    """Reduce gradients in smaller buckets than the configuration says."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.zero_reduce_bucket_size = lambda self: 20_000


def extra() -> None:
    """Sum 16 more numbers in each step."""
    import megatron.training as training

    original = training.train_step

    def train_step(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        dist.all_reduce(torch.zeros(16))
        return result

    training.train_step = train_step


def order() -> None:
    """Broadcast a batch's tokens before their sizes, which are fixed here."""
    _replace_broadcasts(_in_other_order)


def size() -> None:
    """Make rank 1 broadcast one extra number with its sizes."""
    if os.environ["RANK"] == "1":
        _replace_broadcasts(_with_one_more)


def _replace_broadcasts(replaced: Callable[..., Any]) -> None:
    data: Any = import_module("megatron.mpu.data")
    original, broadcast = data.broadcast_data, dist.broadcast

    def broadcast_data(*arguments: Any, **named: Any) -> Any:
        dist.broadcast = replaced(broadcast)
        try:
            return original(*arguments, **named)
        finally:
            dist.broadcast = broadcast

    data.broadcast_data = broadcast_data
    for module in list(sys.modules.values()):
        if getattr(module, "broadcast_data", None) is original:
            setattr(module, "broadcast_data", broadcast_data)  # noqa: B010


def _in_other_order(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    waiting: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def other(tensor: Any, *arguments: Any, **named: Any) -> None:
        if not waiting:
            tensor[:2] = torch.tensor([2, 65])
            waiting.append(((tensor, *arguments), named))
        else:
            broadcast(tensor, *arguments, **named)
            broadcast(*waiting[0][0], **waiting[0][1])

    return other


def _with_one_more(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def other(tensor: Any, *arguments: Any, **named: Any) -> None:
        calls.append(1)
        longer = torch.cat([tensor, tensor[:1]]) if len(calls) == 1 else tensor
        broadcast(longer, *arguments, **named)

    return other


if __name__ == "__main__":
    import_module("pkg_resources")  # it lets GPT-NeoX train without CUDA
    sys.path.insert(0, os.getcwd())
    fault, *sys.argv = sys.argv[1:]
    globals()[fault]()
    runpy.run_path(sys.argv[0], run_name="__main__")
