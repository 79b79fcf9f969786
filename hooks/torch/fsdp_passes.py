"""Passes of an FSDP2 model in each step: the rows of the table `passes`.

They decide how often units are gathered and reduced, with the settings that the program changes between them
(`set_requires_gradient_sync` ...). A row is written for a step that has other passes than the step before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from commtrace.hooks.recorder_setup import fault
from commtrace.progress import progress
from commtrace.recording.session import session

from . import tracer as torch_tracer
from .captured_jobs import Jobs
from .fsdp_job import groups_of
from .tracer import TorchTracer

MAX_ROWS: Final = 10_000
"""Rows of a model: tables stay in memory. The last one has no passes: from its step on they are not known."""

_SETTINGS: Final = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


class Passes:
    """Counts the passes of all models at their roots."""

    def __init__(self, jobs: Jobs) -> None:
        """Count the passes of the models that are known as jobs."""
        self._jobs = jobs
        self._reset()

    def _reset(self) -> None:
        self._of_root: weakref.WeakKeyDictionary[Any, _ModelPasses] = weakref.WeakKeyDictionary()
        self._all: list[_ModelPasses] = []  # also of models that are gone when the log ends

    def install(self) -> None:
        """Write to the tables of each recorder that begins from now on."""
        if self._write_at_end not in torch_tracer.started:
            torch_tracer.started.append(self._write_at_end)

    def uninstall(self) -> None:
        """Forget all models."""
        if self._write_at_end in torch_tracer.started:
            torch_tracer.started.remove(self._write_at_end)
        self._reset()

    def _write_at_end(self, tracer: TorchTracer) -> None:
        models = self._all

        def write() -> None:
            while models and session.recorder is not tracer.recorder:
                models.pop().write(tracer)

        tracer.recorder.each_drain.append(write)

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `FSDPState._register_pre_backward_hook`, with which the forward of each unit ends."""

        def _register_pre_backward_hook(state: Any, *args: Any, **kwargs: Any) -> Any:
            # In a backward pass activations are recomputed.
            if state._state_ctx.iter_forward_root is state and torch._C._current_graph_task_id() < 0:
                self._note(state, _end_forward)
            return original(state, *args, **kwargs)

        return _register_pre_backward_hook

    def backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `FSDPState._root_post_backward_final_callback`, which ends a backward pass."""

        def _root_post_backward_final_callback(state: Any) -> None:
            original(state)
            self._note(state, _end_backward)

        return _root_post_backward_final_callback

    def _note(self, state: Any, note: Callable[[_ModelPasses, Any], None]) -> None:
        try:
            root = next(each for each in state._state_ctx.all_states if each._is_root)._modules[0]
            model = self._of_root.get(root)
            if model is None:
                model = self._of_root[root] = _ModelPasses()
                self._all.append(model)
            note(model, state)
            tracer = torch_tracer.current()
            if model.job is None and tracer is not None:
                model.job = self._jobs.row(root, tracer)
        except Exception:
            fault()


class _ModelPasses:
    """Passes of one model in the current step: that of the calls in them."""

    def __init__(self) -> None:
        self.job: int | None = None
        self.waiting = 0  # forward passes that wait for a backward pass
        self._step = -1
        self._passes: list[dict[str, Any]] = []
        self._written: list[dict[str, Any]] = []  # passes of the last row
        self._rows = 0

    def add(self, entry: dict[str, Any]) -> None:
        """Append a pass to the current step."""
        if progress.step != self._step:
            self._next_step(progress.step)
        last = self._passes[-1] if self._passes else {}
        if last == {**entry, "times": last.get("times")}:
            last["times"] += 1
        else:
            self._passes.append({**entry, "times": 1})

    def _next_step(self, step: int) -> None:
        tracer = torch_tracer.current()
        if tracer is not None:
            self.write(tracer)
        if step > self._step + 1:  # steps of other models
            self._step, self._passes = self._step + 1, []
            if tracer is not None:
                self.write(tracer)
        self._step, self._passes = step, []

    def write(self, tracer: TorchTracer) -> None:
        """Write a row if the step has other passes than the last row."""
        if self.job is None or self._passes == self._written or self._rows >= MAX_ROWS:
            return
        self._rows += 1
        passes = self._passes if self._rows < MAX_ROWS else None
        tracer.recorder.tables.new("passes", {"job": self.job, "step": self._step, "passes": passes})
        self._written = self._passes


def _end_forward(model: _ModelPasses, state: Any) -> None:
    if not state._is_root:
        model.add({"kind": "part"})  # of the model
    elif torch.is_grad_enabled():
        model.waiting += 1
    else:
        model.add({"kind": "evaluation"})


def _end_backward(model: _ModelPasses, state: Any) -> None:
    waiting, model.waiting = model.waiting, 0
    if waiting != 1:
        model.add({"kind": "backward"})  # of no forward pass, or of several
        return
    groups = [group for each in state._state_ctx.all_states for group in groups_of(each)]
    model.add({"kind": "training", **{name: _setting(groups, name) for name in _SETTINGS}})


def _setting(groups: Iterable[Any], name: str) -> bool | None:
    """Return a setting of all groups; None where they differ, or in a version of torch without it."""
    values = {getattr(group, name, None) for group in groups}
    return values.pop() if len(values) == 1 else None
