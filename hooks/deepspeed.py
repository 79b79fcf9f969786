"""DeepSpeed: steps, micro-batches and phases of its engines, roles of its groups, and the job it is given.

Its communication itself passes torch's operators and is recorded there, but for the all_reduce through shared memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from commtrace.hooks import torch_tracer, torch_training
from commtrace.hooks.c10d_operators import shared_memory_all_reduce
from commtrace.hooks.deepspeed_job import describe
from commtrace.hooks.patching import Patches
from commtrace.hooks.torch import kernel_for
from commtrace.progress import progress
from commtrace.schema import Phase
from commtrace.session import session

_patches = Patches()
_libraries: list[torch.library.Library] = []
_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_instructions: dict[type, Callable[..., Any]] = {}

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


def install() -> None:
    """Hook DeepSpeed's engines. Does nothing if they are hooked already."""
    if _instructions:
        return
    _patches.wrap(DeepSpeedEngine, "__init__", _building)
    _patches.wrap(PipelineEngine, "__init__", _building)
    _patches.wrap(DeepSpeedEngine, "forward", _forward)
    _patches.wrap(DeepSpeedEngine, "backward", _backward)
    _patches.wrap(DeepSpeedEngine, "step", _step)
    _patches.wrap(DeepSpeedEngine, "_take_model_step", _model_step)
    _patches.wrap(PipelineEngine, "train_batch", _train_batch)
    _patches.wrap(TorchBackend, "__init__", _backend)
    # The engine looks its instructions up in this table, not on the class.
    _instructions.update(PipelineEngine._INSTRUCTION_MAP)
    for instruction, execute in _instructions.items():
        PipelineEngine._INSTRUCTION_MAP[instruction] = _instruction(instruction, execute)
    torch_tracer.started.append(_tell)


def uninstall() -> None:
    """Take everything out again."""
    _patches.undo()
    PipelineEngine._INSTRUCTION_MAP.update(_instructions)
    _instructions.clear()
    while _libraries:
        _libraries.pop()._destroy()  # type: ignore[no-untyped-call]
    torch_training.steps.engine_decides = False


# ---- building: the job and the roles ---------------------------------------------------------------------------------


def _building(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with progress.within(Phase.INIT):
            original(self, *args, **kwargs)
        torch_training.steps.engine_decides = True
        _engines.add(self)
        tracer = torch_tracer.current()
        if tracer is not None and session.recorder is tracer.recorder:
            _tell(tracer)

    return __init__


def _tell(tracer: torch_tracer.TorchTracer) -> None:
    """What is known of engines and groups goes into the tables; rows that are there already are not repeated."""
    try:
        for engine in list(_engines):
            tracer.recorder.tables.number(
                "job", (id(engine), type(engine).__name__), lambda engine=engine: describe(engine)
            )
            for group, role, source in _roles(engine):
                if isinstance(group, torch.distributed.ProcessGroup):
                    tracer.groups.set_role(group, role, source)
    except Exception:
        tracer.recorder.fault()


def _roles(engine: Any) -> Iterator[tuple[Any, str, str]]:
    """(group, role, who says so), from DeepSpeed's registries, the most telling last."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    registry = "deepspeed.utils.groups"
    yield getattr(engine, "seq_data_parallel_group", None), "data", "DeepSpeedEngine.seq_data_parallel_group"
    yield getattr(engine, "data_parallel_group", None), "data", "DeepSpeedEngine.data_parallel_group"
    yield groups._DATA_PARALLEL_GROUP, "data", registry
    yield groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, "data", registry
    for name, role in (
        ("_ALL_TO_ALL_GROUP", "data"),
        ("_EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("_EXPERT_PARALLEL_GROUP", "expert"),
    ):
        for group in getattr(groups, name).values():
            yield group, role, registry
    yield parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP, "data", parallel_state_sp.__name__
    yield parallel_state_sp._SEQUENCE_PARALLEL_GROUP, "sequence", parallel_state_sp.__name__
    yield groups._TENSOR_MODEL_PARALLEL_GROUP, "tensor", registry
    yield from _mpu_roles(getattr(engine, "mpu", None))


def _mpu_roles(mpu: Any) -> Iterator[tuple[Any, str, str]]:
    """From a Megatron-style unit; a pipeline's grid is one, too."""
    ways = (
        ("get_data_parallel_group", "data"),
        ("get_pipe_parallel_group", "pipeline"),
        ("get_pipeline_model_parallel_group", "pipeline"),
        ("get_slice_parallel_group", "tensor"),
        ("get_tensor_model_parallel_group", "tensor"),
    )
    for name, role in ways:
        getter = getattr(mpu, name, None)
        if getter is not None:
            try:
                yield getter(), role, f"{type(mpu).__name__}.{name}"
            except (AssertionError, AttributeError, TypeError):
                continue  # not set up


# ---- training: steps, micro-batches, phases --------------------------------------------------------------------------


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            progress.activity()
            if not isinstance(self, PipelineEngine):
                progress.micro_batch = self.micro_steps % self.gradient_accumulation_steps()
        with progress.within(Phase.FORWARD):
            return original(self, *args, **kwargs)

    return forward


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with progress.within(Phase.BACKWARD):
            return original(self, *args, **kwargs)

    return backward


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        progress.micro_batch = -1
        with progress.within(Phase.OPTIMIZER):
            return original(self, *args, **kwargs)

    return step


def _model_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        progress.activity()
        progress.micro_batch = -1
        try:
            return original(self, *args, **kwargs)
        finally:
            progress.step_finished()
            if progress.step == 0:  # groups that the first step has made, MoE's for instance
                tracer = torch_tracer.current()
                if tracer is not None and session.recorder is tracer.recorder:
                    _tell(tracer)

    return _take_model_step


def _train_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        progress.activity()
        self._commtrace_buffers = _Buffers()
        return original(self, *args, **kwargs)

    return train_batch


class _Buffers:
    """Which micro-batch each pipeline buffer of a stage holds: instructions name the buffer only."""

    def __init__(self) -> None:
        self._holds: dict[int, int] = {}
        self._filled: set[int] = set()
        self._next = 0

    def micro_batch(self, instruction: str, buffer: int) -> int:
        """Of an instruction on a buffer, which it may fill with the next micro-batch."""
        filling = instruction in ("LoadMicroBatch", "RecvActivation")
        if filling and buffer not in self._filled:
            self._filled.add(buffer)  # first of the two that may fill it
            self._holds[buffer] = self._next
            self._next += 1
        if instruction == "ForwardPass":
            self._filled.discard(buffer)
        return self._holds.get(buffer, -1)


def _instruction(instruction: type, execute: Callable[..., Any]) -> Callable[..., Any]:
    name = instruction.__name__
    phase = _PHASES.get(name, Phase.OTHER)

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffers = getattr(self, "_commtrace_buffers", None)
        if buffers is not None and "buffer_id" in kwargs and torch.is_grad_enabled():
            progress.micro_batch = buffers.micro_batch(name, kwargs["buffer_id"])
        elif "buffer_id" not in kwargs:
            progress.micro_batch = -1
        with progress.within(phase):
            return execute(self, *args, **kwargs)

    return traced


assert {name for name in _PHASES if not hasattr(schedule, name)} == set()


# ---- the all_reduce through shared memory ----------------------------------------------------------------------------


def _backend(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        operator = shared_memory_all_reduce()
        if operator is not None and not _libraries:
            library = torch.library.Library("deepspeed", "IMPL")
            library.impl(operator.variant, kernel_for(operator), "BackendSelect", with_keyset=True)
            _libraries.append(library)

    return __init__
