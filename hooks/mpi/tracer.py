"""mpi4py tracer: records calls of mpi4py's methods."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mpi4py import MPI

from commtrace import identity
from commtrace.current_step import progress
from commtrace.hooks import call_site, recorder_setup
from commtrace.hooks.call_context import CallContext
from commtrace.identity import RankIdentity
from commtrace.operations import OPERATIONS, Extent
from commtrace.recording.counters import is_sampled
from commtrace.recording.recorder import Recorder
from commtrace.recording.session import session
from commtrace.schema import Clock, Flag

from .buffers import fill_predefined, simple
from .communicators import MpiGroup, MpiGroups
from .methods import NOTHING, Arguments, Message, Method, Size
from .requests import PendingReceive, Requests
from .windows import Windows

now: Final = time.monotonic_ns

_ASYNC, _COALESCED, _OBJECT, _UNEVEN = (int(flag) for flag in (Flag.ASYNC, Flag.COALESCED, Flag.OBJECT, Flag.UNEVEN))
_PREDEFINED_OPS: Final = {name: op for name, op in vars(MPI).items() if isinstance(op, MPI.Op) and op != MPI.OP_NULL}
_REDUCE_OPS: Final = {id(op): name for name, op in _PREDEFINED_OPS.items()}
_OBJECT_SIZE: Final = Size(0, dtype="object")  # until mpi4py has pickled the object
_thread: Final = threading.local()
# Whether the status of an Isendrecv describes its receive. MPICH 5.0.2 leaves the values of other messages in it.
_EXCHANGE_HAS_STATUS: Final = MPI.get_vendor()[0] == "Open MPI"


def identity_in_world() -> RankIdentity | None:
    """Return the process's rank in MPI.COMM_WORLD.

    Returns:
        None before MPI is initialized, after it is finalized, and if MPI.COMM_WORLD has only one process (as under
        torchrun).
    """
    if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.Get_size() > 1:
        return RankIdentity(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), _agree)
    return None


def _agree(proposal: str) -> str:
    """Return a run name without communicating: MPI has no store, and a collective might never return.

    Returns:
        If all ranks run on this host and the process that started them is found, its name. Otherwise "" if the launcher
        names the run. If neither is known, the proposal, which differs between ranks.
    """
    world_size = str(MPI.COMM_WORLD.Get_size())
    if world_size in (os.environ.get("MPI_LOCALNRANKS"), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")):
        starter = identity.mpi_starter()  # it has started all ranks
        if starter:
            return f"mpi-{starter}"
    return "" if identity.launcher_run_name() else proposal


def ensure_tracer() -> MpiTracer | None:
    """Return this process's tracer, created on first use.

    Returns:
        None if tracing is off or cannot start, before MPI is initialized, and after it is finalized.
    """
    if session.settings is None and session.recorder is None:
        return None
    if MPI.Is_finalized() or not MPI.Is_initialized():
        return None
    recorder = session.recorder or recorder_setup.ensure_recorder()
    return None if recorder is None else _tracers.ensure(recorder)


class CallRecord(NamedTuple):
    """One record of a call: most calls have one, a Sendrecv has two."""

    slot: int
    receive: PendingReceive | None  # None unless a message is received


class PickledSizes:
    """Sizes in bytes of the objects that one call has pickled or unpickled."""

    __slots__ = ("dumped", "enclosing", "loaded")

    def __init__(self) -> None:
        self.dumped: list[int] = []
        self.loaded: list[int] = []
        self.enclosing: PickledSizes | None = None  # sizes of the enclosing call


def current_sizes() -> PickledSizes | None:
    """Return the sizes of this thread's running call; None outside a call that pickles."""
    return getattr(_thread, "sizes", None)


class MethodPlan(NamedTuple):
    """Properties of a call that are known before it begins. A persistent request keeps them for all its starts."""

    method: Method
    group: MpiGroup
    flags: int
    records: list[tuple[int, int, int, int, int, bool]]  # (kind, payload, local, peer, tag, whether it receives)


class MpiEntry:
    """A call that has begun but not yet returned."""

    __slots__ = ("first", "pickled", "plan", "records", "status", "tracer")

    def __init__(self, tracer: MpiTracer, plan: MethodPlan, records: list[CallRecord]) -> None:
        self.tracer, self.plan, self.records = tracer, plan, records
        self.first = False  # whether the call site, operation or group was new
        self.status: Any = None
        self.pickled: PickledSizes | None = None

    @property
    def sampled(self) -> bool:
        """Whether the cost of this call is measured."""
        return is_sampled(self.records[0].slot)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Begin to measure pickled objects, and return the arguments for the method.

        A status is added if one is needed and the program passes none.
        """
        method = self.plan.method
        if method.objects:
            self.pickled = PickledSizes()
            self.pickled.enclosing = current_sizes()
            _thread.sizes = self.pickled
        status_index = method.status_at
        if status_index is None or not method.receives:
            return args, kwargs
        given = kwargs.get("status") if len(args) <= status_index else args[status_index]
        self.status = given if given is not None else MPI.Status()
        if given is None and len(args) > status_index:
            return (*args[:status_index], self.status, *args[status_index + 1 :]), kwargs
        return args, kwargs if given is not None else {**kwargs, "status": self.status}

    def restore_sizes(self) -> None:
        """Stop measuring pickled objects: those that follow belong to the enclosing call, if any."""
        if self.pickled is not None:
            _thread.sizes = self.pickled.enclosing

    def failed(self, t_return: int) -> None:
        """Record that the method raised an exception."""
        for record in self.records:
            self.tracer.recorder.failed(record.slot, t_return)

    def set_unobservable(self, t_return: int) -> None:
        """Record that the end of this call cannot be observed, because the hook failed."""
        for record in self.records:
            self.tracer.recorder.set_unobservable(record.slot, t_return)

    def returned(self, result: Any, t_return: int) -> None:
        """Record that the method has returned `result`, which is a Request if the method does not block."""
        tracer, method = self.tracer, self.plan.method
        if self.pickled is not None:
            self._measure_objects(self.pickled)
        if self.status is not None:
            for slot, receive in self.records:
                if receive is not None:
                    receive.arrived(tracer.recorder, slot, self.status)
        calls = [tracer.recorder.returned(record.slot, t_return, observable=True) for record in self.records]
        if method.returns:
            ends = [(call, record.receive) for call, record in zip(calls, self.records, strict=True)]
            tracer.requests.add(result, ends)
        elif method.one_sided:
            tracer.windows.add(self.plan.group, self.plan.records[0][3], calls[0])
        else:
            for call in calls:
                if call is not None:
                    tracer.recorder.ended(call, 0, t_return, Clock.RETURN)

    def _measure_objects(self, sizes: PickledSizes) -> None:
        if self.plan.method.messages:
            for slot, receive in self.records:
                if receive is None:
                    self.tracer.recorder.set_size(slot, sum(sizes.dumped))
        else:
            payload, local = object_size(self.plan.method.op, self.plan.group, sizes)
            self.tracer.recorder.set_size(self.records[0].slot, payload, local)


def object_size(op: str, group: MpiGroup, sizes: PickledSizes) -> tuple[int, int]:
    """Return the payload of a collective and this rank's own share in bytes, from the sizes of its objects."""
    dumped, loaded = sizes.dumped, sizes.loaded
    sent, received = sum(dumped), sum(loaded)
    operation = OPERATIONS[op]
    if operation.input is Extent.SHARE:
        payload = received if loaded else sent  # in a gather, only the root has more than its own share
        return payload, sent if group.remote is None and not group.sources else 0
    if operation.output is Extent.SHARE:
        return sent if dumped else received, received
    if operation.input is Extent.SPLITS:
        own = group.rank if group.remote is None and not group.destinations else -1
        return sent, dumped[own] if 0 <= own < len(dumped) else 0
    # The same on all ranks, or nearly so: partial results of a reduction may differ.
    return max(dumped + loaded, default=0), 0


class MpiTracer:
    """State of the mpi4py hook for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        fill_predefined()
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

    def plan(
        self, method: Method, mpi_object: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> MethodPlan | None:
        """Return the plan of a call on a communicator, a window or a Message.

        Returns:
            None for a null object, and for a Message whose probe was not observed.
        """
        if not mpi_object:
            return None
        arguments = method.bind(args, kwargs)
        if method.message_object:
            matched = self.requests.kept(mpi_object)
            if matched is None:
                return None
            group, arguments["source"], arguments["tag"] = matched
        else:
            group = self.groups.get(mpi_object)
        if method.messages:
            return self._plan_messages(method, group, arguments)
        return self._plan_operation(method, group, arguments)

    def _plan_operation(self, method: Method, group: MpiGroup, arguments: Arguments) -> MethodPlan:
        """Return the plan of a collective or a one-sided operation."""
        root = 0 if method.root is None else arguments.get(method.root, 0)
        if method.objects:
            size = _OBJECT_SIZE
        else:
            size = NOTHING if root == MPI.PROC_NULL else method.measure(arguments, group, root)
        peer = -1 if method.root is None else group.root(root)
        op = arguments.get("op", MPI.SUM) if method.reduces else None
        record = self._kind(method, method.op, size.dtype, op), size.payload, size.local, peer, -1, False
        return MethodPlan(method, group, _UNEVEN if size.uneven else 0, [record])

    def _plan_messages(self, method: Method, group: MpiGroup, arguments: Arguments) -> MethodPlan:
        records = []
        for message in method.messages:
            receives = message.op == "recv"
            peer = arguments.get(message.peer, MPI.ANY_SOURCE)
            tag = arguments.get(message.tag, MPI.ANY_TAG if receives else 0)
            nbytes, dtype = _message_size(message, arguments, peer)
            kind = self._kind(method, message.op, dtype, None)
            records.append((kind, nbytes, 0, group.peer(peer), max(tag, -1), receives))
        return MethodPlan(method, group, _COALESCED if len(records) > 1 else 0, records)

    def begin_call(self, plan: MethodPlan, depth: int = 2) -> MpiEntry | None:
        """Record that a call begins. Return None if the ring is full."""
        method, group, recorder = plan.method, plan.group, self.recorder
        site, phase, frame_flags = self.context.find(depth)
        flags = plan.flags | (_OBJECT if method.objects or frame_flags & call_site.OBJECT else 0)
        if method.returns:
            flags |= _ASYNC
        batch = next(self._batches) & 0xFFFFFFFF if len(plan.records) > 1 else 0
        records = []
        for kind, payload, local, peer, tag, receives in plan.records:
            seq = self._seq(method, group, peer, tag, receives)
            slot = recorder.begin(
                kind, group.number, seq, payload, local, peer, tag,
                site, progress.step, progress.micro_batch, batch, phase, flags,
            )  # fmt: skip
            if slot >= 0:
                has_status = receives and (not batch or not method.returns or _EXCHANGE_HAS_STATUS)
                records.append(CallRecord(slot, PendingReceive(group, peer, tag) if has_status else None))
        return MpiEntry(self, plan, records) if records else None

    @staticmethod
    def _seq(method: Method, group: MpiGroup, peer: int, tag: int, receives: bool) -> int:
        if not method.messages and method.root != "target_rank":
            return next(group.collectives)
        if receives and (peer < 0 or tag < 0):
            return 0  # not known until the message has arrived
        return next(group.counter(peer, tag, not receives))

    def kind_of(self, method: Method, message: Any, op: Any) -> int:
        """Return the id in the kinds table of a call with this buffer (None: none) and reduction; C++ calls this."""
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
            kind = self._kinds[key] = self.recorder.tables.row_id("kinds", ("mpi", *row.values()), lambda: row)
        return kind


_tracers: Final = recorder_setup.Tracers(MpiTracer)
current: Final = _tracers.current
start_listeners: Final = _tracers.start_listeners


def _operation_name(reduce_op: Any) -> str:
    return next((name for name, op in _PREDEFINED_OPS.items() if op == reduce_op), "user")


def _message_size(message: Message, arguments: Arguments, peer: int) -> tuple[int, str | None]:
    if message.buffer is None:
        return 0, "object"
    if peer == MPI.PROC_NULL:
        return 0, None  # mpi4py ignores the buffer
    partitions = arguments.get("partitions", 1)
    nbytes, dtype = simple(arguments[message.buffer], partitions)
    return nbytes * partitions, dtype


def _world(rank_identity: RankIdentity) -> list[int]:
    """Return the global ranks of MPI.COMM_WORLD."""
    size = MPI.COMM_WORLD.Get_size()
    return list(range(size)) if size > 1 else [rank_identity.rank]
