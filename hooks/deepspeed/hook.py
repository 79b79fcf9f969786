"""The hook of DeepSpeed: steps, micro-batches and phases of its engines, roles of its groups, and its job.

Communication is recorded at torch's operators, except the all_reduce through shared memory, which is hooked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import BufferOpInstruction, DataParallelSchedule, TrainSchedule

from commtrace.current_step import MicroBatch, progress
from commtrace.hooks import purposes
from commtrace.hooks.marked_sources import imported
from commtrace.hooks.recorder_setup import guard
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
"""`steps` of schedules that execute each kind of instruction on the micro-batches in their order, each once."""

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
"""Optimizers that an engine makes around the program's own. A program may call their `step` itself, as Lightning Fabric
does."""
_STEP: Final = {"begins_step": True, "finishes_step": True}
_SET_UP = purposes.number(Purpose.PIPELINE_SET_UP)


@_patches.installer
def install() -> None:
    """Hook DeepSpeed's engines."""
    for engine in (DeepSpeedEngine, PipelineEngine):
        _patches.wrap(engine, "__init__", _init_of(engine))
    _patches.wrap(DeepSpeedEngine, "_broadcast_model", engine_job.note_partitioned)
    _patches.wrap(DeepSpeedEngine, "forward", _forward)
    _patches.wrap(DeepSpeedEngine, "backward", progress.wrapper(Phase.BACKWARD))
    _patches.wrap(DeepSpeedEngine, "step", progress.wrapper(Phase.OPTIMIZER, MicroBatch.NONE))
    _patches.wrap(DeepSpeedEngine, "_take_model_step", progress.wrapper(None, MicroBatch.NONE, **_STEP))
    for module, name in _OPTIMIZERS:
        optimizer = imported(f"deepspeed.runtime.{module}", name)
        if optimizer is not None:
            _patches.wrap(optimizer, "step", progress.wrapper(Phase.OPTIMIZER, MicroBatch.NONE, **_STEP))
    _patches.wrap(PipelineEngine, "train_batch", progress.wrapper(begins_step=True))
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
    _patches.append(progress.first_step_listeners, _engines.write_now)  # that step may have made groups (MoE)
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
            parameter_states.add(self)

    return init


# ---- training: steps, micro-batches, phases --------------------------------------------------------------------------


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pass. In training, nothing follows the call of `train`, and `around` adds no function: both would cost."""
    train = progress.wrapper(Phase.FORWARD, begins_step=True)(original)
    evaluate = _pass_without_gradients(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled()
        if trains and not isinstance(self, PipelineEngine):
            progress.micro_batch = self.micro_steps % self.gradient_accumulation_steps()
        run = train if trains else evaluate
        if id(self) in parameter_states.to_note:
            return _noted_pass(run, self, *args, **kwargs)
        return run(self, *args, **kwargs)

    return forward


@around
def _pass_without_gradients(original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    evaluates = progress.between_steps and not self.module.training
    with progress.marked(Phase.EVALUATION if evaluates else Phase.FORWARD):
        result = original(self, *args, **kwargs)
    if not isinstance(self, PipelineEngine):
        with guard():
            _passes.add(self, PassRow(kind="evaluation" if evaluates else "interruption", times=1))
    return result


def _noted_pass(run: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> Any:
    is_first = False
    with guard():
        is_first, gathered = parameter_states.pass_begins(engine)
        if gathered is not None:
            _note_gathered(engine, gathered)
    result = run(engine, *args, **kwargs)
    if is_first and torch.is_grad_enabled():
        with guard():
            _note_modules(engine)
    return result


def _note_gathered(engine: Any, gathered: PassRow) -> None:
    if not progress.between_steps and progress.step >= 0:
        gathered.kind = "interruption"
    _passes.add(engine, gathered)


def _note_modules(engine: Any) -> None:
    if int(engine.zero_optimization_stage()) == 3:
        for entry in parameter_states.modules_of_first_pass(engine, engine_job.modules_of(engine)):
            _passes.add(engine, entry)


def _exec_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Number the micro-batches of instructions. They name only a buffer; in other schedules, none is known."""

    def exec_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedule = args[0] if args else kwargs.get("pipe_schedule")
        if getattr(type(schedule), "steps", None) in _IN_ORDER:
            progress.begin_batch()
        try:
            return original(self, *args, **kwargs)
        finally:
            progress.end_batch()

    return exec_schedule


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
