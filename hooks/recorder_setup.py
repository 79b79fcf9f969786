"""Set-up of the process's recorder, shared by the hooks of all libraries.

Each hook registers its blind spots, a function that identifies the process, and what its kernels
need. The hook that intercepts the first call starts the recording for all of them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from commtrace.identity import RankIdentity, rank_from_environment
from commtrace.recording.recorder import Recorder
from commtrace.recording.ring import Ring
from commtrace.recording.session import session
from commtrace.recording.slots import Slots

blind_spots: Final[dict[str, list[str]]] = {}
"""Library -> what its hook cannot observe, a sentence each."""

identities: Final[dict[str, Callable[[], RankIdentity | None]]] = {}
"""Library -> function that returns the process's rank, or None if the library does not have it."""

libraries_with_compiled_wrappers: Final[set[str]] = set()
"""Libraries whose compiled wrappers take their slots from Python."""

# In a program that uses both, all ranks must take their identity from the same one, whichever they call first.
_IDENTITY_SOURCES: Final = ("mpi4py", "torch")

batches: Final = itertools.count(1 << 31)
"""Batch numbers of MPI calls. Torch's coalesced batches are numbered from 1, so the two cannot collide."""


class CompiledSlots(Slots):
    """Slots that compiled wrappers take from Python, too."""

    recorder = "native"


class KernelBackend(NamedTuple):
    """What the recorder needs from the installed kernels."""

    calibrate: Callable[[], int] | None  # measures the ns that a call spends entering and leaving a kernel
    make_slots: Callable[[Ring], Slots] | None  # makes the slots that the kernels write to; None: the recorder's own


_backend: KernelBackend | None = None


def install_backend(backend: KernelBackend) -> None:
    """Use these kernels in the next recording."""
    global _backend
    _backend = backend


def ensure_recorder() -> Recorder | None:
    """Return the recorder, created on first use; None if tracing is off or cannot start."""
    backend = _backend or KernelBackend(None, CompiledSlots if libraries_with_compiled_wrappers else None)
    hidden = [sentence for sentences in blind_spots.values() for sentence in sentences]
    return session.begin(identity, blind_spots=hidden, calibrate=backend.calibrate, make_slots=backend.make_slots)


class guard:  # noqa: N801  a context manager, used as a statement
    """Context of a hook's own code: an error is counted (`count_fault`) and not raised into the program.

    Code that runs in every call has `try` and `except` in its place, which cost nothing without an error; this costs
    0.4 us.
    """

    def __enter__(self) -> None:
        """Begin the hook's code."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Return whether there was an error that is now counted."""
        if isinstance(error, Exception):
            count_fault()
            return True
        return False


def count_fault(unrecorded: int = 0) -> None:
    """Count an error in a hook. Call it in the hook's `except`.

    Args:
        unrecorded: Number of calls that have no record because of the error. If it is not 0, the
            recorder is started, so that the log has the count even if no call is recorded.
    """
    recorder = session.recorder or (ensure_recorder() if unrecorded else None)
    if recorder is not None:
        recorder.counters.count_fault(unrecorded)


def call_unmeasured(error: Exception, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call whose arguments a hook failed to read. If the library raises too, the hook's error is not counted."""
    try:
        result = original(*args, **kwargs)
    except BaseException as library_error:
        library_error.__context__ = None  # without the hook's exception
        raise
    try:
        raise error
    except Exception:
        count_fault(unrecorded=1)
    return result


def identity() -> RankIdentity:
    """Return the process's rank from the first library that has it, else from the environment."""
    for library in _IDENTITY_SOURCES:
        rank = identities[library]() if library in identities else None
        if rank is not None:
            return rank
    return rank_from_environment()


class Tracer(Protocol):
    """State of a library's hook for one recorder."""

    recorder: Recorder

    def release(self) -> None:
        """Drop what is no longer needed. Called by the drain thread, for the last time after the session has ended."""


AnyTracer = TypeVar("AnyTracer", bound=Tracer)


class Tracers(Generic[AnyTracer]):
    """The tracers of one library: one per recorder, created at the library's first call."""

    def __init__(self, make: Callable[[Recorder], AnyTracer]) -> None:
        self._make = make
        self._tracer: AnyTracer | None = None
        self._lock = threading.RLock()
        self.start_listeners: list[Callable[[AnyTracer], None]] = []
        """Functions that are called with each new tracer before the first call is recorded."""

    def current(self) -> AnyTracer | None:
        """Return the running recorder's tracer; None before the first call, after the end, and in a forked child."""
        tracer = self._tracer
        return tracer if tracer is not None and tracer.recorder is session.recorder else None

    def ensure(self, recorder: Recorder) -> AnyTracer:
        """Return the tracer of a recorder, creating it on first use."""
        with self._lock:
            tracer = self._tracer
            if tracer is None or tracer.recorder is not recorder:
                tracer = self._tracer = self._make(recorder)
                recorder.drain_callbacks.append(tracer.release)
                for listener in self.start_listeners:
                    listener(tracer)
        return tracer
