"""Steps, phases and roles of plain PyTorch, from torch.optim's global step hooks and from DDP.

Phases need no hook: autograd shows that a backward pass runs, and the frames above a call show forward and optimizer
(`call_context`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commtrace.current_step import progress
from commtrace.hooks import purposes
from commtrace.patching import Patches, around
from commtrace.schema import Phase, Purpose

from .captured_jobs import Jobs
from .ddp_job import describe

_DDP_FUNCTIONS: Final = {
    "_verify_param_shape_across_processes": Purpose.MODEL_CHECKED,
    "_sync_module_states": Purpose.PARAMETERS_AT_START,
}
"""Functions that DDP calls when it is made."""

_patches = Patches()


class _Steps:
    """Training steps. Of several optimizers (of a GAN, or of model parts), the first one to step ends the steps."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the optimizer."""
        self.engine_marks_steps = False  # with DeepSpeed, its engine marks the steps, not the optimizer inside it
        self._first: weakref.ref[Optimizer] | None = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore optimizer steps, such as those that allocate state while an engine is built."""
        before, self.engine_marks_steps = self.engine_marks_steps, True
        try:
            yield
        finally:
            self.engine_marks_steps = before

    def begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Begin a step if none is under way. Called before `optimizer.step()`.

        Another optimizer steps after the first one without passes of its own if it has other parts of the same model.
        """
        if torch.compiler.is_compiling() or self.engine_marks_steps:
            return
        first = self._first() if self._first is not None else None
        if first is None or first is optimizer:
            progress.note_activity()

    def end(self, optimizer: Optimizer, *_: Any) -> None:
        """End the step. Called after `optimizer.step()`."""
        if torch.compiler.is_compiling() or self.engine_marks_steps:
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            progress.finish_step()


steps = _Steps()


@_patches.installer
def install() -> None:
    """Hook the optimizers and DDP."""
    _patches.on_undo(progress.reset)
    _patches.on_undo(steps.reset)
    _patches.on_undo(register_optimizer_step_pre_hook(steps.begin).remove)
    _patches.on_undo(register_optimizer_step_post_hook(steps.end).remove)
    _patches.wrap(DistributedDataParallel, "__init__", _init_ddp)
    _patches.wrap(DistributedDataParallel, "_pre_forward", purposes.marking_each(_purpose_before_forward))
    _patches.wrap(DistributedDataParallel, "_sync_buffers", purposes.marking(Purpose.BUFFERS))
    _patches.wrap(DistributedDataParallel, "register_comm_hook", _register_comm_hook)
    for name, purpose in _DDP_FUNCTIONS.items():
        _patches.wrap(distributed, name, purposes.marking(purpose))
    _patches.include(_replicas)


uninstall = _patches.undo


@around
def _init_ddp(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    progress.reduces_gradients = True
    with progress.marked(Phase.INIT):
        original(self, *args, **kwargs)
    _replicas.add(self)


def _purpose_before_forward(replica: Any, *_: Any, **__: Any) -> int:
    """Return the purpose of calls by C++ code before a forward pass. With uneven inputs, there are others."""
    return 0 if replica._join_config.enable else purposes.number(Purpose.BUCKETS)


@around
def _register_comm_hook(original: Callable[..., None], self: Any, /, state: Any, hook: Callable[..., Any]) -> None:
    """Mark the calls of a hook in Python that reduces a bucket.

    C++ code makes all other calls of the reducer: `tracer._reducer_purpose` gives them their purpose.
    """

    @functools.wraps(hook)
    def marked(state: Any, bucket: Any) -> Any:
        with purposes.Marked(purposes.number(Purpose.GRADIENTS, bucket=bucket.index())):
            return hook(state, bucket)

    original(self, state, marked)


def _roles(replica: Any) -> Iterator[tuple[Any, str, str]]:
    yield replica.process_group, "data", "torch.nn.parallel.DistributedDataParallel"


_replicas = Jobs(describe, _roles)
