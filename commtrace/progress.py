"""Where the program is in its training: step, micro-batch and phase, as every record carries them.

Hooks tell what they see (an optimizer stepped, a DeepSpeed engine went forward); the program may tell more
(`commtrace.step()`, `commtrace.phase()`). Plain attributes: autograd threads read what the main thread writes, and
nothing here is worth a lock on the way of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from commtrace.errors import CommtraceError
from commtrace.schema import Phase


class Progress:
    """Step and phase of one process.

    A step begins with the first activity (forward, backward or optimizer) after the previous one's optimizer has
    finished, so that what happens between two steps (logging, evaluation) is not counted to the later one.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Before the first step, no marks."""
        self.step = -1
        self.micro_batch = -1
        self.marks: list[Phase] = []
        self._finished = True
        self._by_program = False

    @property
    def between_steps(self) -> bool:
        """The next activity begins a step."""
        return self._finished and not self._by_program

    def activity(self) -> None:
        """Something that only happens in a training step happens now."""
        if self._finished and not self._by_program:
            self._finished = False
            self.step += 1

    def step_finished(self) -> None:
        """The optimizer has done its work; the next activity begins a new step."""
        self._finished = True

    def step_begins(self) -> None:
        """The program itself says that a step begins. From now on only it says so."""
        self._by_program = True
        self.step += 1
        self.micro_batch = -1

    def unmarked(self) -> Phase:
        """The phase of a call that nothing else is known about."""
        return Phase.INIT if self.step < 0 else Phase.OTHER

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Calls within belong to `phase`."""
        self.marks.append(phase)
        try:
            yield
        finally:
            self.unmark()

    def unmark(self) -> None:
        """The innermost mark ends. There may be none: tracing may have been stopped within it."""
        if self.marks:
            self.marks.pop()

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
        self._progress.marks.append(self._phase)

    def __exit__(self, *_: object) -> None:
        self._progress.unmark()


progress = Progress()
"""Of this process. One for the whole process: a program trains one thing at a time."""
