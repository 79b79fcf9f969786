"""Hook for torch.distributed.pipelining: steps, phases and micro-batches of schedules, and the purpose of each message.

A stage makes the messages of an action as P2POp objects, and a schedule sends those of several actions in one batch.
The batch reads the tensor of a message just before it sends it, which then marks the call. A schedule makes the passes
of one step on every stage, so it begins the step on all ranks. What it agrees before its first step is start-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from commtrace.current_step import MicroBatch, progress
from commtrace.hooks import purposes
from commtrace.hooks.recorder_setup import count_fault, guard
from commtrace.patching import Patches, Wrapper, around
from commtrace.schema import Phase, Purpose

from . import tracer as torch_tracer
from .group_registry import declared_roles
from .scheduled_stages import scheduled_stages

_PACKAGE: Final = "torch.distributed.pipelining"
# Method of a stage that makes the messages of a micro-batch, which is its argument -> their purpose and phase.
_MESSAGES: Final = {
    "get_fwd_recv_ops": (Purpose.PIPELINE_ACTIVATIONS, Phase.FORWARD),
    "get_fwd_send_ops": (Purpose.PIPELINE_ACTIVATIONS, Phase.FORWARD),
    "get_bwd_recv_ops": (Purpose.PIPELINE_GRADIENTS, Phase.BACKWARD),
    "get_bwd_send_ops": (Purpose.PIPELINE_GRADIENTS, Phase.BACKWARD),
}
# Method of a stage that computes a micro-batch, which is its first argument -> phase.
_PASSES: Final = {
    "forward_one_chunk": Phase.FORWARD,
    "backward_one_chunk": Phase.BACKWARD,
    "backward_weight_one_chunk": Phase.BACKWARD,
}
_SCHEDULES: Final = {"PipelineScheduleSingle": "_initialize_stage", "PipelineScheduleMulti": "_initialize_stages"}
"""Class of schedules -> the method that agrees on shapes and sets up the stages, before the first step."""

_patches = Patches()
_stepping: list[Any] = []
"""The schedules whose `step` is running."""


@_patches.installer
def install() -> None:
    """Hook the schedules, the stages and the function that sends a batch."""
    # No import statement: the package is still being imported.
    schedules, stages = sys.modules[f"{_PACKAGE}.schedules"], sys.modules.get(f"{_PACKAGE}.stage")
    for name, initialize in _SCHEDULES.items():
        cls = getattr(schedules, name, None)
        if cls is not None:
            _patches.wrap(cls, "step", _step)
            _patches.wrap(cls, initialize, _initialize)
    _patches.wrap(schedules._PipelineSchedule, "_maybe_compute_loss", progress.wrapper(Phase.FORWARD))
    _patches.wrap(schedules, "_batch_p2p", _send_batch)
    stage = getattr(stages, "_PipelineStageBase", None)
    if stage is not None:
        _patches.wrap(stage, "__init__", _init_stage)
        _patches.wrap(stage, "perform_reduce_grad", progress.wrapper(Phase.BACKWARD, MicroBatch.NONE))
        for name, phase in _PASSES.items():
            _patches.wrap(stage, name, _marking_pass(phase))
        for name, (purpose, phase) in _MESSAGES.items():
            _patches.wrap(stage, name, _marking_messages(purpose, phase))
    _patches.append(torch_tracer.start_listeners, scheduled_stages.write)
    _patches.on_undo(scheduled_stages.clear)
    _patches.on_undo(_stepping.clear)


uninstall = _patches.undo


def stepping() -> bool:
    """Return whether a schedule makes the passes of a step."""
    return bool(_stepping)


@around
def _init_stage(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    with guard():
        # Stages in the default group: only their messages are known to be a pipeline's.
        group = self.group if self.group is not None else dist.group.WORLD
        table = "message_roles" if group is dist.group.WORLD else "roles"
        declared_roles.add(group, "pipeline", "torch.distributed.pipelining.PipelineStage", table)


@around
def _step(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    _stepping.append(self)
    try:
        if not getattr(self, "_has_backward", True) or not torch.is_grad_enabled():
            with progress.marked(Phase.EVALUATION):
                return original(self, *args, **kwargs)
        if progress.step >= 0:
            progress.note_activity()  # before the first step, there is the set-up of the stages
        return original(self, *args, **kwargs)
    finally:
        _stepping.pop()
        progress.micro_batch = -1


@around
def _initialize(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    with progress.marked(Phase.INIT), purposes.Marked(purposes.number(Purpose.PIPELINE_SET_UP)):
        result = original(self, *args, **kwargs)
    scheduled_stages.add(self)
    progress.note_activity()
    return result


def _marking_pass(phase: Phase) -> Wrapper:
    @around
    def compute(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
        progress.micro_batch = _micro_batch(args, kwargs)
        try:
            with progress.marked(phase):
                return original(self, *args, **kwargs)
        finally:
            progress.micro_batch = -1

    return compute


def _micro_batch(args: Any, kwargs: Any) -> int:
    """Return the first argument of a stage's method; -1 if it is not a number."""
    number = next(iter((*args, *kwargs.values())), None)
    return number if isinstance(number, int) else -1


class _MarkedMessage(dist.P2POp):
    """A message that marks the calling thread when its tensor is read within a batch."""

    commtrace_mark: tuple[int, Phase, int]
    """Purpose, phase and micro-batch."""

    @property
    def tensor(self) -> Any:
        if _batches:
            purpose, phase, progress.micro_batch = self.commtrace_mark
            purposes.mark(purpose)
            progress.mark(phase)
        return self.__dict__["tensor"]

    @tensor.setter
    def tensor(self, tensor: Any) -> None:
        self.__dict__["tensor"] = tensor


_batches: list[None] = []


def _marking_messages(purpose: Purpose, phase: Phase) -> Wrapper:
    @around
    def messages(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        try:
            micro_batch = _micro_batch(args, kwargs)
            number = purposes.number(purpose, stage=int(self.stage_index), micro_batch=micro_batch)
            for message in made:
                if type(message) is dist.P2POp:
                    message.__class__ = _MarkedMessage
                    vars(message)["commtrace_mark"] = number, phase, micro_batch
        except Exception:
            count_fault()
        return made

    return messages


@around
def _send_batch(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    _batches.append(None)
    before, micro_batch = progress.present_phase(), progress.micro_batch
    try:
        # Each message replaces the marks, which are restored here.
        with purposes.Marked(purposes.current()), progress.marked(before):
            return original(*args, **kwargs)
    finally:
        progress.micro_batch = micro_batch
        _batches.pop()
