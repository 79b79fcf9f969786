"""Steps, phases and roles of plain PyTorch: torch.optim's global step hooks, and DDP.

Backward needs no hook (autograd tells, see `torch_tracer`), and neither does forward (a call made within a module is).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commtrace.hooks import torch_tracer
from commtrace.hooks.patching import Patches
from commtrace.progress import progress
from commtrace.schema import Phase

_handles: list[Any] = []
_patches = Patches()


class _Steps:
    """An optimizer that steps ends a training step: the first one seen, where there are several (a GAN's, say)."""

    def __init__(self) -> None:
        self.engine_decides = False  # DeepSpeed's engine knows better than the torch optimizer inside it
        self._first: weakref.ref[Optimizer] | None = None

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Before `optimizer.step()`."""
        if torch.compiler.is_compiling() or self.engine_decides:
            return
        progress.activity()
        progress.marks.append(Phase.OPTIMIZER)

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """After `optimizer.step()`."""
        if torch.compiler.is_compiling() or self.engine_decides:
            return
        if progress.marks and progress.marks[-1] == Phase.OPTIMIZER:
            progress.marks.pop()
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            progress.step_finished()


steps = _Steps()


def install() -> None:
    """Hook the optimizers and DDP."""
    if _handles:
        return
    _handles.append(register_optimizer_step_pre_hook(steps.begin))
    _handles.append(register_optimizer_step_post_hook(steps.end))
    _patches.wrap(DistributedDataParallel, "__init__", _setting_up)
    torch_tracer.started.append(_tell_roles)


def uninstall() -> None:
    """Take everything out again."""
    torch_tracer.started.clear()
    _patches.undo()
    while _handles:
        _handles.pop().remove()
    progress.reset()


_replicas: weakref.WeakSet[Any] = weakref.WeakSet()


def _setting_up(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with progress.within(Phase.INIT):
            original(self, *args, **kwargs)
        _replicas.add(self)
        tracer = torch_tracer.current()
        if tracer is not None:
            _tell_roles(tracer)

    return __init__


def _tell_roles(tracer: torch_tracer.TorchTracer) -> None:
    for replica in list(_replicas):
        tracer.groups.set_role(replica.process_group, "data", "torch.nn.parallel.DistributedDataParallel")
