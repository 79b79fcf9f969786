"""From a `c10d::` call to a record: what the hooks of torch share while a recorder runs."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from commtrace.hooks.c10d_operators import Operator
from commtrace.hooks.call_site import CallSites
from commtrace.hooks.groups import Group, Groups
from commtrace.identity import Member, member_from_environment
from commtrace.progress import progress
from commtrace.recorder import Call, Recorder
from commtrace.schema import Clock, Flag, Phase

now: Final = time.monotonic_ns
SAMPLE_MASK: Final = 15  # the cost of one call in sixteen is measured

_graph_task: Final = torch._C._current_graph_task_id
_REDUCE_OPS: Final = {int(value): name for name, value in dist.ReduceOp.RedOpType.__members__.items()}  # type: ignore[attr-defined]
_FORWARD, _BACKWARD, _INIT = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.INIT)
_ASYNC, _COALESCED, _OBJECT, _SPARSE, _UNEVEN = (
    int(flag) for flag in (Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.SPARSE, Flag.UNEVEN)
)


def member() -> Member:
    """This process among all, from the default process group; without one, from the launcher."""
    if not dist.is_initialized():
        return member_from_environment()
    return Member(dist.get_rank(), dist.get_world_size(), _agree)


def _agree(proposal: str) -> str:
    try:
        store = distributed_c10d._get_default_store()
        return str(store.compare_set("commtrace/run", "", proposal).decode())
    except (RuntimeError, ValueError, NotImplementedError):
        return proposal  # a store that cannot (a fake one); each process then stands for itself


def is_fake(tensor: torch.Tensor) -> bool:
    """A compiler tracing the program, not communication."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


_current: TorchTracer | None = None


def current() -> TorchTracer | None:
    """The tracer of this process's recorder, once there is one."""
    return _current


def start(recorder: Recorder) -> TorchTracer:
    """The tracer for a recorder that has just begun."""
    global _current
    tracer = _current
    if tracer is None or tracer.recorder is not recorder:
        tracer = _current = TorchTracer(recorder)
        recorder.each_drain.append(tracer.release)
        for listener in started:
            listener(tracer)
    return tracer


started: list[Callable[[TorchTracer], None]] = []
"""Called with each new tracer: by hooks that know roles and jobs before the first call is made."""


class Pending(weakref.ref[Any]):
    """Calls whose end shows in a Work. Weakly: a Work that is kept alive pins its tensors."""

    __slots__ = ("calls", "cost", "key", "on_host")

    key: int
    calls: list[Call]
    on_host: bool
    cost: int


class Batch:
    """Calls between _start_coalescing and _end_coalescing."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[Call] = []
        self.on_host = False


class Entry:
    """A call between its beginning and its return."""

    __slots__ = ("batch", "measured", "on_host", "pending", "slot", "tracer")

    def __init__(self, tracer: TorchTracer, slot: int, on_host: bool, batch: Batch | None) -> None:
        self.tracer, self.slot, self.on_host, self.batch = tracer, slot, on_host, batch
        self.pending: Pending | None = None

    def failed(self, t_return: int) -> None:
        """The operator raised."""
        self.tracer.recorder.failed(self.slot, t_return)

    def after(self, operator: Operator, args: Sequence[Any], result: Any, t_return: int) -> None:
        """The operator returned `result`: its outputs and a Work, or a Work alone, or neither."""
        tracer, recorder = self.tracer, self.tracer.recorder
        if self.batch is not None:
            call = recorder.returned(self.slot, t_return, observable=True)
            if call is not None:
                self.batch.calls.append(call)
                self.batch.on_host |= self.on_host
            return
        if operator.blocking:
            call = recorder.returned(self.slot, t_return, observable=True)
            if call is not None:
                recorder.ended(call, 0, t_return, Clock.RETURN)
            return
        boxed = result[-1] if isinstance(result, tuple) else result
        work = None if boxed is None else dist.Work.unbox(boxed)  # type: ignore[attr-defined]
        call = recorder.returned(self.slot, t_return, observable=work is not None)
        if call is None:
            return
        if tracer.in_functional():
            tracer.await_tensors(operator.outputs(args), call, self.on_host)
        else:
            self.pending = tracer.await_work(work, [call], self.on_host)

    def cost(self, ns: int) -> None:
        """What this call cost so far; the wait adds its part, if there is one to come."""
        if self.pending is not None:
            self.pending.cost = ns
        else:
            self.tracer.recorder.cost_samples.append(ns)


class TorchTracer:
    """Everything that the hooks of torch keep for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.groups = Groups(recorder.tables)
        self._sites = CallSites(recorder.tables) if recorder.sites else None
        self._walker = self._sites or CallSites(recorder.tables)
        self._kinds: dict[tuple[str, torch.dtype | None, int], int] = {}
        self._pending: dict[int, Pending] = {}
        self._tensors: dict[int, tuple[Call, bool]] = {}
        self._batches: dict[int, Batch] = {}
        self._batch_numbers = itertools.count(1)
        self._functional = threading.local()
        # Works that their callers may not have yet; each is dropped after two drains at the latest.
        self._fresh: dict[int, Any] = {}
        self._old: dict[int, Any] = {}

    # ---- before the call ------------------------------------------------------------------------------------------

    def before(self, operator: Operator, args: Sequence[Any]) -> Entry | None:
        """Record that a call begins; None for a call that is not communication, or that found the ring full."""
        recorder = self.recorder
        group = self.groups.of(operator.group(args))
        size = operator.measure(args, group.size, group.rank)
        tensor = size.tensor
        if tensor is not None and is_fake(tensor):
            return None
        flags = _UNEVEN if size.uneven else 0
        if operator.async_at is not None and (operator.async_at >= len(args) or args[operator.async_at]):
            flags |= _ASYNC  # the schema's default, which does not arrive
        if tensor is not None and tensor.layout is not torch.strided:
            flags |= _SPARSE
        batch = self._batches.get(group.number) if self._batches else None
        if batch is not None or operator.coalesced:
            flags |= _COALESCED
        peer, tag, seq = self._addressing(operator, args, group)
        site, phase, is_object = self._whereabouts()
        if is_object:
            flags |= _OBJECT
        slot = recorder.begin(
            self._kind(operator, args, tensor), group.number, seq, size.payload, size.local, peer, tag,
            site, progress.step, progress.micro_batch, batch.number if batch is not None else 0, phase, flags,
        )  # fmt: skip
        if slot < 0:
            return None
        return Entry(self, slot, tensor is None or tensor.is_cpu, batch)

    def _kind(self, operator: Operator, args: Sequence[Any], tensor: torch.Tensor | None) -> int:
        reduce_op = -1 if operator.reduce_op_at is None else args[operator.reduce_op_at].op()
        dtype = None if tensor is None or operator.op == "barrier" else tensor.dtype
        key = operator.variant, dtype, reduce_op
        kind = self._kinds.get(key)
        if kind is None:
            row = {
                "op": operator.op,
                "variant": operator.variant,
                "api": "torch",
                "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
                "reduce_op": None if reduce_op < 0 else _REDUCE_OPS.get(reduce_op, str(reduce_op)),
            }
            kind = self._kinds[key] = self.recorder.tables.number("kinds", key, lambda: row)
        return kind

    def _addressing(self, operator: Operator, args: Sequence[Any], group: Group) -> tuple[int, int, int]:
        """(peer as a global rank, tag, sequence number)."""
        peer = -1 if operator.peer_at is None else group.global_rank(args[operator.peer_at])
        if not operator.point_to_point:
            return peer, -1, next(group.collectives)
        tag = -1 if operator.tag_at is None else int(args[operator.tag_at])
        own = group.global_rank(group.rank)
        source, destination = (own, peer) if operator.op == "send" else (peer, own)
        return peer, tag, group.message(source, destination, tag)

    def _whereabouts(self) -> tuple[int, int, bool]:
        """(site, phase, carries objects)."""
        marks = progress.marks
        if _graph_task() != -1:
            phase = _BACKWARD if not marks or marks[-1] != _INIT else _INIT
        else:
            phase = int(marks[-1]) if marks else -1
        if self._sites is None and phase >= 0:
            site, is_object, forward = 0, False, False
        else:
            site, is_object, forward = self._walker.find(3, in_forward=phase < 0)
        if phase < 0:
            phase = _FORWARD if forward else int(progress.unmarked())
        if phase == _BACKWARD or (phase == _FORWARD and torch.is_grad_enabled()):
            progress.activity()
        return site if self._sites is not None else 0, phase, is_object

    # ---- the end of a call ----------------------------------------------------------------------------------------

    def await_work(self, work: Any, calls: list[Call], on_host: bool) -> Pending:
        """These calls end when `work` does."""
        pending = Pending(work, self._died)
        pending.key, pending.calls, pending.on_host, pending.cost = id(work), calls, on_host, 0
        self._pending[pending.key] = pending
        self._fresh[threading.get_ident()] = work
        return pending

    def pending(self, work: Any) -> Pending | None:
        """The calls that end with this Work, if any are known."""
        pending = self._pending.get(id(work))
        return pending if pending is not None and pending() is work else None

    def waited(self, work: Any, t_wait: int, t_end: int) -> None:
        """A wait for this Work came back. On a device it only orders streams, and is no end."""
        pending = self._pending.pop(id(work), None)
        if pending is None:
            return
        for call in pending.calls:
            if pending.on_host:
                self.recorder.ended(call, t_wait, t_end, Clock.WAIT)
            else:
                self.recorder.unobservable(call, t_wait)
        self._fresh.pop(threading.get_ident(), None)
        if pending.cost:
            self.recorder.cost_samples.append(pending.cost + now() - t_end)

    def polled(self, work: Any, t_end: int) -> None:
        """A poll of this Work said that it is complete."""
        pending = self.pending(work)
        if pending is not None and pending.on_host:
            del self._pending[id(work)]
            for call in pending.calls:
                self.recorder.ended(call, 0, t_end, Clock.TEST)

    def wait_failed(self, work: Any) -> None:
        """A wait for this Work raised."""
        pending = self._pending.pop(id(work), None)
        for call in pending.calls if pending is not None else ():
            self.recorder.failed(call)

    def _died(self, pending: weakref.ref[Any]) -> None:
        """Nobody in Python holds this Work any more: who waits for it, if anyone, is C++."""
        assert isinstance(pending, Pending)
        if self._pending.get(pending.key) is pending:
            del self._pending[pending.key]
            for call in pending.calls:
                self.recorder.unobservable(call)
            if pending.cost:
                self.recorder.cost_samples.append(pending.cost)

    def release(self) -> None:
        """By the drain thread: callers have had time to take their Works."""
        self._old, self._fresh = self._fresh, {}

    # ---- functional collectives, whose waits name a tensor ---------------------------------------------------------

    @contextmanager
    def functional(self) -> Iterator[None]:
        """Calls of this thread within are waited for by tensor."""
        self._functional.on = True
        try:
            yield
        finally:
            self._functional.on = False

    def in_functional(self) -> bool:
        """This thread is within a functional collective."""
        return getattr(self._functional, "on", False)

    def await_tensors(self, tensors: list[torch.Tensor], call: Call, on_host: bool) -> None:
        """The call ends when a wait for one of these tensors does."""
        for tensor in tensors:
            if tensor.numel():
                self._tensors[tensor.data_ptr()] = call, on_host

    def tensor_waited(self, tensor: torch.Tensor, t_wait: int, t_end: int) -> None:
        """A wait for this tensor came back."""
        if is_fake(tensor):
            return
        call, on_host = self._tensors.pop(tensor.data_ptr(), (None, False))
        if call is not None and on_host:
            self.recorder.ended(call, t_wait, t_end, Clock.WAIT)
        elif call is not None:
            self.recorder.unobservable(call, t_wait)

    # ---- coalescing ------------------------------------------------------------------------------------------------

    def batch_begins(self, pg: Any) -> None:
        """Calls on this group belong together until `batch_ends`."""
        self._batches[self.groups.of(pg).number] = Batch(next(self._batch_numbers))

    def batch_ends(self, pg: Any, work: Any) -> None:
        """The batch is issued; its one Work (None: the backend has waited itself, or on a stream) ends its calls."""
        batch = self._batches.pop(self.groups.of(pg).number, None)
        if batch is None or not batch.calls:
            return
        if work is not None:
            self.await_work(work, batch.calls, batch.on_host)
        else:
            for call in batch.calls:
                self.recorder.unobservable(call)
