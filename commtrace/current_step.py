"""Training progress of this process: the step, micro-batch and phase that every record carries.

Hooks report events (an optimizer step, a forward pass of a DeepSpeed engine), and the program may mark steps and phases
(`commtrace.step()`, `commtrace.phase()`). The state is in one array without a lock: autograd threads read what the main
thread writes, and the native recorder reads it and begins steps without calling Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Final, NamedTuple

from commtrace.errors import CommtraceError
from commtrace.patching import Wrapper
from commtrace.schema import Phase

# Positions in `Progress.cells`, the same as in struct Progress of hooks/native/progress.h.
_STEP, _MICRO_BATCH, _MARK, _FINISHED, _BY_PROGRAM, _REDUCES_GRADIENTS, _BATCH, _FINISHING = range(8)
_UNMARKED: Final = -1
_EVALUATION: Final = int(Phase.EVALUATION)


class MicroBatch(IntEnum):
    """The micro-batch that the calls of a wrapped function have."""

    KEPT = 0
    """The present one."""
    NONE = 1
    """None is known: -1."""
    COUNTED = 2
    """The number of the function's earlier calls in this batch (`Progress.begin_batch`); -1 outside of a batch."""


class StepPart(NamedTuple):
    """What a wrapper does around the calls of a function that is part of a training step."""

    phase: int = _UNMARKED
    """The phase that they are marked with; -1: none."""
    micro_batch: MicroBatch = MicroBatch.KEPT
    begins_step: bool = False
    """Whether it is an activity (`Progress.note_activity`)."""
    finishes_step: bool = False
    """Whether the step has finished when it returns, unless another such function has called it."""


class Progress:
    """Step, micro-batch and phase of one process.

    A step begins with the first activity (forward, backward or optimizer) after the optimizer of the previous step has
    finished. Calls between two steps (logging, evaluation) therefore do not belong to the later step.
    """

    def __init__(self) -> None:
        self.cells: Final = array("i", [0] * 8)
        self.first_step_listeners: Final[list[Callable[[], None]]] = []
        self._batches = 0
        self._wrap: Callable[..., Callable[..., Any]] | None = None
        self.reset()

    def reset(self) -> None:
        """Reset to the state before the first step, without marks."""
        for cell, value in enumerate((-1, -1, _UNMARKED, 1, 0, 0, 0, 0)):
            self.cells[cell] = value

    @property
    def step(self) -> int:
        """The training step; -1 before the first one."""
        return self.cells[_STEP]

    @property
    def micro_batch(self) -> int:
        """The micro-batch within the step; -1 if not known."""
        return self.cells[_MICRO_BATCH]

    @micro_batch.setter
    def micro_batch(self, number: int) -> None:
        self.cells[_MICRO_BATCH] = number

    @property
    def reduces_gradients(self) -> bool:
        """Whether the program has models whose gradients C++ code reduces within autograd: DDP's reducer."""
        return bool(self.cells[_REDUCES_GRADIENTS])

    @reduces_gradients.setter
    def reduces_gradients(self, reduces: bool) -> None:
        self.cells[_REDUCES_GRADIENTS] = reduces

    @property
    def between_steps(self) -> bool:
        """Whether the next activity begins a step."""
        return bool(self.cells[_FINISHED] and not self.cells[_BY_PROGRAM])

    @property
    def marked_phase(self) -> int:
        """The phase that calls are marked with; -1: none."""
        return self.cells[_MARK]

    def note_activity(self) -> None:
        """Note an event of a training step or an evaluation. Outside of both, it begins a step."""
        cells = self.cells  # not `between_steps`, which would be one more function, several times in a step
        if cells[_FINISHED] and not cells[_BY_PROGRAM] and cells[_MARK] != _EVALUATION:
            cells[_FINISHED] = 0
            cells[_STEP] += 1

    def finish_step(self) -> None:
        """Note that the optimizer has finished; the next activity begins a new step."""
        self.cells[_FINISHED] = 1
        if self.cells[_STEP] == 0:
            self._end_first_step()

    def _end_first_step(self) -> None:
        for listener in self.first_step_listeners:
            listener()

    def begin_step(self) -> None:
        """Begin a step that the program marks. From now on only such marks begin steps."""
        self.cells[_BY_PROGRAM] = 1
        self.cells[_STEP] += 1
        self.micro_batch = -1

    def begin_batch(self) -> None:
        """Begin a batch of micro-batches: functions with `MicroBatch.COUNTED` count them from 0."""
        self._batches += 1
        self.cells[_BATCH] = self._batches

    def end_batch(self) -> None:
        """End the batch."""
        self.cells[_BATCH] = 0

    def default_phase(self) -> Phase:
        """Return the phase of calls without a mark."""
        return Phase.INIT if self.step < 0 else Phase.OTHER

    def present_phase(self) -> Phase:
        """Return the phase of calls: the one that they are marked with, or the default."""
        return Phase(self.marked_phase) if self.marked_phase >= 0 else self.default_phase()

    def marked(self, phase: Phase) -> _Mark:
        """Return a context manager that marks the calls in a `with` block with a phase."""
        return _Mark(self, phase, begins_step=False)

    def wrapper(
        self,
        phase: Phase | None = None,
        micro_batch: MicroBatch = MicroBatch.KEPT,
        *,
        begins_step: bool = False,
        finishes_step: bool = False,
    ) -> Wrapper:
        """Return a wrapper of a function that is part of a training step (`StepPart`)."""
        part = StepPart(_UNMARKED if phase is None else int(phase), micro_batch, begins_step, finishes_step)

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            if self._wrap is not None:
                return self._wrap(original, self.cells, part, self._end_first_step)
            return self._wrapped(original, part)

        return wrapper

    def _wrapped(self, original: Callable[..., Any], part: StepPart) -> Callable[..., Any]:
        cells, batch, number = self.cells, 0, 0

        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal batch, number
            if part.begins_step:
                self.note_activity()
            if part.micro_batch is not MicroBatch.KEPT:
                present = cells[_BATCH] if part.micro_batch is MicroBatch.COUNTED else 0
                batch, number = present, number + 1 if batch == present else 0
                cells[_MICRO_BATCH] = number if present else -1
            before, finishing = cells[_MARK], cells[_FINISHING]
            if part.phase != _UNMARKED:
                self.mark(Phase(part.phase))
            cells[_FINISHING] = finishing or part.finishes_step
            try:
                return original(*args, **kwargs)
            finally:
                cells[_MARK], cells[_FINISHING] = before, finishing
                if part.finishes_step and not finishing:
                    self.finish_step()

        return replacement

    def wrap_with(self, wrap: Callable[..., Callable[..., Any]] | None) -> None:
        """Let `wrap(original, cells, part, end_first_step)` of a recorder do what a wrapper does from now on."""
        self._wrap = wrap

    def mark(self, phase: Phase) -> int:
        """Mark calls with a phase, and return what `unmark` needs. Within an evaluation, all phases are EVALUATION."""
        before = self.cells[_MARK]
        if before != _EVALUATION:
            self.cells[_MARK] = phase
        return before

    def unmark(self, before: int) -> None:
        """End the innermost mark: calls have again the one before it."""
        self.cells[_MARK] = before

    def named_phase(self, name: str) -> _Mark:
        """Return a context manager that marks a phase by name. Forward, backward and optimizer count as activity.

        Raises CommtraceError for an unknown name.
        """
        try:
            phase = Phase[name.upper()]
        except (KeyError, AttributeError):
            names = ", ".join(repr(phase.name.lower()) for phase in Phase)
            raise CommtraceError(f"commtrace.phase({name!r}): no such phase; choose from {names}") from None
        return _Mark(self, phase, begins_step=phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))


class _Mark:
    """A context manager that marks a phase."""

    def __init__(self, progress: Progress, phase: Phase, *, begins_step: bool) -> None:
        self._progress, self._phase, self._begins_step = progress, phase, begins_step
        self._before = _UNMARKED

    def __enter__(self) -> None:
        if self._begins_step:
            self._progress.note_activity()
        self._before = self._progress.mark(self._phase)

    def __exit__(self, *_: object) -> None:
        self._progress.unmark(self._before)


progress = Progress()
"""The progress of this process. All threads share it, because a program runs one training at a time."""


def step() -> None:
    """Mark the beginning of a training step. From the first call on, only these calls begin steps."""
    progress.begin_step()


def phase(name: str) -> AbstractContextManager[None]:
    """Mark the calls in a `with` block as a phase of the training step.

    Args:
        name: "init", "forward", "backward", "optimizer", "evaluation" or "other".

    Raises:
        CommtraceError: There is no such phase.
    """
    return progress.named_phase(name)
