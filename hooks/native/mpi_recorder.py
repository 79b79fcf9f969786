"""The compiled wrappers of mpi4py's methods, installed in place of those in Python for common calls.

A wrapper in C records a blocking call on an intracommunicator with common forms of buffers, and passes every other call
to Python's wrapper of the same method. Both use the same slots, counters and rows, so the log is the same whichever
of them records.
"""

from __future__ import annotations

from typing import Any, Final

from mpi4py import MPI

from commtrace.errors import CommtraceError
from commtrace.hooks import call_context
from commtrace.hooks.mpi.buffers import predefined
from commtrace.hooks.mpi.methods import Method
from commtrace.hooks.mpi.tracer import MpiTracer
from commtrace.progress import progress
from commtrace.recording.log_writer import warn
from commtrace.recording.ring import RECORDS_AT
from commtrace.recording.session import session

from . import libraries

# As enum Rule of mpi.cpp.
_BUFFER, _REDUCED, _ALL_GATHER, _ALL_TO_ALL, _SCATTERED_BLOCK, _NOTHING = range(1, 7)
_RULES: Final = {
    "Barrier": _NOTHING,
    "Bcast": _BUFFER,
    "Reduce": _REDUCED,
    "Allreduce": _REDUCED,
    "Scan": _REDUCED,
    "Exscan": _REDUCED,
    "Allgather": _ALL_GATHER,
    "Alltoall": _ALL_TO_ALL,
    "Reduce_scatter_block": _SCATTERED_BLOCK,
    "Send": _BUFFER,
    "Ssend": _BUFFER,
    "Bsend": _BUFFER,
    "Rsend": _BUFFER,
    "Recv": _BUFFER,
}

_library: Any = None


def usable() -> bool:
    """Return whether the settings allow the compiled wrappers and they are built."""
    global _library
    if session.settings is None or session.settings.recorder == "python":
        return False
    try:
        _library = _library or libraries.MPI.load()
    except libraries.NotBuiltError:
        pass
    except (ImportError, OSError, CommtraceError) as error:
        warn(f"the compiled wrappers of mpi4py cannot be used: {error}. Python's record.")
    return _library is not None


def replacement(method: Method, original: Any, wrapper: Any) -> Any:
    """Return the compiled wrapper of a method, or `wrapper` if there is no rule for it in C."""
    rule = _RULES.get(method.name) if method.owner in (MPI.Comm, MPI.Intracomm) and not method.objects else None
    if rule is None:
        return wrapper
    names = method.parameters
    message = method.messages[0] if method.messages else None
    wanted = {
        "buffer": "sendbuf" if "sendbuf" in names else "buf",
        "other": "recvbuf",
        "peer": message.peer if message is not None else method.root,
        "tag": message.tag if message is not None else None,
        "op": "op",
        "status": "status",
    }
    places = {place: names.index(name) for place, name in wanted.items() if name in names}
    return _library.method(
        original,
        wrapper,
        method,
        names,
        rule,
        places,
        message is not None,
        message is not None and message.op == "send",
    )


def begins(tracer: MpiTracer) -> None:
    """Let C record, too, as a recorder has begun."""
    if _library is None:
        return
    recorder = tracer.recorder
    known = [(datatype, element.size, element.extent) for datatype, element in predefined()]
    _library.constants(MPI.IN_PLACE, MPI.Status, MPI.BYTE, MPI.ANY_SOURCE, MPI.ANY_TAG, session, progress.cells, known)
    sites = tracer.context.sites
    sites.cleared.append(_library.forget_sites)
    slots = recorder.slots
    _library.go(
        tracer, recorder, recorder.ring.buffer, RECORDS_AT, slots.free.popleft, slots.free,
        (slots, slots.capacity // 2), lambda frame: sites.classify(frame.f_code), sites.number,
        recorder.note_cost, call_context.backward(), recorder.sites,
    )  # fmt: skip


def ends() -> None:
    """Stop recording in C, as the session has ended."""
    if _library is not None:
        _library.stop()


def forget() -> None:
    """Forget all communicators in C, as one is about to be freed."""
    if _library is not None:
        _library.forget()
