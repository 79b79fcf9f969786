"""A small training over all ranks that prints its losses: training.py STEPS [FAULT ARGUMENT]."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commtrace.recording.drain import Drain
from commtrace.recording.recorder import Recorder
from commtrace.recording.session import session


def fail(*_: Any, **__: Any) -> Any:
    """Stand in for a part of commtrace, and fail."""
    raise ValueError("injected")


def inject(name: str, argument: str) -> Callable[[int], None]:
    """Break a part of commtrace. The returned function is called with each step."""
    if name == "site":
        from commtrace.hooks.call_site import CallSites

        CallSites.find = fail  # type: ignore[method-assign]
    elif name == "begin":
        Recorder.begin = fail  # type: ignore[method-assign]
    elif name == "ended":
        Recorder.ended = fail  # type: ignore[method-assign]
    elif name == "group":
        from commtrace.hooks.groups import Groups

        Groups.get = fail  # type: ignore[method-assign]
    elif name == "kind":
        from commtrace.hooks.torch.tracer import TorchTracer

        TorchTracer.kind = fail  # type: ignore[method-assign]
    elif name == "line":
        from commtrace.hooks.call_site import CallSites

        CallSites.number = fail  # type: ignore[method-assign]
    elif name == "operator":
        from commtrace.hooks.torch import c10d_operators, hook

        hook.uninstall()
        hook.remove_kernels()
        del c10d_operators._OPERATIONS["allreduce_"]
        hook.install()
    elif name == "drain":
        return lambda step: session.recorder.drain_callbacks.append(fail) if step == 1 and session.recorder else None
    elif name == "asleep":
        Drain._turn = lambda self: None  # type: ignore[method-assign]
    elif name == "removed":
        return lambda step: remove(Path(argument)) if step == 5 else None
    return lambda step: None


def remove(log: Path) -> None:
    """Remove the log directory some drains after the last call."""
    time.sleep(0.1)
    if dist.get_rank() == 0:
        shutil.rmtree(log)
    dist.barrier()


def main() -> None:
    """Train."""
    steps, (name, argument, *_) = int(sys.argv[1]), [*sys.argv[2:], "", ""]
    on_step = inject(name, argument)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    weights = torch.zeros(8, requires_grad=True)
    for step in range(steps):
        on_step(step)
        loss = ((torch.randn(16, 8) @ weights - 1) ** 2).mean()
        loss.backward()
        assert weights.grad is not None
        works = [dist.all_reduce(weights.grad, async_op=True), dist.all_reduce(loss.detach_(), async_op=True)]
        for work in works:
            work.wait()
        with torch.no_grad():
            weights -= 0.05 * weights.grad
        weights.grad = None
        print(f"loss {loss.item():.9f}")
    gc.collect()
    dist.barrier()


main()
