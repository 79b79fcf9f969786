"""Kineto's trace: the events that matter to communication, collected in one pass over the file.

Times in the file are microseconds (with three decimals since torch 2.4) since 1970 or since `baseTimeNanoseconds`,
which follows the events. They are kept as they are until the whole file has been read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .events import Problem
from .json_stream import collection_paused
from .operation_names import KernelName, communication_kernel

Times: TypeAlias = npt.NDArray[np.int64]

STEP: Final = "ProfilerStep#"
BACKWARD: Final = "autograd::engine::evaluate_function"
COMMS: Final = "record_param_comms"
OPERATOR: Final = "cpu_op"
ANNOTATION: Final = "user_annotation"
EXTERNAL_ID: Final = "External id"

# What only `commtrace export --format kineto` writes.
MARK: Final = "commtrace"
"""Argument of an operation in flight: what recorded it, ON_HOST or another."""
ON_HOST: Final = "cpu call"
CLOCK: Final = "commtrace clock"
"""Argument of an operation in flight: the `schema.Clock` of its end."""
FLAGS: Final = "commtrace flags"
"""Argument of a call: its `schema.Flag` bits, as `flags_label` writes them."""
WAIT: Final = "commtrace wait"
"""Annotation: the program waits for the call with the same EXTERNAL_ID."""

_LONGEST_US: Final = 1e12
"""Time in us (11 days) by which an event may differ from most others."""
_HOST_PREFIXES: Final = ("c10d::", "record", "symm_m")
_ANNOTATED: Final = ("nccl:", "rccl:")
_GLOO: Final = "gloo:"


class HostEvent(NamedTuple):
    """A host event of a communication call: an operator, `record_param_comms`, or an annotation of the backend."""

    begin: float
    duration: float
    thread: int
    name: str
    args: dict[str, Any]


class Kernel(NamedTuple):
    """A communication kernel on a device."""

    begin: float
    duration: float
    stream: int
    correlation: int
    meaning: KernelName
    name: str
    args: dict[str, Any]


class Launch(NamedTuple):
    """The host's call that launched a kernel, or a graph of kernels."""

    begin: float
    thread: int
    is_graph: bool


class TraceSource(Protocol):
    """What yields the events of a trace: a `json_stream.JsonArray`, or an execution trace in its form.

    Attributes:
        path: The file.
        members: The members of the file beside its events; those after them when all have been yielded.
    """

    path: Path
    members: dict[str, Any]

    @property
    def problem(self) -> str:
        """Why the file was not read to its end, or ""."""

    def batches(self) -> Iterator[list[Any]]:
        """Yield the events in lists. Raises ImportFileError."""


class SpanArrays:
    """Spans of events with a thread and the number of a name, in compact arrays."""

    def __init__(self) -> None:
        self.begin, self.duration, self.thread, self.name = array("d"), array("d"), array("q"), array("q")

    def add(self, begin: float, duration: float, thread: int, name: int = 0) -> None:
        """Append a span."""
        self.begin.append(begin)
        self.duration.append(duration)
        self.thread.append(thread)
        self.name.append(name)


class KinetoTrace:
    """The events of one trace file.

    Attributes:
        malformed: Number of events that lack a field or have one of a wrong type.
        host: Host events of communication calls.
        gloo: Annotations of gloo, whose threads carry out the calls.
        kernels: Communication kernels.
        launches: Launches by correlation.
        computation: Other kernels; names are correlations.
        copies: Copies and fills of memory.
        frames: Python frames; names are indices into `names`.
        annotations: Annotations of the program.
        backward: Functions that autograd runs.
        waits: Begins of waits by the external id of the call.
    """

    def __init__(self, source: TraceSource) -> None:
        self.path = source.path
        self._source = source
        self.malformed = 0
        self.host: list[HostEvent] = []
        self.gloo: list[HostEvent] = []
        self.kernels: list[Kernel] = []
        self.launches: dict[int, Launch] = {}
        self.computation, self.copies, self.frames = SpanArrays(), SpanArrays(), SpanArrays()
        self.annotations, self.backward = SpanArrays(), SpanArrays()
        self.waits: dict[int, float] = {}
        self.names: list[str] = []
        self._number_of_name: dict[str, int] = {}
        self._number_of_thread: dict[Any, int] = {}
        self._keep: dict[str, Callable[[dict[str, Any]], None]] = {
            **dict.fromkeys(("kernel", "Kernel"), self._add_kernel),
            **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), self._add_copy),
            **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime"), self._add_launch),
            **dict.fromkeys((OPERATOR, "Operator"), self._add_operator),
            ANNOTATION: self._add_annotation,
            "python_function": self._add_frame,
        }

    def read(self) -> KinetoTrace:
        """Read the file, and return this trace. Raises ImportFileError."""
        keep = self._keep.get
        with collection_paused():
            for batch in self._source.batches():
                for event in batch:
                    try:
                        add = keep(event.get("cat"))
                        if add is not None:
                            add(event)
                    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
                        self.malformed += 1
        return self

    @property
    def members(self) -> dict[str, Any]:
        """The members of the file beside its events."""
        return self._source.members

    @property
    def distributed_info(self) -> Mapping[str, Any]:
        """What the file states of the job: rank, world size, groups; empty if it does not."""
        info = self.members.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def problem(self) -> str:
        """Why the file was not read to its end, or ""."""
        return self._source.problem

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with the file."""
        if self.problem:
            yield Problem(self.problem, "calls after that are missing", "cut")
        if self.malformed:
            yield Problem(f"{self.malformed:,} events lack a field or have one of a wrong type", "they are left out")

    @property
    def processes(self) -> set[Any]:
        """Process ids of its threads, as the file has them."""
        return {pid for pid, _ in self._number_of_thread}

    def _add_kernel(self, event: dict[str, Any]) -> None:
        name, args = event["name"], event.get("args") or {}
        meaning = communication_kernel(name)
        begin, duration = float(event["ts"]), float(event["dur"])
        if meaning is None:
            self.computation.add(begin, duration, 0, int(args.get("correlation") or -1))
            return
        correlation, stream = args.get("correlation"), args.get("stream")
        self.kernels.append(Kernel(
            begin, duration, int(-1 if stream is None else stream), int(-1 if correlation is None else correlation),
            meaning, name, args,
        ))  # fmt: skip

    def _add_copy(self, event: dict[str, Any]) -> None:
        self.copies.add(float(event["ts"]), float(event["dur"]), self._thread(event.get("pid"), event.get("tid")))

    def _add_launch(self, event: dict[str, Any]) -> None:
        name = event["name"]
        if "aunch" not in name:
            return
        correlation = event["args"].get("correlation")
        if correlation is not None:
            thread = self._thread(event["pid"], event["tid"])
            self.launches[int(correlation)] = Launch(float(event["ts"]), thread, "Graph" in name)

    def _add_operator(self, event: dict[str, Any]) -> None:
        name = event["name"]
        if name[:6] in _HOST_PREFIXES and (name == COMMS or is_operator(name)):
            self._add_host(event, self.host)
        elif name.startswith(BACKWARD):
            self.backward.add(
                float(event["ts"]), float(event["dur"]), self._thread(event["pid"], event["tid"]), self._name(name)
            )

    def _add_host(self, event: dict[str, Any], events: list[HostEvent]) -> None:
        thread = self._thread(event["pid"], event["tid"])
        args = event.get("args")
        events.append(HostEvent(
            float(event["ts"]), float(event["dur"]), thread, event["name"], args if isinstance(args, dict) else {}
        ))  # fmt: skip

    def _add_annotation(self, event: dict[str, Any]) -> None:
        name = event["name"]
        if name == WAIT:
            self.waits[int(event["args"][EXTERNAL_ID])] = float(event["ts"])
            return
        if name.startswith(_ANNOTATED):
            self._add_host(event, self.host)
        elif name.startswith(_GLOO):
            self._add_host(event, self.gloo)
        thread = self._thread(event["pid"], event["tid"])
        self.annotations.add(float(event["ts"]), float(event["dur"]), thread, self._name(name))

    def _add_frame(self, event: dict[str, Any]) -> None:
        self.frames.add(
            float(event["ts"]), float(event["dur"]), self._thread(event["pid"], event["tid"]), self._name(event["name"])
        )

    def _thread(self, pid: Any, tid: Any) -> int:
        return self._number_of_thread.setdefault((pid, tid), len(self._number_of_thread) + 1)

    def _name(self, name: str) -> int:
        number = self._number_of_name.get(name)
        if number is None:
            number = self._number_of_name[name] = len(self.names)
            self.names.append(str(name))
        return number


def is_operator(name: str) -> bool:
    """Return whether a host event is an operator, such as "c10d::allreduce_"."""
    return "::" in name


def step_number(name: str) -> int:
    """Return the number in the annotation of a step. Raises ValueError."""
    number = int(name.removeprefix(STEP))
    if not 0 <= number < 1 << 31:
        raise ValueError(name)
    return number


class TraceClock:
    """Conversion of a trace's times to ns."""

    def __init__(self, trace: KinetoTrace) -> None:
        begins = [*(event.begin for event in trace.host), *(kernel.begin for kernel in trace.kernels)]
        begins += [*trace.computation.begin[:1000], *trace.annotations.begin[:1000]]
        finite = [begin for begin in begins if np.isfinite(begin)]
        middle = float(np.median(finite)) if finite else 0.0
        self._origin_us = int(middle)
        base = trace.members.get("baseTimeNanoseconds")
        self._base_ns = base if type(base) is int and 0 <= base < 1 << 62 else 0
        self.moment_ns = self._origin_us * 1000 + self._base_ns
        """A moment of the trace, ns."""
        self.is_wall = middle * 1000 + self._base_ns > 1e18
        """Whether times are ns since 1970."""

    def known(self, begin: npt.NDArray[np.float64], duration: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return whether times are possible, shape (n,)."""
        with np.errstate(invalid="ignore"):
            return (abs(begin - self._origin_us) < _LONGEST_US) & (duration >= 0) & (duration < _LONGEST_US)

    def spans(self, begins: Iterable[float], durations: Iterable[float]) -> tuple[Times, Times, npt.NDArray[np.bool_]]:
        """Return begins and ends of events in ns, and whether they are possible, shape (n,).

        Durations are exact. A begin is as exact as a double of the file's number.
        """
        begin, duration = np.array(begins, np.float64), np.array(durations, np.float64)
        known = self.known(begin, duration)
        begin, duration = np.where(known, begin, self._origin_us), np.where(known, duration, 0)
        start = np.rint((begin - self._origin_us) * 1000).astype(np.int64) + self._origin_us * 1000 + self._base_ns
        return start, start + np.rint(duration * 1000).astype(np.int64), known
