"""Stages of torch.distributed.pipelining on this rank as schedules set them up: rows of the table `stages`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from commtrace.hooks.recorder_setup import count_fault
from commtrace.job_row import ScheduledStageRow

from . import tracer as torch_tracer
from .tracer import TorchTracer


class ScheduledStages:
    """Rows of stages, kept weakly by stage, and written to the tables of each recorder."""

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Any, ScheduledStageRow] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget all stages."""
        self._rows.clear()

    def add(self, schedule: Any) -> None:
        """Add the stages of a schedule that has set them up, unless it computes no gradients. Never raises."""
        try:
            if not schedule._has_backward:
                return
            single = getattr(schedule, "_stage", None)
            for stage in schedule._stages if single is None else (single,):
                self._rows[stage] = _row(stage, int(schedule._n_microbatches))
            tracer = torch_tracer.current()
            if tracer is not None:
                self.write(tracer)
        except Exception:
            count_fault()

    def write(self, tracer: TorchTracer) -> None:
        """Write the rows to the tables, each once. Never raises."""
        try:
            for known in [*self._rows.values()]:
                tracer.recorder.tables.row_id("stages", str(known.to_json()), known.to_json)
        except Exception:
            tracer.recorder.counters.count_fault()


scheduled_stages: Final = ScheduledStages()


def _row(stage: Any, micro_batches: int) -> ScheduledStageRow:
    received = [tensor for tensor, source in _inputs(stage.args_recv_info[0]) if _is_elsewhere(stage, source)]
    sent = [tensor for tensor, targets in _outputs(stage) for target in targets if _is_elsewhere(stage, target)]
    return ScheduledStageRow(
        stage=int(stage.stage_index),
        micro_batches=micro_batches,
        received=[*map(_bytes, received)],
        sent=[*map(_bytes, sent)],
        gradients_received=[_bytes(tensor) for tensor in sent if _has_gradient(tensor)],
        gradients_sent=[_bytes(tensor) for tensor in received if _has_gradient(tensor)],
    )


def _inputs(infos: Any) -> Iterator[tuple[Any, int]]:
    """Yield the tensors that a stage gets for a micro-batch, and the stage that each comes from."""
    for info in infos:
        source = getattr(info, "source", None)
        if source is not None and not getattr(info, "is_root_arg", False):
            tensor = getattr(info, "tensor_meta", None)
            yield info.buffer if tensor is None else tensor, source


def _outputs(stage: Any) -> Iterator[tuple[Any, list[int]]]:
    """Yield the tensors that a stage returns for a micro-batch, and the stages that each goes to."""
    meta = getattr(stage, "_stage_meta", None)  # since torch 2.12
    outputs = stage.get_outputs_meta() if meta is None else meta.outputs
    for index, tensor in enumerate(outputs):
        yield tensor, [target for target in stage.act_send_info.get(index, ()) if target is not None]


def _is_elsewhere(stage: Any, other: int) -> bool:
    """Return whether another rank has a stage; to one of the same rank, tensors are passed without a message."""
    return bool(stage.stage_index_to_group_rank[other] != stage.group_rank)


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, or of what describes one."""
    return int(math.prod(tensor.shape) * tensor.dtype.itemsize)


def _has_gradient(tensor: Any) -> bool:
    """Return whether a stage sends a gradient of a tensor back: before torch 2.12, of all floating-point ones."""
    is_differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return bool(is_differentiable and (isinstance(tensor, torch.Tensor) or tensor.requires_grad))
