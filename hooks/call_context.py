"""Where in the program, and in its training, a call is made: line of code, phase, step. The same for every library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commtrace.progress import progress
from commtrace.recording.recorder import Recorder
from commtrace.schema import Phase

from . import call_site
from .call_site import CallSites

_FORWARD, _BACKWARD, _INIT, _OPTIMIZER = (
    int(phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.INIT, Phase.OPTIMIZER)
)
_NO_TASK: Final = -1


def _no_task() -> int:
    return _NO_TASK


def _no_grad() -> bool:
    return False


_graph_task: Callable[[], int] = _no_task
_is_grad_enabled: Callable[[], bool] = _no_grad


def autograd(graph_task: Callable[[], int], is_grad_enabled: Callable[[], bool]) -> None:
    """A library that differentiates says how to ask for the backward pass under way (-1: none), and for gradients."""
    global _graph_task, _is_grad_enabled
    _graph_task, _is_grad_enabled = graph_task, is_grad_enabled


def backward() -> Callable[[], int] | None:
    """What tells the backward pass that is under way; None where nothing differentiates."""
    return None if _graph_task is _no_task else _graph_task


class CallContext:
    """Of the calls of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.sites: Final = CallSites(recorder.tables)
        self._numbered = recorder.sites
        self._backward = _NO_TASK, 0  # the last backward pass seen on a thread without Python frames, and its site

    def find(self, depth: int) -> tuple[int, int, int]:
        """(site, phase, what the frames tell) of the call `depth` frames up. Begins a step where one begins."""
        marks = progress.marks
        task = _graph_task()
        if task != _NO_TASK:
            phase = _BACKWARD if not marks or marks[-1] != _INIT else _INIT
        else:
            phase = int(marks[-1]) if marks else -1
        site = seen = 0
        if phase < 0 or self._numbered:
            site, seen = self.sites.find(depth + 1, deep=phase < 0)
        if phase < 0:
            phase = _phase(seen)
        if progress.between_steps and (phase == _BACKWARD or (phase == _FORWARD and self._trains())):
            progress.activity()
        if not self._numbered:
            site = 0
        elif not site and task != _NO_TASK:
            site = self._site_of_backward(task)
        return site, phase, seen

    def _trains(self) -> bool:
        return _is_grad_enabled() or self.sites.in_training()

    def _site_of_backward(self, task: int) -> int:
        if self._backward[0] != task:
            self._backward = task, self.sites.of_backward()
        return self._backward[1]


def _phase(seen: int) -> int:
    if seen & call_site.FORWARD:
        return _FORWARD
    return _OPTIMIZER if seen & call_site.OPTIMIZER else int(progress.unmarked())
