"""Wrappers of mpi4py's methods: they record a call and pass it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from commtrace.hooks.native import mpi_recorder as native
from commtrace.hooks.recorder_setup import fault
from commtrace.recording.interrupts import reraise_if_from_signal_handler
from commtrace.schema import Clock

from .extension_types import Wrapper
from .methods import Method
from .requests import PendingRequest
from .tracer import MethodPlan, MpiEntry, MpiTracer, begin, current, now

Original = Callable[..., Any]


# ---- calls -----------------------------------------------------------------------------------------------------------


def recording(method: Method) -> Wrapper:
    """Wrap a method that communicates."""

    def wrapper(original: Original) -> Original:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            entered = now()
            entry: MpiEntry | None = None
            given: Any = args
            named: Any = kwargs
            try:
                tracer = current()
                if tracer is None:
                    tracer = begin()
                    entered = now()  # the recorder's set-up happens once and is no cost of a call
                lookups = 0 if tracer is None else tracer.recorder.tables.lookups
                plan = None if tracer is None else tracer.plan(method, self, args, kwargs)
                if plan is not None and tracer is not None:
                    entry = tracer.start(plan)
                if entry is not None:
                    entry.first = entry.tracer.recorder.tables.lookups != lookups
                    given, named = entry.enter(args, kwargs)
            except Exception as error:
                reraise_if_from_signal_handler()
                if entry is None:
                    return _unmeasured(error, original, self, *args, **kwargs)
                fault()
            if entry is None:
                return original(self, *args, **kwargs)
            begun = now()
            try:
                result = original(self, *given, **named)
            except BaseException:
                entry.left()
                entry.failed(now())
                raise
            _return(entry, self, result, begun - entered)
            return result

        return call

    return wrapper


def _unmeasured(error: Exception, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Make a call that the hook could not read: if mpi4py raises as well, the error is the program's, not counted."""
    try:
        result = original(*args, **kwargs)
    except BaseException as own:
        own.__context__ = None  # without the hook's exception
        raise
    try:
        raise error
    except Exception:
        fault()
    return result


def _return(entry: MpiEntry, members: Any, result: Any, cost: int) -> None:
    t_return = now()
    try:
        entry.left()
        entry.after(members, result, t_return)
        if entry.sampled or entry.first:
            entry.tracer.recorder.note_cost(cost + now() - t_return, sampled=entry.sampled, first=entry.first)
    except Exception:
        with suppress(Exception):
            entry.lost(t_return)
        fault()


def planning(method: Method) -> Wrapper:
    """Wrap a method that makes a persistent request: it is recorded each time that it is started."""

    def wrapper(original: Original) -> Original:
        def init(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            try:  # afterwards: a call that mpi4py rejects is neither recorded nor an error of the hook
                tracer = current() or begin()
                plan = None if tracer is None else tracer.plan(method, self, args, kwargs)
                if plan is not None and tracer is not None:
                    tracer.requests.keep(request, plan)
            except Exception:
                fault()
            return request

        return init

    return wrapper


def starting(original: Original) -> Original:
    """Wrap Prequest.Start."""

    def Start(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        return _started([self], lambda: original(self, *args, **kwargs))

    return Start


def starting_all(original: Original) -> Original:
    """Wrap Prequest.Startall."""

    def Startall(cls: type, requests: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        return _started(_listed(requests), lambda: original(cls, requests, *args, **kwargs))

    return Startall


def _started(requests: Sequence[Any], original: Callable[[], Any]) -> Any:
    entries: list[tuple[Any, MpiEntry]] = []
    tracer = current()
    if tracer is not None:
        try:
            for request in requests:
                plan = tracer.requests.kept(request)
                entry = tracer.start(plan, depth=3) if isinstance(plan, MethodPlan) else None
                if entry is not None:
                    entries.append((request, entry))
        except Exception:
            fault()
    try:
        result = original()
    except BaseException:
        for _, entry in entries:
            entry.failed(now())
        raise
    for request, entry in entries:
        _return(entry, None, request, 0)
    return result


# ---- ends ------------------------------------------------------------------------------------------------------------

# (result of the method, number of requests) -> indices of the requests that it shows to be complete
Outcome = Callable[[Any, int], Sequence[int]]


def _all(result: Any, count: int) -> Sequence[int]:
    return range(count)


def _if_true(result: Any, count: int) -> Sequence[int]:
    return range(count if result else 0)


def _if_first_true(result: Any, count: int) -> Sequence[int]:
    return range(count if result[0] else 0)


def _number(result: Any, count: int) -> Sequence[int]:
    number = result[0] if isinstance(result, tuple) else result
    return () if number == MPI.UNDEFINED else (number,)


def _number_if_true(result: Any, count: int) -> Sequence[int]:
    return () if not result[1] or result[0] == MPI.UNDEFINED else (result[0],)


def _numbers(result: Any, count: int) -> Sequence[int]:
    numbers = result[0] if isinstance(result, tuple) else result
    return () if numbers is None else numbers


# Method -> which requests its result shows to be complete, and whether it waits.
ENDS: dict[str, tuple[Outcome, bool]] = {
    "Wait": (_all, True),
    "wait": (_all, True),
    "Test": (_if_true, False),
    "test": (_if_first_true, False),
    "Get_status": (_if_true, False),
    "get_status": (_if_true, False),
    "Waitany": (_number, True),
    "waitany": (_number, True),
    "Testany": (_number_if_true, False),
    "testany": (_number_if_true, False),
    "Get_status_any": (_number_if_true, False),
    "get_status_any": (_number_if_true, False),
    "Waitall": (_all, True),
    "waitall": (_all, True),
    "Testall": (_if_true, False),
    "testall": (_if_first_true, False),
    "Get_status_all": (_if_true, False),
    "get_status_all": (_if_true, False),
    "Waitsome": (_numbers, True),
    "waitsome": (_numbers, True),
    "Testsome": (_numbers, False),
    "testsome": (_numbers, False),
    "Get_status_some": (_numbers, False),
    "get_status_some": (_numbers, False),
}
"""Methods of Request that show the end of calls."""

_OF_ONE_REQUEST = ("Wait", "wait", "Test", "test", "Get_status", "get_status")


def ending(name: str) -> Wrapper:
    """Wrap a method of Request that shows the end of calls."""
    outcome, waits = ENDS[name]

    def wrapper(original: Original) -> Original:
        if name in _OF_ONE_REQUEST:

            def complete_one(self: Any, *args: Any, **kwargs: Any) -> Any:
                tracer = current()
                pending = None if tracer is None else tracer.requests.find(self)
                if pending is None or tracer is None:
                    return original(self, *args, **kwargs)
                given = args[0] if args else kwargs.get("status")
                status = MPI.Status() if given is None and _needs_status(pending) else given
                if status is not given:
                    args, kwargs = (status,), {}
                completion = _Completion(tracer, [pending], waits)
                with completion:
                    result = original(self, *args, **kwargs)
                completion.returned(outcome, result, status)
                return result

            return complete_one

        def complete_several(cls: type, requests: Any, *args: Any, **kwargs: Any) -> Any:
            tracer = current()
            all_pending = [] if tracer is None else _pending(tracer, requests)
            if tracer is None or not any(all_pending):
                return original(cls, requests, *args, **kwargs)
            single = name.lower().endswith("any")
            keyword = "status" if single else "statuses"
            given = args[0] if args else kwargs.get(keyword)
            statuses = given
            if given is None and any(map(_needs_status, all_pending)):
                statuses = MPI.Status() if single else []
                args, kwargs = (statuses,), {}
            completion = _Completion(tracer, all_pending, waits)
            with completion:
                result = original(cls, requests, *args, **kwargs)
            completion.returned(outcome, result, statuses)
            return result

        return complete_several

    return wrapper


def _pending(tracer: MpiTracer, requests: Any) -> list[PendingRequest | None]:
    try:
        return [tracer.requests.find(request) for request in _listed(requests)]
    except Exception:
        fault()
        return []


def _listed(requests: Any) -> Sequence[Any]:
    if isinstance(requests, (list, tuple)):
        return requests
    return [requests[i] for i in range(len(requests))]  # as mpi4py does


def _needs_status(pending: PendingRequest | None) -> bool:
    """Return whether records of these calls are completed from a status."""
    return pending is not None and (pending.cancelled or any(receipt is not None for _, receipt in pending.ends))


class _Completion:
    """A wait or a poll for these calls."""

    def __init__(self, tracer: MpiTracer, pending: Sequence[PendingRequest | None], waits: bool) -> None:
        self._requests, self._pending, self._waits = tracer.requests, pending, waits
        self._begun = now()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, MPI.Exception):
            for pending in self._pending:
                if pending is not None:
                    self._requests.failed(pending)

    def returned(self, outcome: Outcome, result: Any, statuses: Any) -> None:
        t_end = now()
        try:
            numbers = outcome(result, len(self._pending))
            clock = Clock.WAIT if self._waits else Clock.TEST
            for place, number in enumerate(numbers):
                pending = self._pending[number]
                if pending is not None:
                    status = statuses[place] if isinstance(statuses, list) else statuses
                    self._requests.ended(pending, self._begun if self._waits else 0, t_end, clock, status)
        except Exception:
            fault()


def cancelling(original: Original) -> Original:
    """Wrap Request.Cancel and cancel."""

    def cancel(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        tracer = current()
        pending = None if tracer is None else tracer.requests.find(self)
        if pending is not None:
            pending.cancelled = True
        return result

    return cancel


def freeing(original: Original) -> Original:
    """Wrap Request.Free."""

    def Free(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        result = original(self, *args, **kwargs)
        tracer = current()
        if tracer is not None:
            tracer.requests.dropped(self)
        return result

    return Free


# ---- communicators, messages, windows --------------------------------------------------------------------------------


def forgetting(original: Original) -> Original:
    """Wrap Free and Disconnect of communicators and windows: the next one may get the same handle."""

    def Free(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        tracer = current()
        if tracer is not None:
            try:
                if self:
                    tracer.groups.forget(self)
                    native.forget()
            except Exception:
                fault()
        return original(self, *args, **kwargs)

    return Free


def matching(original: Original) -> Original:
    """Wrap Mprobe and Improbe, which return a Message that does not know its source."""

    def probe(self: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        tracer: MpiTracer | None = None
        try:
            tracer = current() or begin()
        except Exception:
            fault()
        if tracer is None:
            return original(self, source, tag, status)
        seen = MPI.Status() if status is None else status
        message = original(self, source, tag, seen)
        if message is not None and message != MPI.MESSAGE_NO_PROC:
            try:
                tracer.requests.keep(message, (tracer.groups.of(self), seen.Get_source(), seen.Get_tag()))
            except Exception:
                fault()
        return message

    return probe


def matching_class(original: Original) -> Original:
    """Wrap as `matching` the class methods of Message, which take the communicator first."""

    def probe(cls: type, comm: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        def of_comm(comm: Any, *args: Any) -> Any:
            return original(cls, comm, *args)

        return matching(of_comm)(comm, source, tag, status)

    return probe


# Method of Win -> position of the argument with the target that it synchronizes; -1: all targets.
SYNCHRONIZATIONS = {
    "Fence": -1,
    "Complete": -1,
    "Unlock": 0,
    "Unlock_all": -1,
    "Flush": 0,
    "Flush_all": -1,
    "Flush_local": 0,
    "Flush_local_all": -1,
}


def synchronizing(name: str) -> Wrapper:
    """Wrap a method of Win after which one-sided operations are complete."""
    at = SYNCHRONIZATIONS[name]

    def wrapper(original: Original) -> Original:
        def synchronize(self: Any, *args: Any, **kwargs: Any) -> Any:
            t_wait = now()
            result = original(self, *args, **kwargs)
            t_end = now()
            tracer = current()
            if tracer is not None:
                try:
                    target = None if at < 0 else tracer.groups.of(self).peer(args[at] if args else kwargs["rank"])
                    tracer.windows.synchronized(tracer.groups.of(self), target, t_wait, t_end)
                except Exception:
                    fault()
            return result

        return synchronize

    return wrapper
