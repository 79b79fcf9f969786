"""Call context: the call site, phase and frame properties of a call to any library; begins steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from commtrace.current_step import progress
from commtrace.recording.recorder import Recorder
from commtrace.schema import Phase

from . import call_site, purposes
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


def register_autograd(graph_task: Callable[[], int], is_grad_enabled: Callable[[], bool]) -> None:
    """Register the functions that return the running backward pass (-1: none) and the grad mode."""
    global _graph_task, _is_grad_enabled
    _graph_task, _is_grad_enabled = graph_task, is_grad_enabled


def backward_query() -> Callable[[], int] | None:
    """Return the function that returns the running backward pass; None if none is registered."""
    return None if _graph_task is _no_task else _graph_task


class CallContext:
    """Lookup of call contexts for one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.sites: Final = CallSites(recorder.tables)
        self._records_sites = recorder.sites
        self._last_backward = _NO_TASK, 0, 0  # pass, purpose and call site, on a thread without Python frames

    def find(self, depth: int, reducer: int = 0, trained: str = "") -> tuple[int, int, int]:
        """Return the call site, phase and frame properties of the call `depth` frames up.

        The first forward or backward pass after a finished step begins the next step, unless it
        belongs to an evaluation.

        Args:
            depth: Number of frames of the hook itself to skip.
            reducer: Purpose of the call if C++ code makes it within autograd.
            trained: "sent": the call sends what autograd has computed, in forward; "received": it receives into a
                tensor that requires a gradient. Both belong to a step, also where no module runs.
        """
        phase, task = progress.marked_phase, _graph_task()
        if task != _NO_TASK and phase not in (_INIT, _EVALUATION):
            phase = _BACKWARD
        site = frame_flags = 0
        if phase < 0 or self._records_sites:
            site, frame_flags = self.sites.find(
                depth + 1, deep=phase < 0, reducer=reducer, in_backward=task != _NO_TASK
            )
        if phase < 0:
            if frame_flags & call_site.FORWARD:
                phase = _FORWARD
            else:
                phase = _OPTIMIZER if frame_flags & call_site.OPTIMIZER else int(progress.default_phase())
                if trained and phase != _OPTIMIZER:
                    phase = self._phase_of_message(trained, phase)
        if phase in (_FORWARD, _BACKWARD) and progress.between_steps:
            if phase == _BACKWARD or self._trains():
                progress.note_activity()
            else:
                phase = _EVALUATION
        if not self._records_sites:
            site = 0
        elif not site and task != _NO_TASK:
            site = self._site_of_backward(task, purposes.current() or reducer)
        return site, phase, frame_flags

    def _phase_of_message(self, trained: str, phase: int) -> int:
        if trained == "sent":
            return _FORWARD
        if not progress.between_steps:
            return phase
        progress.note_activity()
        return int(progress.default_phase())

    def _trains(self) -> bool:
        return _is_grad_enabled() or self.sites.in_training()

    def _site_of_backward(self, task: int, purpose: int) -> int:
        if self._last_backward[:2] != (task, purpose):
            self._last_backward = task, purpose, self.sites.find_backward_site(purpose)
        return self._last_backward[2]
