"""What surrounds a call in a Kineto trace: its step, phase, call site and purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from commtrace.library_frames import is_wrapper, path_below_packages
from commtrace.schema import Phase, Purpose

from .enclosing import NestedSpans
from .events import ImportedSite
from .kineto_trace import STEP, KinetoTrace, SpanArrays, Times, TraceClock, step_number

_FRAME: Final = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
_RUNS_BACKWARD: Final = "_engine_run_backward"
_ACCUMULATES: Final = "AccumulateGrad"

# Annotations of PyTorch's FSDP2, and what calls within them are for.
_PURPOSES: Final = (
    (re.compile(r"FSDP::(pre_backward|backward_prefetch)"), Purpose.PARAMETERS_BACKWARD),
    (re.compile(r"FSDP::(post_backward|reduce)"), Purpose.GRADIENTS),
    (re.compile(r"FSDP::(pre_forward|root_pre_forward)"), Purpose.PARAMETERS_FORWARD),
)
_GATHERS: Final = "FSDP::all_gather"
"""Annotation around an all_gather, whatever it is for."""
_UNIT: Final = re.compile(r"FSDP::\w+ \((.+)\)")
"""Annotation that names its unit, as "FSDP::all_gather (layers.0)"; that of the root names none."""


class Why(NamedTuple):
    """What a call is for, and the unit that it is about; "": the root, or none."""

    purpose: Purpose
    module: str = ""


_PHASES: Final = (
    (re.compile(r"Optimizer\.step|optimizer|(?<!\w)adam", re.IGNORECASE), Phase.OPTIMIZER),
    (re.compile(r"backward", re.IGNORECASE), Phase.BACKWARD),
    (re.compile(r"forward", re.IGNORECASE), Phase.FORWARD),
)


class Context:
    """The surroundings of moments on the host's timeline of a trace.

    Attributes:
        steps: Numbers of the steps, ascending by begin, shape (n,).
        step_spans: Their begins and ends in ns, shape (n, 2).
    """

    def __init__(self, trace: KinetoTrace, clock: TraceClock) -> None:
        self._names = trace.names
        is_step = np.array([name.startswith(STEP) for name in trace.names], bool)
        self._frames = _by_thread(trace.frames, clock)
        self._annotations = _by_thread(trace.annotations, clock)
        self._backward = _by_thread(trace.backward, clock)
        self._sites: dict[tuple[int, Why | None], ImportedSite | None] = {}
        begin, end, known = clock.spans(trace.annotations.begin, trace.annotations.duration)
        name = np.array(trace.annotations.name, np.int64)
        at = np.flatnonzero(known & is_step[name]) if len(name) else name
        at = at[np.argsort(begin[at], kind="stable")]
        numbered = [
            (number, row) for row in at.tolist() if (number := _step_or_none(trace.names[name[row]])) is not None
        ]
        self.steps = np.array([number for number, _ in numbered], np.int64)
        rows = np.array([row for _, row in numbered], np.int64)
        self.step_spans = np.stack([begin[rows], end[rows]], axis=1) if len(rows) else np.zeros((0, 2), np.int64)

    def step(self, moment: int) -> int:
        """Return the step at a moment; -1 outside of all."""
        at = int(np.searchsorted(self.step_spans[:, 0], moment, side="right")) - 1
        return int(self.steps[at]) if at >= 0 and moment < self.step_spans[at, 1] else -1

    def phase(self, moment: int, thread: int) -> Phase:
        """Return the phase of a call that a thread makes at a moment."""
        if self._backward.get(thread, _NOTHING).at(moment):
            return Phase.BACKWARD
        for number in reversed(self._annotations.get(thread, _NOTHING).at(moment)):
            for pattern, phase in _PHASES:
                if pattern.search(self._names[number]):
                    return phase
        if any(_RUNS_BACKWARD in self._names[number] for number in self._frames.get(thread, _NOTHING).at(moment)):
            return Phase.BACKWARD
        return Phase.OTHER

    def why(self, moment: int, thread: int, op: str) -> Why | None:
        """Return what a call is for, where annotations or autograd's functions show it."""
        annotations = [self._names[number] for number in self._annotations.get(thread, _NOTHING).at(moment)][::-1]
        functions = self._backward.get(thread, _NOTHING).at(moment)
        module = next((unit[1] for name in annotations if (unit := _UNIT.match(name))), "")
        for name in annotations:
            for pattern, purpose in _PURPOSES:
                if pattern.search(name):
                    is_again = purpose is Purpose.PARAMETERS_FORWARD and functions
                    return Why(Purpose.PARAMETERS_RECOMPUTATION if is_again else purpose, module)
        if any(name.startswith(_GATHERS) for name in annotations):
            return Why(Purpose.PARAMETERS_BACKWARD if functions else Purpose.PARAMETERS_FORWARD, module)
        if op in ("all_reduce", "reduce_scatter") and any(_ACCUMULATES in self._names[name] for name in functions):
            return Why(Purpose.GRADIENTS)  # hooks of gradients run there
        return None

    def site(self, moment: int, thread: int, why: Why | None) -> ImportedSite | None:
        """Return the innermost Python function outside wrappers; None where the trace has no stacks and no purpose.

        Autograd's threads have no Python frames: their calls are made for the function that waits for autograd.
        """
        frames = self._frames.get(thread, _NOTHING).at(moment)
        if not any(_FRAME.match(self._names[number]) for number in frames):
            frames = next((above for above in self._waiting_for_autograd(moment)), [])
        for number in reversed(frames):
            if (number, why) not in self._sites:
                self._sites[number, why] = _site(self._names[number], why)
            if (site := self._sites[number, why]) is not None:
                return site
        return ImportedSite(**why._asdict()) if why is not None else None

    def _waiting_for_autograd(self, moment: int) -> Iterator[list[int]]:
        for spans in self._frames.values():
            frames = spans.at(moment)
            if any(_RUNS_BACKWARD in self._names[number] for number in frames):
                yield frames


def _site(frame: str, why: Why | None) -> ImportedSite | None:
    """Return the call site of a frame, such as "train.py(31): main"; None for a wrapper or a C function."""
    match = _FRAME.fullmatch(frame)
    if match is None:
        return None
    file, function = match["file"], match["function"]
    if is_wrapper(path_below_packages(file) or file, function):
        return None
    return ImportedSite(file, int(match["line"]), function, *(why or ()))


def _step_or_none(name: str) -> int | None:
    try:
        return step_number(name)
    except ValueError:
        return None


def _by_thread(spans: SpanArrays, clock: TraceClock) -> dict[int, NestedSpans]:
    begin, end, known = clock.spans(spans.begin, spans.duration)
    thread, name = np.array(spans.thread, np.int64), np.array(spans.name, np.int64)
    return {
        int(number): NestedSpans(begin[at], end[at], name[at])
        for number in np.unique(thread)
        if len(at := np.flatnonzero(known & (thread == number)))
    }


_NOTHING: Final = NestedSpans(*np.zeros((3, 0), np.int64))


def device_steps(trace: KinetoTrace, clock: TraceClock, context: Context) -> tuple[Times, Times]:
    """Return steps, and their begins and ends on the device; on the host if no kernel was launched in them.

    A step lasts from its first kernel to the next step's first, or to its last kernel. A kernel is of the step in which
    the host launched it: the device runs behind the host.
    """
    launches = [trace.launches.get(correlation) for correlation in trace.computation.name]
    moments = clock.spans([0.0 if launch is None else launch.begin for launch in launches], np.zeros(len(launches)))[0]
    begin, end, known = clock.spans(trace.computation.begin, trace.computation.duration)
    launched = known & np.array([launch is not None for launch in launches], bool)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    at = np.searchsorted(context.step_spans[:, 0], moments, side="right") - 1
    within = launched & (at >= 0)
    within[within] &= moments[within] < context.step_spans[at[within], 1]
    for row in np.unique(at[within]).tolist():
        rows = within & (at == row)
        first[row], last[row] = int(begin[rows].min()), int(end[rows].max())
    if not first:
        return context.steps, context.step_spans
    order = sorted(first, key=lambda row: first[row])
    bounds = np.array([(first[row], last[row]) for row in order], np.int64)
    bounds[:-1, 1] = bounds[1:, 0]
    return context.steps[order], bounds
