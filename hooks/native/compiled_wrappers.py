"""The compiled wrappers of mpi4py's methods, installed in place of the Python wrappers for common calls.

A C++ wrapper records blocking calls on intracommunicators with common forms of buffers, and passes
all other calls to the Python wrapper of the same method. Both use the same slots, counters and
rows, so both write the same log.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any, Final

from mpi4py import MPI

from commtrace.current_step import progress
from commtrace.errors import CommtraceError, warn
from commtrace.hooks import call_context
from commtrace.hooks.mpi.buffers import predefined
from commtrace.hooks.mpi.methods import Method
from commtrace.hooks.mpi.tracer import MpiTracer
from commtrace.recording.ring import RECORDS_AT
from commtrace.recording.session import session

from . import libraries

# Same as enum Rule of mpi.cpp: what a call's buffer holds.
_NOTHING, _PAYLOAD, _SHARES, _OWN_SHARE = range(4)
_RULES: Final = {
    "Barrier": _NOTHING,
    **dict.fromkeys(("Bcast", "Reduce", "Allreduce", "Scan", "Exscan"), _PAYLOAD),
    **dict.fromkeys(("Send", "Ssend", "Bsend", "Rsend", "Recv"), _PAYLOAD),
    **dict.fromkeys(("Allgather", "Alltoall"), _SHARES),
    "Reduce_scatter_block": _OWN_SHARE,
}

_library: Any = None


def usable() -> bool:
    """Return whether the compiled wrappers are built and allowed by the settings."""
    global _library
    if session.settings is None:
        return False
    reason = ""
    if session.settings.recorder == "python":
        reason = libraries.PYTHON_REQUESTED
    else:
        try:
            _library = _library or libraries.MPI.load()
        except libraries.NotBuiltError as error:
            reason = str(error)
        except (ImportError, OSError, CommtraceError) as error:
            reason = f"the compiled wrappers cannot be used: {error}"
            warn(f"the compiled wrappers of mpi4py cannot be used: {error}. The Python recorder is used instead.")
    return libraries.note_choice("mpi4py", reason)


def replacement(method: Method, original: Any, wrapper: Any) -> Any:
    """Return the compiled wrapper of a method, or `wrapper` if C++ has no rule for it."""
    rule = _RULES.get(method.name) if method.owner in (MPI.Comm, MPI.Intracomm) and not method.objects else None
    if rule is None:
        return wrapper
    names = method.parameters
    message = method.messages[0] if method.messages else None
    sent = "buf" if "buf" in names else "sendbuf" if method.op != "all_gather" else ""
    peer, tag = (message.peer, message.tag) if message is not None else (method.root, "")
    wanted = sent, "recvbuf", peer, tag, "op", "status"
    positions = tuple(names.index(name) if name in names else -1 for name in wanted)
    sends = message is not None and message.op == "send"
    compiled = _library.method(original, wrapper, method, names, rule, positions, message is not None, sends)
    return functools.update_wrapper(compiled, wrapper)


class MpiRows:
    """Lookups that C++ makes in one recorder: mostly table rows, which C++ caches."""

    def __init__(self, tracer: MpiTracer) -> None:
        self._tracer = tracer
        self._slots = tracer.recorder.slots
        self._sites = tracer.context.sites
        self.kind = tracer.kind_of
        self.site = self._sites.number
        self.thread = tracer.recorder.thread
        self.note_cost = tracer.recorder.counters.note_cost

    def group(self, mpi_object: Any) -> tuple[Any, ...]:
        """Return the attributes of a communicator's group that C++ needs. Raises ValueError for a null communicator."""
        if not mpi_object:
            raise ValueError("a null communicator has no group")
        group = self._tracer.groups.get(mpi_object)
        inter = group.remote is not None
        return group, group.ref, group.collectives, group.local, group.number, group.size, inter

    def classify(self, frame: FrameType) -> int:
        """Return the properties of a frame."""
        return self._sites.classify(frame.f_code)

    def wake_if_low(self) -> None:
        """Wake the drain thread if more than half of the slots are in use."""
        if self._slots.is_half_taken:
            self._slots.wake()


def start_recording(tracer: MpiTracer) -> None:
    """Start recording in C++ when a recorder has begun."""
    if _library is None:
        return
    recorder = tracer.recorder
    tracer.context.sites.cleared.append(_library.forget_sites)
    constants = MPI.IN_PLACE, MPI.Status, MPI.BYTE, MPI.ANY_SOURCE, MPI.ANY_TAG
    datatypes = [(datatype, element.size, element.extent) for datatype, element in predefined.values()]
    _library.start(
        MpiRows(tracer), recorder.ring.buffer, RECORDS_AT, recorder.slots.free.popleft,
        call_context.backward_query(), recorder.sites, progress.cells, constants, datatypes,
    )  # fmt: skip


def stop_recording() -> None:
    """Stop recording in C++ before the session ends, and in a forked child."""
    if _library is not None:
        _library.stop()


def forget_communicators() -> None:
    """Forget all communicators in C++ because one is about to be freed."""
    if _library is not None:
        _library.forget_groups()
