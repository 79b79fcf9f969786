"""Where the program is in its training: step, micro-batch and phase, as every record carries them.

Hooks tell what they see (an optimizer stepped, a DeepSpeed engine went forward); the program may tell more
(`commtrace.step()`, `commtrace.phase()`). Plain numbers: autograd threads read what the main thread writes, and
nothing here is worth a lock on the way of a call. They lie side by side in memory, where the native recorder reads them
and begins a step without Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.schema import Phase

# Places in `Progress.cells`, as struct Progress of hooks/native/recording.h has them.
_STEP, _MICRO_BATCH, _MARK, _FINISHED, _BY_PROGRAM = range(5)
_UNMARKED: Final = -1


class Progress:
    """Step and phase of one process.

    A step begins with the first activity (forward, backward or optimizer) after the previous one's optimizer has
    finished, so that what happens between two steps (logging, evaluation) is not counted to the later one.
    """

    def __init__(self) -> None:
        self.cells: Final = array("i", [0] * 5)
        self.reset()

    def reset(self) -> None:
        """Before the first step, no marks."""
        self.marks: list[Phase] = []
        for cell, value in ((_STEP, -1), (_MICRO_BATCH, -1), (_MARK, _UNMARKED), (_FINISHED, 1), (_BY_PROGRAM, 0)):
            self.cells[cell] = value

    @property
    def step(self) -> int:
        """The training step, -1: before the first one."""
        return self.cells[_STEP]

    @property
    def micro_batch(self) -> int:
        """Within the step, -1: not known."""
        return self.cells[_MICRO_BATCH]

    @micro_batch.setter
    def micro_batch(self, number: int) -> None:
        self.cells[_MICRO_BATCH] = number

    @property
    def between_steps(self) -> bool:
        """The next activity begins a step."""
        return bool(self.cells[_FINISHED] and not self.cells[_BY_PROGRAM])

    def activity(self) -> None:
        """Something that only happens in a training step happens now."""
        if self.between_steps:
            self.cells[_FINISHED] = 0
            self.cells[_STEP] += 1

    def step_finished(self) -> None:
        """The optimizer has done its work; the next activity begins a new step."""
        self.cells[_FINISHED] = 1

    def step_begins(self) -> None:
        """The program itself says that a step begins. From now on only it says so."""
        self.cells[_BY_PROGRAM] = 1
        self.cells[_STEP] += 1
        self.micro_batch = -1

    def unmarked(self) -> Phase:
        """The phase of a call that nothing else is known about."""
        return Phase.INIT if self.step < 0 else Phase.OTHER

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Calls within belong to `phase`."""
        self.mark(phase)
        try:
            yield
        finally:
            self.unmark()

    def mark(self, phase: Phase) -> None:
        """Calls belong to `phase` until the mark ends."""
        self.marks.append(phase)
        self.cells[_MARK] = phase

    def unmark(self) -> None:
        """The innermost mark ends. There may be none: tracing may have been stopped within it."""
        if self.marks:
            self.marks.pop()
        self.cells[_MARK] = self.marks[-1] if self.marks else _UNMARKED

    def marked(self, name: str) -> _Mark:
        """As `within`, by name, for programs. Raises CommtraceError for a name that is no phase."""
        try:
            return _Mark(self, Phase[name.upper()])
        except (KeyError, AttributeError):
            names = ", ".join(repr(phase.name.lower()) for phase in Phase)
            raise CommtraceError(f"commtrace.phase({name!r}): no such phase; there are {names}") from None


class _Mark:
    """A phase that a program marks: a training step has begun unless it says that it is still setting up."""

    def __init__(self, progress: Progress, phase: Phase) -> None:
        self._progress, self._phase = progress, phase

    def __enter__(self) -> None:
        if self._phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            self._progress.activity()
        self._progress.mark(self._phase)

    def __exit__(self, *_: object) -> None:
        self._progress.unmark()


progress = Progress()
"""Of this process. One for the whole process: a program trains one thing at a time."""
