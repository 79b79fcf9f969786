"""Rows of a table about the training steps: one for each step whose facts differ from those of the step before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from commtrace.current_step import progress
from commtrace.recording.session import session

from . import tracer as torch_tracer
from .tracer import TorchTracer


class StepRows(ABC):
    """Facts about the current step, written when the next one begins."""

    limit: int
    """Most rows: tables stay in memory. From the last row on, the facts are unknown."""

    def __init__(self) -> None:
        self._step = -1
        self._written: list[Any] = []  # facts of the last row
        self._rows = 0

    @abstractmethod
    def facts(self) -> list[Any]:
        """Return the facts about the current step, as JSON; an empty list without any."""

    @abstractmethod
    def clear(self) -> None:
        """Begin a step without facts."""

    def repeats(self) -> bool:
        """Return whether the current step is known to have the facts of the one before, which are written."""
        return False

    @abstractmethod
    def write(self, tracer: TorchTracer, step: int, facts: list[Any] | None) -> None:
        """Add a row to the tables. None: the facts are not known from this step on."""

    def enter_step(self) -> None:
        """Begin the current step, the step of the calls that were made last, unless it has begun."""
        step = progress.step
        if step == self._step:
            return
        if step == self._step + 1 and self.repeats():  # most steps, with fewer functions
            self._step = step
            self.clear()
        else:
            self._next_step(step, torch_tracer.current())

    def end(self, tracer: TorchTracer) -> None:
        """Write the last rows."""
        self._next_step(max(progress.step, self._step) + 1, tracer)

    def _next_step(self, step: int, tracer: TorchTracer | None) -> None:
        """Write the current step, and those without facts before `step`, which becomes current."""
        self._write(tracer)
        if step > self._step + 1:
            self._step += 1
            self.clear()
            self._write(tracer)
        self._step = step
        self.clear()

    def _write(self, tracer: TorchTracer | None) -> None:
        facts = self.facts()
        if tracer is None or facts == self._written or self._rows >= self.limit:
            return
        self._rows += 1
        self.write(tracer, self._step, facts if self._rows < self.limit else None)
        self._written = facts


class RowsWrittenAtEnd:
    """Rows of one kind, the last of which are written when the recorder stops.

    Attributes:
        rows: The rows; a hook appends those of each model, which may be gone when the log ends.
    """

    def __init__(self) -> None:
        self.rows: list[StepRows] = []

    def install(self) -> None:
        """Write to the tables of the running recorder, if there is one, and of each that starts from now on."""
        torch_tracer.start_listeners.append(self._write_at_end)
        tracer = torch_tracer.current()
        if tracer is not None:
            self._write_at_end(tracer)

    def uninstall(self) -> None:
        """Forget all rows."""
        torch_tracer.start_listeners.remove(self._write_at_end)
        self.rows.clear()

    def _write_at_end(self, tracer: TorchTracer) -> None:
        def write() -> None:
            while self.rows and session.recorder is not tracer.recorder:
                self.rows.pop().end(tracer)

        tracer.recorder.drain_callbacks.append(write)
