"""How a recording begins, whichever library's hook sees the first call, and where all of them count their failures.

Each hook says who this process is, what its library hides, and where its kernels take places for records. Whoever is
first begins for all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from commtrace.identity import RankIdentity, rank_from_environment
from commtrace.recording.recorder import Recorder
from commtrace.recording.ring import Ring
from commtrace.recording.session import session
from commtrace.recording.slots import Slots

blind_spots: Final[dict[str, list[str]]] = {}
"""Library -> what its hook cannot see."""

members: Final[dict[str, Callable[[], RankIdentity | None]]] = {}
"""Library -> who this process is; None where the library does not know."""

compiled: Final[set[str]] = set()
"""Libraries of which compiled wrappers record, in the places that Python's slots give."""

# Where a program uses both, every rank has to ask the same one, whichever library it calls first.
_ASKED: Final = ("mpi4py", "torch")

batches: Final = itertools.count(1 << 31)
"""Numbers of calls that belong together, other than torch's coalesced batches, which are numbered from 1."""


class CompiledSlots(Slots):
    """Python's slots, of a process in which compiled code records."""

    recorder = "native"


class KernelBackend(NamedTuple):
    """What a recorder needs to know of the kernels that are in place."""

    calibrate: Callable[[], int] | None
    """ns that a call spends on its way into and out of a kernel."""
    make_slots: Callable[[Ring], Slots] | None
    """Where the kernels take places for their records; None: from the recorder."""


_in_place: KernelBackend | None = None


def install_backend(kernels: KernelBackend | None) -> None:
    """These kernels take part in the next recording; None: none that need to."""
    global _in_place
    _in_place = kernels


def begin() -> Recorder | None:
    """The recorder of this process, made with its first call; None where tracing is off or cannot work."""
    in_place = _in_place or KernelBackend(None, CompiledSlots if compiled else None)
    hidden = [sentence for sentences in blind_spots.values() for sentence in sentences]
    return session.begin(member, blind_spots=hidden, calibrate=in_place.calibrate, make_slots=in_place.make_slots)


def fault() -> None:
    """A hook failed (call this in its `except`)."""
    recorder = session.recorder
    if recorder is not None:
        recorder.fault()


def member() -> RankIdentity:
    """This process among all, as the first library that knows says it; else as its launcher does."""
    for library in _ASKED:
        known = members[library]() if library in members else None
        if known is not None:
            return known
    return rank_from_environment()


class Tracer(Protocol):
    """What a hook of one library keeps for one recorder."""

    recorder: Recorder

    def release(self) -> None:
        """Drop what is no longer needed. Called by the drain thread, for the last time after the session has ended."""


AnyTracer = TypeVar("AnyTracer", bound=Tracer)


class Tracers(Generic[AnyTracer]):
    """The tracer of one library: one for each recorder of this process, made with the library's first call."""

    def __init__(self, make: Callable[[Recorder], AnyTracer]) -> None:
        """Remember how to make a tracer."""
        self._make = make
        self._tracer: AnyTracer | None = None
        self._lock = threading.RLock()
        self.started: list[Callable[[AnyTracer], None]] = []
        """Listeners, called with each new tracer before the first call is recorded."""

    def current(self) -> AnyTracer | None:
        """Return the running recorder's tracer; None before the first call, after the end, and in a forked child."""
        tracer = self._tracer
        return tracer if tracer is not None and tracer.recorder is session.recorder else None

    def start(self, recorder: Recorder) -> AnyTracer:
        """Return the tracer of a recorder, made when it is first asked for."""
        with self._lock:
            tracer = self._tracer
            if tracer is None or tracer.recorder is not recorder:
                tracer = self._tracer = self._make(recorder)
                recorder.each_drain.append(tracer.release)
                for listener in self.started:
                    listener(tracer)
        return tracer
