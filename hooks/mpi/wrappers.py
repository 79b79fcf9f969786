"""Wrappers of mpi4py's methods: they record each call and execute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from mpi4py import MPI

from commtrace.hooks.native import compiled_wrappers as native
from commtrace.hooks.recorder_setup import call_unmeasured, count_fault, guard
from commtrace.patching import Wrapper, around
from commtrace.recording.interrupts import reraise_if_from_signal_handler
from commtrace.recording.session import session
from commtrace.schema import Clock

from .communicators import creations, handle_key
from .methods import Method
from .requests import PendingRequest
from .tracer import MethodPlan, MpiEntry, MpiTracer, current, ensure_tracer, now

Original = Callable[..., Any]


# ---- calls -----------------------------------------------------------------------------------------------------------


def wrap_call(method: Method) -> Wrapper:
    """Wrap a method that communicates."""

    def wrapper(original: Original) -> Original:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            entered = now()
            entry: MpiEntry | None = None
            call_args: Any = args
            call_kwargs: Any = kwargs
            try:
                tracer = current()
                if tracer is None:
                    tracer = ensure_tracer()
                    entered = now()  # the set-up of the recorder is not part of the cost of a call
                lookups = 0 if tracer is None else tracer.recorder.tables.lookups
                plan = None if tracer is None else tracer.plan(method, self, args, kwargs)
                if plan is not None and tracer is not None:
                    entry = tracer.begin_call(plan)
                if entry is not None:
                    entry.first = entry.tracer.recorder.tables.lookups != lookups
                    call_args, call_kwargs = entry.prepare(args, kwargs)
            except Exception as error:
                reraise_if_from_signal_handler()
                if entry is None:
                    return call_unmeasured(error, original, self, *args, **kwargs)
                count_fault()
            if entry is None:
                return original(self, *args, **kwargs)
            begun = now()
            try:
                result = original(self, *call_args, **call_kwargs)
            except BaseException:
                entry.restore_sizes()
                entry.failed(now())
                raise
            _return(entry, result, begun - entered)
            return result

        return call

    return wrapper


def _return(entry: MpiEntry, result: Any, cost: int) -> None:
    t_return = now()
    try:
        entry.restore_sizes()
        entry.returned(result, t_return)
        if entry.sampled or entry.first:
            entry.tracer.recorder.counters.note_cost(cost + now() - t_return, sampled=entry.sampled, first=entry.first)
    except Exception:
        with suppress(Exception):
            entry.set_unobservable(t_return)
        count_fault()


def wrap_persistent_init(method: Method) -> Wrapper:
    """Wrap a method that creates a persistent request. Each start of the request is recorded."""

    @around
    def init(original: Original, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        with guard():  # after the call: one that mpi4py rejects is neither recorded nor an error of the hook
            tracer = current() or ensure_tracer()
            plan = None if tracer is None else tracer.plan(method, self, args, kwargs)
            if plan is not None and tracer is not None:
                tracer.requests.keep(request, plan)
        return request

    return init


def wrap_start(original: Original) -> Original:
    """Wrap Prequest.Start."""
    return lambda self, *args, **kwargs: _started([self], partial(original, self, *args, **kwargs))


def wrap_startall(original: Original) -> Original:
    """Wrap Prequest.Startall."""
    return lambda cls, requests, *args, **kwargs: _started(
        _as_sequence(requests), partial(original, cls, requests, *args, **kwargs)
    )


def _started(requests: Sequence[Any], original: Callable[[], Any]) -> Any:
    entries: list[tuple[Any, MpiEntry]] = []
    tracer = current()
    if tracer is not None:
        for request in requests:
            try:
                plan = tracer.requests.kept(request)
                entry = tracer.begin_call(plan, depth=3) if isinstance(plan, MethodPlan) else None
                if entry is not None:
                    entries.append((request, entry))
            except Exception:
                count_fault(unrecorded=1)
    try:
        result = original()
    except BaseException:
        for _, entry in entries:
            entry.failed(now())
        raise
    for request, entry in entries:
        _return(entry, request, 0)
    return result


# ---- ends ------------------------------------------------------------------------------------------------------------

COMPLETION_METHODS: Final = {
    variant: (name.startswith("Wait"), which)
    for which in ("", "any", "all", "some")
    for name in (f"Wait{which}", f"Test{which}", f"Get_status_{which}".rstrip("_"))
    for variant in (name, name.lower())
}
"""Methods of Request that complete calls: whether each waits, and for which requests."""


def wrap_completion(name: str) -> Wrapper:
    """Wrap a method of Request that completes calls."""
    waits, which = COMPLETION_METHODS[name]
    single = which in ("", "any")  # whether the method has one status, not a list

    def complete(
        tracer: MpiTracer, all_pending: list[PendingRequest | None], original: Original, args: Any, kwargs: Any
    ) -> Any:
        status = args[0] if args else kwargs.get("status" if single else "statuses")
        if status is None and any(map(_needs_status, all_pending)):
            status = MPI.Status() if single else []
            args, kwargs = (status,), {}
        t_begin = now()
        try:
            result = original(*args, **kwargs)
        except MPI.Exception:
            for pending in all_pending:
                if pending is not None:
                    tracer.requests.failed(pending)
            raise
        t_end = now()
        try:
            for position, index in enumerate(_complete(which, waits, result, len(all_pending))):
                pending = all_pending[index]
                if pending is not None:
                    own_status = status[position] if isinstance(status, list) else status
                    clock = Clock.WAIT if waits else Clock.TEST
                    tracer.requests.ended(pending, t_begin if waits else 0, t_end, clock, own_status)
        except Exception:
            count_fault()
        return result

    def wrapper(original: Original) -> Original:
        def complete_single(self: Any, *args: Any, **kwargs: Any) -> Any:
            tracer = current()
            pending = None if tracer is None else tracer.requests.find(self)
            if pending is None or tracer is None:
                return original(self, *args, **kwargs)
            return complete(tracer, [pending], partial(original, self), args, kwargs)

        def complete_several(cls: type, requests: Any, *args: Any, **kwargs: Any) -> Any:
            tracer = current()
            all_pending = [] if tracer is None else _pending(tracer, requests)
            if tracer is None or not any(all_pending):
                return original(cls, requests, *args, **kwargs)
            return complete(tracer, all_pending, partial(original, cls, requests), args, kwargs)

        return complete_several if which else complete_single

    return wrapper


def _complete(which: str, waits: bool, result: Any, count: int) -> Sequence[int]:
    """Return the indices of the requests that are complete, from the result of a wait or a test."""
    if waits and which in ("", "all"):
        return range(count)
    first = result[0] if isinstance(result, tuple) else result  # a tuple begins with the index, the indices or the flag
    if which == "some":
        return () if first is None else first
    if which == "any":
        return (first,) if first != MPI.UNDEFINED and (waits or result[1]) else ()
    return range(count if first else 0)


def _pending(tracer: MpiTracer, requests: Any) -> list[PendingRequest | None]:
    try:
        return [tracer.requests.find(request) for request in _as_sequence(requests)]
    except Exception:
        count_fault()
        return []


def _as_sequence(requests: Any) -> Sequence[Any]:
    if isinstance(requests, (list, tuple)):
        return requests
    return [requests[i] for i in range(len(requests))]  # as mpi4py does


def _needs_status(pending: PendingRequest | None) -> bool:
    """Return whether the records of these calls are completed from a status."""
    return pending is not None and (pending.cancelled or any(receive is not None for _, receive in pending.ends))


def _followed_by(action: Callable[[MpiTracer, Any], None]) -> Wrapper:
    @around
    def call(original: Original, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        tracer = current()
        if tracer is not None:
            action(tracer, self)
        return result

    return call


wrap_cancel: Final = _followed_by(lambda tracer, request: tracer.requests.cancel(request))
"""Wrap Request.Cancel and cancel."""

wrap_request_free: Final = _followed_by(lambda tracer, request: tracer.requests.dropped(request))
"""Wrap Request.Free."""


@around
def wrap_abort(original: Original, self: Any, /, errorcode: int = 0) -> Any:
    """Wrap Abort: the program ends its job, because of the exception that it handles, if there is one."""
    with guard():
        if session.recorder is not None:
            session.recorder.leaving.abort(int(errorcode))
    return original(self, errorcode)


# ---- communicators, messages, windows --------------------------------------------------------------------------------


@around
def wrap_handle_free(original: Original, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Wrap Free and Disconnect of communicators and windows, because MPI may reuse the handle."""
    tracer = current()
    with guard():
        if self:
            creations.forget(handle_key(self))
            if tracer is not None:
                tracer.groups.forget(self)
                native.forget_communicators()
    return original(self, *args, **kwargs)


def wrap_probe(original: Original) -> Original:
    """Wrap Mprobe and Improbe: the Message that they return has no attribute for its source."""

    def probe(self: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        tracer: MpiTracer | None = None
        try:
            tracer = current() or ensure_tracer()
        except Exception:
            count_fault()
        if tracer is None:
            return original(self, source, tag, status)
        probe_status = MPI.Status() if status is None else status
        message = original(self, source, tag, probe_status)
        if message is not None and message != MPI.MESSAGE_NO_PROC:
            try:
                matched = tracer.groups.get(self), probe_status.Get_source(), probe_status.Get_tag()
                tracer.requests.keep(message, matched)
            except Exception:
                count_fault()
        return message

    return probe


def wrap_message_probe(original: Original) -> Original:
    """Wrap the probing class methods of Message, which take the communicator first."""
    return lambda cls, comm, *args, **kwargs: wrap_probe(partial(original, cls))(comm, *args, **kwargs)


# Method of Win after which one-sided operations are complete -> whether its argument names a single target.
SYNCHRONIZATIONS: Final = {
    **dict.fromkeys(("Fence", "Complete", "Unlock_all", "Flush_all", "Flush_local_all"), False),
    **dict.fromkeys(("Unlock", "Flush", "Flush_local"), True),
}


def wrap_synchronization(name: str) -> Wrapper:
    """Wrap a method of Win after which one-sided operations are complete."""
    targeted = SYNCHRONIZATIONS[name]

    def wrapper(original: Original) -> Original:
        def synchronize(self: Any, *args: Any, **kwargs: Any) -> Any:
            t_wait = now()
            result = original(self, *args, **kwargs)
            t_end = now()
            tracer = current()
            if tracer is not None:
                try:
                    group = tracer.groups.get(self)
                    target = group.peer(args[0] if args else kwargs["rank"]) if targeted else None
                    tracer.windows.synchronized(group, target, t_wait, t_end)
                except Exception:
                    count_fault()
            return result

        return synchronize

    return wrapper
