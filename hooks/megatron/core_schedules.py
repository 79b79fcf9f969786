"""The hook of Megatron-Core's schedules: steps, phases and micro-batches, and the job.

A schedule makes the forward and backward passes of one step on every stage of a pipeline, so it begins the step on all
ranks. Apart from forward steps and messages, its calls belong to backward: they reduce the gradients. If it runs a
forward and a backward pass together (overlap_moe_expert_parallel_comm), autograd and the stack frames show the phase.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from commtrace.current_step import progress
from commtrace.hooks.recorder_setup import guard
from commtrace.hooks.torch import captured_jobs, marked_batches
from commtrace.hooks.torch.captured_jobs import Jobs
from commtrace.hooks.torch.model_facts import architecture, available, buffers, parameters
from commtrace.job_row import JobRow
from commtrace.patching import Patches, around
from commtrace.schema import Phase

_PACKAGE: Final = "megatron.core.pipeline_parallel"
_SCHEDULES: Final = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)

_patches = Patches()
_rows: weakref.WeakKeyDictionary[Any, JobRow] = weakref.WeakKeyDictionary()
_models = Jobs(lambda model: _rows[model], lambda model: iter(()))
_backward_numbers: Iterator[int] = itertools.repeat(-1)


@_patches.installer
def install() -> None:
    """Hook the schedules and their messages."""
    schedules, messages = sys.modules[f"{_PACKAGE}.schedules"], sys.modules[f"{_PACKAGE}.p2p_communication"]
    for name in _SCHEDULES:
        _patches.wrap(schedules, name, _schedule)
    _patches.wrap(schedules, "forward_step", _forward_step)
    _patches.wrap(schedules, "backward_step", _backward_step)
    _patches.wrap(getattr(messages, "P2PCommunicator", messages), "_communicate", _communicate)
    _patches.include(_models, marked_batches)
    _patches.on_undo(_rows.clear)


uninstall = _patches.undo


@around
def _schedule(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    global _backward_numbers
    progress.micro_batch = -1
    if kwargs.get("forward_only"):
        with progress.marked(Phase.EVALUATION):
            return original(*args, **kwargs)
    _note_model(kwargs)
    progress.note_activity()
    # The micro-batch of a backward pass in an interleaved schedule is not observed.
    _backward_numbers = itertools.repeat(-1) if "with_interleaving" in original.__name__ else itertools.count()
    overlaps_passes = getattr(getattr(_chunks(kwargs)[0], "config", None), "overlap_moe_expert_parallel_comm", False)
    with contextlib.nullcontext() if overlaps_passes else progress.marked(Phase.BACKWARD):
        return original(*args, **kwargs)


@around
def _forward_step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    number = kwargs.get("current_microbatch")
    return _in_micro_batch(-1 if number is None else number, Phase.FORWARD, original, args, kwargs)


@around
def _backward_step(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return _in_micro_batch(next(_backward_numbers), Phase.BACKWARD, original, args, kwargs)


def _in_micro_batch(number: int, phase: Phase, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if progress.marked_phase != Phase.EVALUATION:
        progress.micro_batch = number
    try:
        with progress.marked(phase):
            return original(*args, **kwargs)
    finally:
        progress.micro_batch = -1


# ---- messages --------------------------------------------------------------------------------------------------------


@around
def _communicate(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    phases = list(_phases(kwargs))
    return marked_batches.send(phases, original, *args, **kwargs) if phases else original(*args, **kwargs)


def _phases(exchange: Any) -> Iterator[Phase]:
    """Yield the phases of an exchange's messages, in the order of Megatron's batches."""
    if exchange.get("tensor_send_prev") is not None:
        yield Phase.BACKWARD
    if exchange.get("recv_prev"):
        yield Phase.FORWARD
    if exchange.get("tensor_send_next") is not None:
        yield Phase.FORWARD
    if exchange.get("recv_next"):
        yield Phase.BACKWARD


# ---- the job ---------------------------------------------------------------------------------------------------------


def _note_model(arguments: Any) -> None:
    if captured_jobs.any_engine():
        return
    with guard():
        chunks = _chunks(arguments)
        _rows[chunks[0]] = _describe(chunks, arguments)
        _models.add(chunks[0])


def _chunks(arguments: Any) -> Sequence[Any]:
    """Return the model chunks on this rank: several in an interleaved schedule."""
    model = arguments.get("model")
    return model if isinstance(model, list | tuple) and model else [model]


def _describe(chunks: Sequence[Any], arguments: Any) -> JobRow:
    state: Any = sys.modules["megatron.core.parallel_state"]
    model = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    innermost = chunks[0]
    # DistributedDataParallel and Float16Module wrap the model.
    while isinstance(getattr(innermost, "module", None), torch.nn.Module):
        innermost = innermost.module
    return JobRow(
        source="megatron",
        engine=type(innermost).__name__,
        data_parallel_size=available(lambda: state.get_data_parallel_world_size()),
        tensor_parallel_size=available(lambda: state.get_tensor_model_parallel_world_size()),
        pipeline_stages=available(lambda: state.get_pipeline_model_parallel_world_size()),
        context_parallel_size=available(lambda: state.get_context_parallel_world_size()),
        expert_parallel_size=available(lambda: state.get_expert_model_parallel_world_size()),
        model_chunks=len(chunks),
        gradient_accumulation_steps=available(lambda: int(arguments["num_microbatches"])),
        micro_batch_size=available(lambda: int(arguments["micro_batch_size"])),
        parameters=available(lambda: parameters(model)),
        buffers=available(lambda: buffers(model)),
        model=available(lambda: architecture(model)),
    )
