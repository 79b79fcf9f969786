"""The hook of DeepSpeed: steps, micro-batches and phases of its engines, roles of its groups, and its job.

Communication is recorded at torch's operators, except the all_reduce through shared memory, which is hooked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import BufferOpInstruction, DataParallelSchedule, TrainSchedule

from commtrace.current_step import MicroBatch, progress
from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import imported
from commtrace.hooks.recorder_setup import count_fault, guard
from commtrace.hooks.torch import training as torch_training
from commtrace.hooks.torch.c10d_operators import shared_memory_all_reduce
from commtrace.hooks.torch.captured_jobs import Jobs
from commtrace.hooks.torch.dispatcher import Kernels
from commtrace.hooks.torch.passes import Passes
from commtrace.hooks.torch.recording_kernels import kernel_for
from commtrace.job_row import PassRow
from commtrace.patching import Patches, Wrapper, around
from commtrace.schema import Phase, Purpose

from . import engine_job, expert_layers, parameter_states, purpose_sources
from .pipeline_job import note_dtypes
from .roles_by_registry import message_roles, roles

_patches = Patches()
_kernels = Kernels()
_engines = Jobs(engine_job.describe, roles, message_roles)
_passes = Passes(_engines)
_IN_ORDER = TrainSchedule.steps, DataParallelSchedule.steps
"""Schedules that execute each kind of instruction on the micro-batches in their order, each once."""

_PHASES = {
    "LoadMicroBatch": Phase.FORWARD,
    "RecvActivation": Phase.FORWARD,
    "ForwardPass": Phase.FORWARD,
    "SendActivation": Phase.FORWARD,
    "RecvGrad": Phase.BACKWARD,
    "BackwardPass": Phase.BACKWARD,
    "SendGrad": Phase.BACKWARD,
    "ReduceTiedGrads": Phase.BACKWARD,
    "ReduceGrads": Phase.BACKWARD,
    "OptimizerStep": Phase.OPTIMIZER,
}


def _marking_by_stage(numbers: purposes.NumbersBy) -> Wrapper:
    """Return a wrapper that marks the calls of an engine's method by the stage of the engine."""
    return purposes.marking_by("stage_id", read=lambda engine, **_: numbers[engine.stage_id])


_ACTIVATIONS = purposes.NumbersBy(Purpose.PIPELINE_ACTIVATIONS, "stage")
_GRADIENTS = purposes.NumbersBy(Purpose.PIPELINE_GRADIENTS, "stage")
_MARKS = {
    **{f"{verb}Activation": _marking_by_stage(_ACTIVATIONS) for verb in ("Recv", "Send")},
    **{f"{verb}Grad": _marking_by_stage(_GRADIENTS) for verb in ("Recv", "Send")},
    "ReduceTiedGrads": purposes.marking(Purpose.GRADIENTS),
}
"""Instructions of a pipeline that communicate, and not only through methods that have a purpose themselves."""

_OPTIMIZERS = (
    ("zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("bf16_optimizer", "BF16_Optimizer"),
    ("fp16.fused_optimizer", "FP16_Optimizer"),
    ("fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
)
"""Optimizers that an engine makes around the program's own."""
_SET_UP = purposes.number(Purpose.PIPELINE_SET_UP)
_stepping: list[Any] = []
"""The engine, or the optimizer, that takes a step."""


@_patches.installer
def install() -> None:
    """Hook DeepSpeed's engines."""
    for engine in (DeepSpeedEngine, PipelineEngine):
        _patches.wrap(engine, "__init__", _init_of(engine))
    _patches.wrap(DeepSpeedEngine, "_broadcast_model", engine_job.note_partitioned)
    _patches.wrap(DeepSpeedEngine, "forward", _forward)
    _patches.wrap(DeepSpeedEngine, "backward", progress.wrapper(Phase.BACKWARD))
    _patches.wrap(DeepSpeedEngine, "step", progress.wrapper(Phase.OPTIMIZER, MicroBatch.NONE))
    _patches.wrap(DeepSpeedEngine, "_take_model_step", _model_step)
    for module, name in _OPTIMIZERS:
        optimizer = imported(f"deepspeed.runtime.{module}", name)
        if optimizer is not None:
            _patches.wrap(optimizer, "step", _optimizer_step)
    _patches.wrap(PipelineEngine, "_exec_schedule", _exec_schedule)
    _patches.wrap(PipelineEngine, "eval_batch", progress.wrapper(Phase.EVALUATION, MicroBatch.NONE))
    _patches.wrap(PipelineModule, "_synchronize_tied_weights", note_dtypes)
    _patches.wrap(TorchBackend, "__init__", _backend_init)
    # The engine looks up its instructions in this table, not on the class.
    _patches.replace(PipelineEngine, "_INSTRUCTION_MAP", _traced_instructions)
    partitioned = imported("deepspeed.runtime.utils", "PartitionedTensor")
    if partitioned is not None:
        _patches.wrap(partitioned, "full", purposes.marking_each(_purpose_of_partitions, of_caller=True))
    _patches.include(_engines, _passes, purpose_sources, parameter_states, expert_layers)
    _patches.on_undo(torch_training.steps.reset)


uninstall = _patches.undo
"""Restore everything except the kernels, which then only pass calls on."""


def _init_of(engine: type) -> Callable[..., Any]:
    """Return the wrapper of an engine's constructor, which adds the engine.

    PipelineEngine.__init__ calls DeepSpeedEngine.__init__ first, when the stages are not known yet, and then counts the
    parameters of all stages and connects them.
    """

    @around
    def init(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
        with progress.marked(Phase.INIT), torch_training.steps.suspended(), purposes.Marked(purposes.current()):
            original(self, *args, **kwargs)
        if engine is DeepSpeedEngine and isinstance(self, PipelineEngine):
            purposes.mark(_SET_UP)  # until PipelineEngine.__init__ ends
        else:
            torch_training.steps.engine_marks_steps = True
            engine_job.arguments[self] = kwargs.get("args", args[0] if args else None)
            _engines.add(self)

    return init


# ---- training: steps, micro-batches, phases --------------------------------------------------------------------------


@around
def _forward(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    evaluates = not (torch.is_grad_enabled() or self.module.training) and progress.between_steps
    beginning = None
    try:  # not `guard`: fewer functions in a step
        beginning = parameter_states.pass_begins(self)
        if beginning is not None and beginning.gathered is not None:
            _note_gathered(self, beginning.gathered)
    except Exception:
        count_fault()
    if torch.is_grad_enabled():
        progress.note_activity()
        if not isinstance(self, PipelineEngine):
            progress.micro_batch = self.micro_steps % self.gradient_accumulation_steps()
    before = progress.mark(Phase.EVALUATION if evaluates else Phase.FORWARD)  # nor `marked`
    try:
        result = original(self, *args, **kwargs)
    finally:
        progress.unmark(before)
    if not (torch.is_grad_enabled() or isinstance(self, PipelineEngine)):
        with guard():
            _passes.add(self, PassRow(kind="evaluation" if evaluates else "interruption", times=1))
    if beginning is not None and beginning.is_first and torch.is_grad_enabled():
        with guard():
            _note_modules(self)
    return result


def _note_gathered(engine: Any, gathered: PassRow) -> None:
    if not progress.between_steps and progress.step >= 0:
        gathered.kind = "interruption"
    _passes.add(engine, gathered)


def _note_modules(engine: Any) -> None:
    if int(engine.zero_optimization_stage()) == 3:
        for entry in parameter_states.modules_of_first_pass(engine, engine_job.modules_of(engine)):
            _passes.add(engine, entry)


@around
def _model_step(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    progress.note_activity()
    progress.micro_batch = -1
    _stepping.append(self)
    try:
        return original(self, *args, **kwargs)
    finally:
        _stepping.remove(self)
        progress.finish_step()
        if progress.step == 0:
            _engines.write_now()  # the first step may have made groups (MoE)


@around
def _optimizer_step(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Record a step of an engine's optimizer that the program takes itself, as Lightning Fabric does."""
    if _stepping:
        return original(self, *args, **kwargs)
    with progress.marked(Phase.OPTIMIZER):
        return _model_step(original)(self, *args, **kwargs)


@around
def _exec_schedule(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Number the micro-batches of instructions. They name only a buffer; in other schedules, none is known."""
    progress.note_activity()
    schedule = args[0] if args else kwargs.get("pipe_schedule")
    if getattr(type(schedule), "steps", None) in _IN_ORDER:
        progress.begin_batch()
    try:
        return original(self, *args, **kwargs)
    finally:
        progress.end_batch()


def _traced_instructions(instructions: Mapping[type, Callable[..., Any]]) -> dict[type, Callable[..., Any]]:
    return {instruction: _traced_instruction(instruction, execute) for instruction, execute in instructions.items()}


def _traced_instruction(instruction: type, execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instruction that sets phase and micro-batch, and marks messages with their purpose."""
    name = instruction.__name__
    marked = _MARKS[name](execute) if name in _MARKS else execute
    micro_batch = MicroBatch.COUNTED if issubclass(instruction, BufferOpInstruction) else MicroBatch.NONE
    return progress.wrapper(_PHASES.get(name, Phase.OTHER), micro_batch)(marked)


def _purpose_of_partitions(engine: Any, tensor: Any, *_: Any, **__: Any) -> int:
    """Return the purpose of gathering what tensor-parallel ranks received in parts from another stage."""
    if not isinstance(engine, PipelineEngine):
        return 0
    own = tensor.local_data.untyped_storage()._cdata
    received = engine.grad_layer if isinstance(engine.grad_layer, tuple | list) else ()
    is_gradient = any(part is not None and part.untyped_storage()._cdata == own for part in received)
    return (_GRADIENTS if is_gradient else _ACTIVATIONS)[engine.stage_id]


# ---- the all_reduce through shared memory ----------------------------------------------------------------------------


@around
def _backend_init(original: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    operator = shared_memory_all_reduce()
    if operator is not None and not _kernels:
        _kernels.add("deepspeed", operator.variant, kernel_for(operator))
