"""Passes of a model in each step: the rows of the table `passes`.

They determine what sharded models gather. A row is written for a step whose passes differ from
those of the step before.
"""

from __future__ import annotations

import weakref
from copy import copy
from typing import Any, Final

from commtrace.current_step import progress
from commtrace.job_row import PassesRow, PassRow
from commtrace.recording.session import session

from . import tracer as torch_tracer
from .captured_jobs import Jobs
from .tracer import TorchTracer

MAX_ROWS: Final = 10_000
"""Limit of rows per model: tables stay in memory. From the last row on, passes are unknown."""


class Passes:
    """Passes of all models of one kind."""

    def __init__(self, jobs: Jobs) -> None:
        """Write the passes of models that are in `jobs`."""
        self._jobs = jobs
        self._reset()

    def _reset(self) -> None:
        self._by_model: weakref.WeakKeyDictionary[Any, _ModelPasses] = weakref.WeakKeyDictionary()
        self._all: list[_ModelPasses] = []  # including models that are gone when the log ends

    def install(self) -> None:
        """Write to the tables of each recorder that starts from now on."""
        torch_tracer.start_listeners.append(self._write_at_end)

    def uninstall(self) -> None:
        """Forget all models."""
        torch_tracer.start_listeners.remove(self._write_at_end)
        self._reset()

    def _write_at_end(self, tracer: TorchTracer) -> None:
        models = self._all

        def write() -> None:
            while models and session.recorder is not tracer.recorder:
                models.pop().end(tracer)

        tracer.recorder.drain_callbacks.append(write)

    def add(self, model: Any, entry: PassRow) -> None:
        """Add a single pass to the current step, the step of its calls.

        A model that was built before tracing began has no job, and its passes are not known.
        """
        if model not in self._jobs:
            return
        passes = self._by_model.get(model)
        if passes is None:
            passes = self._by_model[model] = _ModelPasses()
            self._all.append(passes)
        passes.add(entry)
        tracer = torch_tracer.current()
        if passes.job is None and tracer is not None:
            passes.job = self._jobs.row(model, tracer)


class _ModelPasses:
    """Passes of one model in the current step."""

    def __init__(self) -> None:
        self.job: int | None = None
        self._step = -1
        self._passes: list[PassRow] = []
        self._written: list[dict[str, Any]] = []  # passes of the last row, as JSON
        self._rows = 0

    def add(self, entry: PassRow) -> None:
        """Append a pass to the current step."""
        if progress.step != self._step:
            self._next_step(progress.step, torch_tracer.current())
        if self._passes and _is_repeated(self._passes[-1], entry):
            self._passes[-1].times += 1
        else:
            self._passes.append(entry)

    def end(self, tracer: TorchTracer) -> None:
        """Write the last rows."""
        self._next_step(max(progress.step, self._step) + 1, tracer)

    def _next_step(self, step: int, tracer: TorchTracer | None) -> None:
        """Write the current step, and those without passes before `step`, which becomes current."""
        self._write(tracer)
        if step > self._step + 1:
            self._step, self._passes = self._step + 1, []
            self._write(tracer)
        self._step, self._passes = step, []

    def _write(self, tracer: TorchTracer | None) -> None:
        passes = [entry.to_json() for entry in self._passes]
        if tracer is None or self.job is None or passes == self._written or self._rows >= MAX_ROWS:
            return
        self._rows += 1
        row = PassesRow(job=self.job, step=self._step, passes=self._passes if self._rows < MAX_ROWS else None)
        tracer.recorder.tables.new("passes", row.to_json())
        self._written = passes


def _is_repeated(passes: PassRow, entry: PassRow) -> bool:
    """Return whether a pass equals earlier ones."""
    once = copy(passes)
    once.times = entry.times
    return once.to_json() == entry.to_json()
