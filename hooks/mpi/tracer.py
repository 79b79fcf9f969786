"""The tracer of mpi4py: turns calls of its methods into records."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from commtrace import identity
from commtrace.hooks import call_site, recorder_setup
from commtrace.hooks.call_context import CallContext
from commtrace.identity import RankIdentity
from commtrace.progress import progress
from commtrace.recording.recorder import Recorder
from commtrace.recording.session import session
from commtrace.schema import Clock, Flag

from .buffers import learn_predefined, simple
from .communicators import MpiGroup, MpiGroups
from .methods import NOTHING, Arguments, Message, Method, Size
from .requests import Receipt, Requests
from .windows import Windows

now: Final = time.monotonic_ns
SAMPLE_MASK: Final = 15  # the cost of one call in sixteen is measured

_ASYNC, _COALESCED, _OBJECT, _UNEVEN = (int(flag) for flag in (Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.UNEVEN))
_PREDEFINED_OPS: Final = {name: op for name, op in vars(MPI).items() if isinstance(op, MPI.Op) and op != MPI.OP_NULL}
_REDUCE_OPS: Final = {id(op): name for name, op in _PREDEFINED_OPS.items()}
_OBJECT_SIZE: Final = Size(0, dtype="object")  # until mpi4py has pickled
_pickled: Final = threading.local()
# Whether the status of an Isendrecv request is that of its receive. MPICH 5.0.2 leaves numbers of other messages in it.
_EXCHANGE_HAS_STATUS: Final = MPI.get_vendor()[0] == "Open MPI"


def identity_in_world() -> RankIdentity | None:
    """Return the process's rank in MPI.COMM_WORLD; None if that has one process only (started by torchrun, say)."""
    if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1:
        return RankIdentity(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), _agree)
    return None


def _agree(proposal: str) -> str:
    """Return a run name on which all ranks agree without a message: MPI has no store, and a collective may not end."""
    size = str(MPI.COMM_WORLD.Get_size())
    if size in (os.environ.get("MPI_LOCALNRANKS"), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")):
        starter = identity.mpi_starter()  # the parent of all ranks, as all are on this host
        return f"mpi-{starter}" if starter else proposal
    return "" if identity.launcher_run_name() else proposal


ended: list[Callable[[], None]] = []
"""Called when a tracer's session has ended."""


def begin() -> MpiTracer | None:
    """Return the tracer of this process, made with the first call; None if tracing is off or MPI is not initialized."""
    if session.settings is None and session.recorder is None:
        return None
    if MPI.Is_finalized() or not MPI.Is_initialized():
        return None
    recorder = session.recorder or recorder_setup.begin()
    return None if recorder is None else _tracers.start(recorder)


class CallPart(NamedTuple):
    """One record of a call: most calls have one, a Sendrecv has two."""

    slot: int
    receipt: Receipt | None  # of a message that is received


class Objects:
    """The bytes of each object that was pickled and unpickled in one call."""

    __slots__ = ("dumped", "loaded", "outer")

    def __init__(self) -> None:
        self.dumped: list[int] = []
        self.loaded: list[int] = []
        self.outer: Objects | None = None


def pickling() -> Objects | None:
    """Return the objects of the call in which this thread pickles; None outside of a call."""
    return getattr(_pickled, "objects", None)


class MethodPlan(NamedTuple):
    """What is known before a call; for a persistent request, before every start."""

    method: Method
    group: MpiGroup
    flags: int
    parts: list[tuple[int, int, int, int, int, bool]]  # (kind, payload, local, peer, tag, whether it receives)


class MpiEntry:
    """A call that has begun and not returned yet."""

    __slots__ = ("first", "objects", "parts", "plan", "status", "tracer")

    def __init__(self, tracer: MpiTracer, plan: MethodPlan, parts: list[CallPart]) -> None:
        self.tracer, self.plan, self.parts = tracer, plan, parts
        self.first = False  # something was looked up for the first time
        self.status: Any = None
        self.objects: Objects | None = None

    @property
    def sampled(self) -> bool:
        """Whether the cost of this call is measured."""
        return self.parts[0].slot & SAMPLE_MASK == 0

    def enter(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments to call the method with: a new status if one is needed and the program passes none."""
        method = self.plan.method
        if method.objects:
            self.objects = Objects()
            self.objects.outer = pickling()
            _pickled.objects = self.objects
        at = method.status_at
        if at is None or not method.receives:
            return args, kwargs
        given = kwargs.get("status") if len(args) <= at else args[at]
        self.status = given if given is not None else MPI.Status()
        if given is None and len(args) > at:
            return (*args[:at], self.status, *args[at + 1 :]), kwargs
        return args, kwargs if given is not None else {**kwargs, "status": self.status}

    def exit(self) -> None:
        """Note that the method has returned or raised."""
        if self.objects is not None:
            _pickled.objects = self.objects.outer

    def failed(self, t_return: int) -> None:
        """Record that the method raised an exception."""
        for part in self.parts:
            self.tracer.recorder.failed(part.slot, t_return)

    def lost(self, t_return: int) -> None:
        """Record that the end of this call cannot be observed, as the hook failed."""
        for part in self.parts:
            self.tracer.recorder.lost(part.slot, t_return)

    def after(self, result: Any, t_return: int) -> None:
        """Record that the method returned `result`: a Request if it does not block."""
        tracer, method = self.tracer, self.plan.method
        if self.objects is not None:
            self._measure_objects(self.objects)
        if self.status is not None:
            for slot, receipt in self.parts:
                if receipt is not None:
                    receipt.arrived(tracer.recorder, slot, self.status)
        calls = [tracer.recorder.returned(part.slot, t_return, observable=True) for part in self.parts]
        if method.returns:
            tracer.requests.add(result, [(call, part.receipt) for call, part in zip(calls, self.parts, strict=True)])
        elif method.one_sided:
            tracer.windows.add(self.plan.group, self.plan.parts[0][3], calls[0])
        else:
            for call in calls:
                if call is not None:
                    tracer.recorder.ended(call, 0, t_return, Clock.RETURN)

    def _measure_objects(self, objects: Objects) -> None:
        if self.plan.method.messages:
            for slot, receipt in self.parts:
                if receipt is None:
                    self.tracer.recorder.measured(slot, sum(objects.dumped))
        else:
            payload, local = object_size(self.plan.method.op, self.plan.group, objects)
            self.tracer.recorder.measured(self.parts[0].slot, payload, local)


def object_size(op: str, group: MpiGroup, objects: Objects) -> tuple[int, int]:
    """Return payload and own share of a collective that pickled and unpickled these."""
    dumped, loaded = objects.dumped, objects.loaded
    sent, received = sum(dumped), sum(loaded)
    if op in ("all_gather", "gather"):
        payload = received if loaded else sent  # in a gather, all ranks but the root see only their own share
        return payload, sent if group.remote is None and not group.sources else 0
    if op == "scatter":
        return sent if dumped else received, received
    if op == "all_to_all":
        own = group.rank if group.remote is None and not group.destinations else -1
        return sent, dumped[own] if 0 <= own < len(dumped) else 0
    return max(dumped + loaded, default=0), 0  # all of one size; partial results of a reduction nearly so


class MpiTracer:
    """The state of the hook of mpi4py for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        learn_predefined()
        self.recorder = recorder
        self.groups = MpiGroups(recorder.tables, _world(recorder.rank_identity))
        self.requests = Requests(recorder)
        self.windows = Windows(recorder)
        self.context = CallContext(recorder)
        self._kinds: dict[tuple[Method, str, str | None, str | None], int] = {}
        self._batches = recorder_setup.batches

    def release(self) -> None:
        """Forget all requests and windows when the session has ended. Called by the drain thread."""
        if session.recorder is not self.recorder:
            self.requests.forget()
            self.windows.forget()
            for listener in ended:
                listener()

    def plan(self, method: Method, members: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MethodPlan | None:
        """Return what a call is about to do; None for one without a communicator."""
        if not members:
            return None
        arguments = method.bind(args, kwargs)
        if method.message_object:
            matched = self.requests.kept(members)
            if matched is None:
                return None
            group, arguments["source"], arguments["tag"] = matched
        else:
            group = self.groups.of(members)
        return self._messages(method, group, arguments) if method.messages else self._shared(method, group, arguments)

    def _shared(self, method: Method, group: MpiGroup, arguments: Arguments) -> MethodPlan:
        root = 0 if method.root is None else arguments.get(method.root, 0)
        if method.objects:
            size = _OBJECT_SIZE
        else:
            size = NOTHING if root == MPI.PROC_NULL else method.measure(arguments, group, root)
        peer = -1 if method.root is None else group.root(root)
        op = arguments.get("op", MPI.SUM) if method.reduces else None
        part = self._kind(method, method.op, size.dtype, op), size.payload, size.local, peer, -1, False
        return MethodPlan(method, group, _UNEVEN if size.uneven else 0, [part])

    def _messages(self, method: Method, group: MpiGroup, arguments: Arguments) -> MethodPlan:
        parts = []
        for message in method.messages:
            receives = message.op == "recv"
            peer = arguments.get(message.peer, MPI.ANY_SOURCE)
            tag = arguments.get(message.tag, MPI.ANY_TAG if receives else 0)
            nbytes, dtype = _message_size(message, arguments, peer)
            kind = self._kind(method, message.op, dtype, None)
            parts.append((kind, nbytes, 0, group.peer(peer), max(tag, -1), receives))
        return MethodPlan(method, group, _COALESCED if len(parts) > 1 else 0, parts)

    def start(self, plan: MethodPlan, depth: int = 2) -> MpiEntry | None:
        """Record that a call begins; None if the ring is full."""
        method, group, recorder = plan.method, plan.group, self.recorder
        site, phase, seen = self.context.find(depth)
        flags = plan.flags | (_OBJECT if method.objects or seen & call_site.OBJECT else 0)
        if method.returns:
            flags |= _ASYNC
        batch = next(self._batches) & 0xFFFFFFFF if len(plan.parts) > 1 else 0
        parts = []
        for kind, payload, local, peer, tag, receives in plan.parts:
            seq = self._seq(method, group, peer, tag, receives)
            slot = recorder.begin(
                kind, group.number, seq, payload, local, peer, tag,
                site, progress.step, progress.micro_batch, batch, phase, flags,
            )  # fmt: skip
            if slot >= 0:
                has_status = receives and (not batch or not method.returns or _EXCHANGE_HAS_STATUS)
                parts.append(CallPart(slot, Receipt(group, peer, tag) if has_status else None))
        return MpiEntry(self, plan, parts) if parts else None

    @staticmethod
    def _seq(method: Method, group: MpiGroup, peer: int, tag: int, receives: bool) -> int:
        if not method.messages and method.root != "target_rank":
            return next(group.collectives)
        if receives and (peer < 0 or tag < 0):
            return 0  # known when the message has arrived
        return next(group.counter(peer, tag, not receives))

    def kind_of(self, method: Method, message: Any, op: Any) -> int:
        """Return the row of a call with this buffer (None: it has none) and reduction, for the wrappers in C."""
        dtype = None if message is None else simple(message).dtype
        reduce_op = (MPI.SUM if op is None else op) if method.reduces else None
        return self._kind(method, method.op, dtype, reduce_op)

    def _kind(self, method: Method, op: str, dtype: str | None, reduce_op: Any) -> int:
        reduction = None if reduce_op is None else _REDUCE_OPS.get(id(reduce_op)) or _operation_name(reduce_op)
        key = method, op, dtype, reduction
        kind = self._kinds.get(key)
        if kind is None:
            variant = f"Message.{method.name}" if method.message_object else method.name
            row = {"op": op, "variant": variant, "api": "mpi", "dtype": dtype, "reduce_op": reduction}
            kind = self._kinds[key] = self.recorder.tables.number("kinds", ("mpi", *row.values()), lambda: row)
        return kind


_tracers: Final = recorder_setup.Tracers(MpiTracer)
current: Final = _tracers.current
started: Final = _tracers.started


def _operation_name(reduce_op: Any) -> str:
    return next((name for name, op in _PREDEFINED_OPS.items() if op == reduce_op), "user")


def _message_size(message: Message, arguments: Arguments, peer: int) -> tuple[int, str | None]:
    if message.buffer is None:
        return 0, "object"
    if peer == MPI.PROC_NULL:
        return 0, None  # mpi4py does not look at the buffer
    partitions = arguments.get("partitions", 1)
    nbytes, dtype = simple(arguments[message.buffer], partitions)
    return nbytes * partitions, dtype


def _world(rank_identity: RankIdentity) -> list[int]:
    """Return the global ranks of MPI.COMM_WORLD."""
    size = MPI.COMM_WORLD.Get_size()
    return list(range(size)) if size > 1 else [rank_identity.rank]
