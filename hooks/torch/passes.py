"""Passes of a model in each step: the rows of the table `passes`.

They determine what sharded models gather. A row is written for a step whose passes differ from
those of the step before.
"""

from __future__ import annotations

import operator
import weakref
from copy import copy
from typing import Any

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
        self._by_model: weakref.WeakKeyDictionary[Any, _ModelPasses] = weakref.WeakKeyDictionary()
        self._last = RowsWrittenAtEnd()

    def install(self) -> None:
        """Write to the tables of this recorder, and of each that starts from now on."""
        self._last.install()

    def uninstall(self) -> None:
        """Forget all models."""
        self._last.uninstall()
        self._by_model.clear()

    def add(self, model: Any, entry: PassRow) -> None:
        """Add a single pass to the current step, the step of its calls. The row may be added again: it is not changed.

        A model that was built before tracing began has no job, and its passes are not known.
        """
        passes = self._by_model.get(model)
        if passes is None:
            if model not in self._jobs:
                return
            passes = self._by_model[model] = _ModelPasses()
            self._last.rows.append(passes)
        passes.add(entry)
        if passes.job is None:
            tracer = torch_tracer.current()
            if tracer is not None:
                passes.job = self._jobs.row(model, tracer)


class _ModelPasses(StepRows):
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
