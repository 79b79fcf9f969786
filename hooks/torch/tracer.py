"""Torch tracer: records `c10d::` calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from commtrace import reduce_ops
from commtrace.current_step import progress
from commtrace.hooks import call_context, call_site, purposes
from commtrace.hooks.call_context import CallContext
from commtrace.hooks.groups import Group
from commtrace.hooks.recorder_setup import Tracers
from commtrace.identity import RankIdentity
from commtrace.recording.recorder import Recorder
from commtrace.schema import Clock, Flag

from .c10d_operators import Operator
from .call_ends import Batch, Batches, PendingWork, TensorWaits, Works
from .process_groups import TorchGroups

now: Final = time.monotonic_ns

call_context.register_autograd(torch._C._current_graph_task_id, torch.is_grad_enabled)
_unbox_work: Final = dist.Work.unbox
_REDUCE_OPS: Final[dict[int, str]] = {int(op): name for name, op in reduce_ops.RED_OP_TYPE.__members__.items()}
_ASYNC, _COALESCED, _OBJECT, _SPARSE, _UNEVEN = (
    int(flag) for flag in (Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.SPARSE, Flag.UNEVEN)
)


def identity_in_default_group() -> RankIdentity | None:
    """Return the process's rank in the default process group; None without one."""
    if not dist.is_initialized():
        return None
    return RankIdentity(dist.get_rank(), dist.get_world_size(), _agree)


def _agree(proposal: str) -> str:
    try:
        store = distributed_c10d._get_default_store()
        return str(store.compare_set("commtrace/run", "", proposal).decode())
    except (RuntimeError, ValueError, NotImplementedError):
        return proposal  # a store without `compare_set` (a fake one): ranks cannot agree


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fake or meta: a compiler is tracing, and nothing is sent."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


_thread: Final = threading.local()


class functional:  # noqa: N801  (used as a function)
    """Context in which this thread's calls are waited for by tensor, not by Work."""

    def __enter__(self) -> None:
        _thread.functional = getattr(_thread, "functional", 0) + 1

    def __exit__(self, *_: object) -> None:
        _thread.functional -= 1


def _in_functional() -> bool:
    return getattr(_thread, "functional", 0) > 0


class TorchEntry:
    """A call that has begun but not yet returned."""

    __slots__ = ("batch", "first", "on_host", "pending", "slot", "tracer")

    def __init__(self, tracer: TorchTracer, slot: int, on_host: bool, batch: Batch | None, first: bool) -> None:
        self.tracer, self.slot, self.on_host, self.batch, self.first = tracer, slot, on_host, batch, first
        self.pending: PendingWork | None = None

    def returned(self, operator: Operator, args: Sequence[Any], result: Any, t_return: int) -> None:
        """Record that the operator has returned `result`: its outputs and a Work, a Work alone, or neither."""
        tracer, recorder = self.tracer, self.tracer.recorder
        boxed = result[-1] if type(result) is tuple else result
        # There may be no Work: NCCL returns none for a synchronous call, which only orders streams.
        work = None if boxed is None or operator.blocking else _unbox_work(boxed)
        observable = work is not None or operator.blocking or self.batch is not None
        call = recorder.returned(self.slot, t_return, observable=observable)
        if call is None:
            return
        if self.batch is not None:
            self.batch.calls.append(call)
            self.batch.on_host |= self.on_host
        elif operator.blocking:
            recorder.ended(call, 0, t_return, Clock.RETURN)
        elif _in_functional():
            tracer.tensors.add(operator.outputs(args), call, self.on_host)
        else:
            self.pending = tracer.works.add(work, [call], self.on_host)

    def cost(self, ns: int, sampled: bool) -> None:
        """Note this call's cost up to its return. The wait of a sampled call adds its own."""
        if sampled and self.pending is not None:
            self.pending.cost, self.pending.first = ns, self.first
        else:
            self.tracer.recorder.counters.note_cost(ns, sampled=sampled, first=self.first)


class TorchTracer:
    """State of torch's hooks for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.groups = TorchGroups(recorder.tables, recorder.rank_identity.rank)
        self.works = Works(recorder)
        self.tensors = TensorWaits(recorder)
        self.batches = Batches(recorder, self.works)
        self.context = CallContext(recorder)
        self.sites = self.context.sites
        self._kinds: dict[tuple[str, torch.dtype | None, int], int] = {}

    def release(self) -> None:
        """Drop Works and tensors that are kept only briefly. Called by the drain thread."""
        self.works.release()
        self.tensors.release()

    def begin_call(self, operator: Operator, args: Sequence[Any]) -> TorchEntry | None:
        """Record that a call begins. Return None if it is not communication, or if the ring is full."""
        recorder = self.recorder
        tensor = operator.sample(args)
        if tensor is not None and is_fake(tensor):  # before its size is read, which may be symbolic
            return None
        lookups = recorder.tables.lookups
        group = self.groups.get(operator.group(args))
        payload, local, uneven = operator.measure(args, group.size, group.rank)
        peer, tag, seq = self._addressing(operator, args, group)
        site, phase, frame_flags = self.context.find(
            2, _reducer_purpose(operator, tensor), _trained_message(operator, tensor)
        )
        batch = self.batches.of(group.number)
        flags = _flags(operator, args, frame_flags) | (_UNEVEN if uneven else 0)
        if batch is not None or operator.coalesced:
            flags |= _COALESCED
        if tensor is not None and tensor.layout is not torch.strided:
            flags |= _SPARSE
        slot = recorder.begin(
            self._kind(operator, args, tensor), group.number, seq, payload, local, peer, tag,
            site, progress.step, progress.micro_batch, batch.number if batch is not None else 0, phase, flags,
        )  # fmt: skip
        if slot < 0:
            return None
        return TorchEntry(self, slot, tensor is None or tensor.is_cpu, batch, recorder.tables.lookups != lookups)

    def _kind(self, operator: Operator, args: Sequence[Any], tensor: torch.Tensor | None) -> int:
        reduce_op = -1 if operator.reduce_op_at is None else reduce_ops.number(args[operator.reduce_op_at])
        dtype = None if tensor is None or operator.op == "barrier" else tensor.dtype
        return self.kind(operator, dtype, reduce_op)

    def kind(self, operator: Operator, dtype: torch.dtype | None, reduce_op: int) -> int:
        """Return the row of an operator, element type and reduction (-1: the operator takes none)."""
        key = operator.variant, dtype, reduce_op
        kind = self._kinds.get(key)
        if kind is None:
            row = {
                "op": operator.op,
                "variant": operator.variant,
                "api": "torch",
                "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
                "reduce_op": operator.reduce_op if reduce_op < 0 else _REDUCE_OPS.get(reduce_op, str(reduce_op)),
            }
            kind = self._kinds[key] = self.recorder.tables.row_id("kinds", key, lambda: row)
        return kind

    def _addressing(self, operator: Operator, args: Sequence[Any], group: Group) -> tuple[int, int, int]:
        """Return peer (a global rank), tag and sequence number."""
        peer = -1 if operator.peer_at is None else group.global_rank(args[operator.peer_at])
        if not operator.point_to_point:
            return peer, -1, next(group.collectives)
        tag = -1 if operator.tag_at is None else int(args[operator.tag_at])
        own = group.global_rank(group.rank)
        source, destination = (own, peer) if operator.op == "send" else (peer, own)
        return peer, tag, group.message(source, destination, tag)


_tracers: Final = Tracers(TorchTracer)
current: Final = _tracers.current
ensure_tracer_of: Final = _tracers.ensure
start_listeners: Final = _tracers.start_listeners


def _trained_message(operator: Operator, tensor: torch.Tensor | None) -> str:
    """Return what a message shows of the training: "sent", "received", or "" (`CallContext.find`)."""
    if operator.op not in ("send", "recv") or tensor is None:
        return ""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return ""
    if operator.op == "recv":
        return "received"
    return "" if tensor.is_leaf else "sent"


def _reducer_purpose(operator: Operator, tensor: torch.Tensor | None) -> int:
    """Return the purpose of a call if C++ code makes it within autograd; 0: not known."""
    if not progress.reduces_gradients or tensor is None or operator.op != "all_reduce" or _in_functional():
        return 0
    return purposes.GRADIENTS if tensor.is_floating_point() or tensor.is_complex() else purposes.USED_PARAMETERS


def _flags(operator: Operator, args: Sequence[Any], frame_flags: int) -> int:
    flags = _OBJECT if frame_flags & call_site.OBJECT else 0
    if operator.point_to_point:
        # One operator serves blocking and non-blocking calls; the frames show which of the two it is.
        asynchronous = _in_functional() or (frame_flags & call_site.HANDLE and not frame_flags & call_site.BLOCKING)
    else:
        # An argument that equals its default (here: true) is not passed to the kernel.
        asynchronous = operator.async_at is not None and (operator.async_at >= len(args) or args[operator.async_at])
    return flags | _ASYNC if asynchronous else flags
