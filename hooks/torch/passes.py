"""Passes of a model in each step: the rows of the table `passes`.

They determine what sharded models gather. A row is written for a step whose passes differ from
those of the step before.
"""

from __future__ import annotations

import operator
import weakref
from copy import copy
from typing import Any

from commtrace.current_step import progress
from commtrace.job_row import PassesRow, PassRow

from . import tracer as torch_tracer
from .captured_jobs import Jobs
from .step_rows import RowsWrittenAtEnd, StepRows
from .tracer import TorchTracer


class Passes:
    """Passes of all models of one kind."""

    def __init__(self, jobs: Jobs) -> None:
        """Write the passes of models that are in `jobs`."""
        self._jobs = jobs
        self._by_model: weakref.WeakKeyDictionary[Any, ModelPasses] = weakref.WeakKeyDictionary()
        self._last = RowsWrittenAtEnd()

    def install(self) -> None:
        """Write to the tables of this recorder, and of each that starts from now on."""
        self._last.install()

    def uninstall(self) -> None:
        """Forget all models."""
        self._last.uninstall()
        self._by_model.clear()

    def add(self, model: Any, entry: PassRow) -> ModelPasses | None:
        """Add a single pass to the current step, the step of its calls. The row may be added again: it is not changed.

        Returns:
            The model's passes; None if it was built before tracing began: it has no job, and its passes are not known.
        """
        passes = self._by_model.get(model)
        if passes is None:
            if model not in self._jobs:
                return None
            passes = self._by_model[model] = ModelPasses()
            self._last.rows.append(passes)
        passes.add(entry)
        if passes.job is None:
            tracer = torch_tracer.current()
            if tracer is not None:
                passes.job = self._jobs.row(model, tracer)
        return passes


class ModelPasses(StepRows):
    """Passes of one model in the current step."""

    limit = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.job: int | None = None
        self._passes: list[PassRow] = []
        self._last: list[PassRow] = []  # of the last step that was compared with the one before

    def add(self, entry: PassRow) -> None:
        """Append a pass to the current step."""
        self.enter_step()
        last = self._passes[-1] if self._passes else None
        if last is not None and _is_repeated(last, entry):
            self._passes[-1] = copy(last)
            self._passes[-1].times += 1
        elif last is not None and _names_units(last) and _names_units(entry) and last.kind == entry.kind:
            self._passes[-1] = copy(last)
            self._passes[-1].modules = [*last.modules, *entry.modules]
        else:
            self._passes.append(entry)

    def repeat(self, entry: PassRow) -> bool:
        """Add a pass if it begins a step, and was all of the two before. Return whether it was.

        `add` would do the same, in most steps of most trainings, with more functions.
        """
        step, passes, last = progress.step, self._passes, self._last
        if step != self._step + 1 or not (len(passes) == len(last) == 1 and passes[0] is last[0] is entry):
            return False
        self._step = step
        return True

    def facts(self) -> list[Any]:
        """Return the passes."""
        return [entry.to_json() for entry in self._passes]

    def clear(self) -> None:
        """Begin a step without passes."""
        self._passes = []

    def repeats(self) -> bool:
        """Return whether the current step has the rows of the one before, which need not be compared as JSON."""
        return len(self._passes) == len(self._last) and all(map(operator.is_, self._passes, self._last))

    def _write(self, tracer: TorchTracer | None) -> None:
        if self.job is not None and tracer is not None and not self.repeats():
            super()._write(tracer)
            self._last = self._passes

    def write(self, tracer: TorchTracer, step: int, facts: list[Any] | None) -> None:
        """Add a row to the table `passes`."""
        assert self.job is not None
        row = PassesRow(job=self.job, step=step, passes=None if facts is None else self._passes)
        tracer.recorder.tables.new("passes", row.to_json())


def _names_units(entry: PassRow) -> bool:
    """Return whether an entry is about single units of FSDP2."""
    return entry.has(PassRow.modules) and not entry.has(PassRow.parameters)


def _is_repeated(passes: PassRow, entry: PassRow) -> bool:
    """Return whether a pass equals earlier ones."""
    once = copy(passes)
    once.times = entry.times
    return once.to_json() == entry.to_json()
