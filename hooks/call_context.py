"""Call context: the call site, phase and step of a call, whichever library it is a call of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commtrace.progress import progress
from commtrace.recording.recorder import Recorder
from commtrace.schema import Phase

from . import call_site
from .call_site import CallSites

_FORWARD, _BACKWARD, _INIT, _OPTIMIZER, _EVALUATION = (
    int(phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.INIT, Phase.OPTIMIZER, Phase.EVALUATION)
)
_NO_TASK: Final = -1


def _no_task() -> int:
    return _NO_TASK


def _no_grad() -> bool:
    return False


_graph_task: Callable[[], int] = _no_task
_is_grad_enabled: Callable[[], bool] = _no_grad


def autograd(graph_task: Callable[[], int], is_grad_enabled: Callable[[], bool]) -> None:
    """Register how to ask for the running backward pass (-1: none) and whether gradients are recorded."""
    global _graph_task, _is_grad_enabled
    _graph_task, _is_grad_enabled = graph_task, is_grad_enabled


def backward() -> Callable[[], int] | None:
    """Return the function that gives the running backward pass; None where no library has registered one."""
    return None if _graph_task is _no_task else _graph_task


class CallContext:
    """Finds the context of calls, for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.sites: Final = CallSites(recorder.tables)
        self._numbered = recorder.sites
        self._backward = _NO_TASK, 0  # the last backward pass on a thread without Python frames, its site

    def find(self, depth: int) -> tuple[int, int, int]:
        """Return call site, phase and properties of the frames of the call `depth` frames up.

        The first forward or backward after a step has finished begins the next step, unless it does not train.
        """
        marks = progress.marks
        task = _graph_task()
        if task != _NO_TASK:
            phase = marks[-1] if marks and marks[-1] in (_INIT, _EVALUATION) else _BACKWARD
        else:
            phase = int(marks[-1]) if marks else -1
        site = seen = 0
        if phase < 0 or self._numbered:
            site, seen = self.sites.find(depth + 1, deep=phase < 0)
        if phase < 0:
            unmarked = int(progress.unmarked())
            phase = _FORWARD if seen & call_site.FORWARD else _OPTIMIZER if seen & call_site.OPTIMIZER else unmarked
        if phase in (_FORWARD, _BACKWARD) and progress.between_steps:
            if phase == _BACKWARD or self._trains():
                progress.activity()
            else:
                phase = _EVALUATION
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
