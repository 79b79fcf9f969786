"""Comparison of all ranks with their expected calls.

Ranks with equal jobs share their expected calls. Ranks that also have equal recorded calls share the comparison.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.grouping import Array, concatenated_ranges, group_rows
from commtrace.analyses.table_specs import TABLES
from commtrace.reading.process_reader import Process
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.rules.registry import DEEPSPEED, TORCH

from .causes import UNEXPLAINED, StepContext
from .counted_calls import MeasuredSteps
from .step_comparison import EXPECTED, ComparedStep, compare_step
from .waterfall import WaterfallRows

_MAX_BYTES: Final = 1 << 62
_NEVER_MISSING: Final = {"rank": "int64", "step": "int64", "bytes": "int64", "matched_share": "float64"}


def _table(name: str, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    types = {
        column.name: _NEVER_MISSING.get(column.name, "Int64") if column.kind == "number" else object
        for column in TABLES[name].columns
    }
    return pd.DataFrame(rows, columns=[*types]).astype(types)


@dataclass(frozen=True, eq=False)
class _ExpectedSteps:
    """Expected calls of ranks with equal jobs.

    Attributes:
        prediction: The prediction.
        calls: The distinct sets of calls that steps have.
        calls_of_step: Index into `calls` for each step (step -1 is start-up), int64, shape (steps,).
        payload_bytes: Payload of the calls of all steps.
    """

    prediction: Prediction
    calls: Sequence[Sequence[ExpectedCall]]
    calls_of_step: Array
    payload_bytes: int


@dataclass(frozen=True, eq=False)
class _EquivalentRanks:
    """Comparison shared by ranks with the same expected and the same measured calls.

    Attributes:
        compared: Index into `RankComparison._compared` for each step, int64, shape (steps,).
        theory: Columns of their rows of the table `theory`.
    """

    compared: Array
    theory: Mapping[str, object]


class RankComparison:
    """Comparison of the recorded and the expected calls of all ranks. Equal steps are compared once."""

    def __init__(self, measured: MeasuredSteps, steps: Array) -> None:
        self._measured = measured
        self._steps = steps
        self._expected: list[tuple[Mapping[str, Any], _ExpectedSteps | NotPredictedError]] = []  # by job
        self._compared: list[ComparedStep] = []
        self._compare_once = functools.cache(self._compare)
        self._equivalent: dict[tuple[object, ...], _EquivalentRanks] = {}
        self._ranks: list[tuple[int, _EquivalentRanks]] = []
        self._theory: list[dict[str, object]] = []
        self._waterfall: WaterfallRows | None = None

    def tables(self, *, include_matching_steps: bool) -> NamedTables:
        """Return the tables of the added processes.

        Args:
            include_matching_steps: Whether `expected` and `reconciliation` have the steps without differences, too.
        """
        bars, bars_by_role = self._waterfall or ([], [])
        shown = [step if include_matching_steps or step.differs else None for step in self._compared]
        return {
            "theory": _table("theory", self._theory),
            "expected": self._expanded("expected", [step.expected if step else () for step in shown]),
            "reconciliation": self._expanded("reconciliation", [step.reconciliation if step else () for step in shown]),
            "waterfall": _table("waterfall", bars),
            "waterfall_by_role": _table("waterfall_by_role", bars_by_role),
        }

    def _expanded(self, name: str, rows: Sequence[Sequence[Mapping[str, object]]]) -> pd.DataFrame:
        """Return the table of all steps of all ranks, given the rows of each step in `_compared`."""
        table = _table(name, [{"rank": 0, "step": 0, **row} for step_rows in rows for row in step_rows])
        row_counts = np.array([len(step_rows) for step_rows in rows], np.int64)
        begins = np.cumsum(row_counts) - row_counts

        @functools.cache
        def rows_and_steps(ranks: _EquivalentRanks) -> Array:
            """Return the row in `table`, and the step, of each row of a rank, int64, shape (2, rows)."""
            counts = row_counts[ranks.compared]
            return np.stack([concatenated_ranges(begins[ranks.compared], counts), np.repeat(self._steps, counts)])

        rows_by_rank = [rows_and_steps(ranks) for _, ranks in self._ranks]
        taken, steps = np.concatenate([np.zeros((2, 0), np.int64), *rows_by_rank], axis=1)
        ranks = np.array([rank for rank, _ in self._ranks], np.int64)
        row_ranks = np.repeat(ranks, [rank_rows.shape[1] for rank_rows in rows_by_rank])
        return table.take(taken).assign(rank=row_ranks, step=steps).reset_index(drop=True)

    def add(
        self, number: int, process: Process, given_job: Mapping[str, Any] | None, problem: str | None, own_last: int
    ) -> None:
        """Add a process.

        Args:
            number: Its index in the log.
            process: The process.
            given_job: A job row that replaces the captured one; None if there is none.
            problem: Reason why the process is not compared; None if it is.
            own_last: Its last step, which may be before that of the run.
        """
        known = process.tables.process.get("versions")
        versions = known if isinstance(known, Mapping) else {}
        summary: dict[str, object] = {"rank": process.rank, "other_versions": _other_versions(versions)}
        try:
            job = _captured_job(process) if given_job is None else given_job
            expected = self._expected_steps({**job, "versions": versions})
            if problem:
                raise NotPredictedError(problem)
        except NotPredictedError as reason:
            self._theory.append({**summary, "not_predicted": str(reason)})
            return
        equivalent = self._equivalent_ranks(number, process, expected, own_last)
        self._ranks.append((process.rank, equivalent))
        self._theory.append({**summary, **equivalent.theory})

    def _expected_steps(self, job: Mapping[str, Any]) -> _ExpectedSteps:
        """Return the expected calls of a job, the same object for equal jobs. Raise NotPredictedError without rules."""
        expected = next((steps for known, steps in self._expected if known == job), None)
        if expected is None:
            try:
                expected = _expected_steps(job, self._steps)
            except NotPredictedError as reason:
                expected = reason
            self._expected.append((job, expected))
        if isinstance(expected, NotPredictedError):
            raise expected
        return expected

    def _equivalent_ranks(
        self, number: int, process: Process, expected: _ExpectedSteps, own_last: int
    ) -> _EquivalentRanks:
        """Return the comparison of a process, the same object for equivalent ones."""
        measured = self._measured.of(number, self._steps)
        has_ended, has_lost_records = process.tables.end is not None, process.lost_records > 0
        key = expected, measured.tobytes(), own_last, has_ended, has_lost_records
        if key not in self._equivalent:
            ends_within = (self._steps == own_last) & (not has_ended)
            steps = [expected.calls_of_step, measured, self._steps < 0, ends_within, self._steps > own_last]
            first, groups = group_rows(steps)
            distinct_steps = zip(*(column[first].tolist() for column in steps), strict=True)
            distinct_compared = [self._compare_once(expected, has_lost_records, *step) for step in distinct_steps]
            compared = np.array(distinct_compared, np.int64)[groups]
            if self._waterfall is None:
                complete = np.flatnonzero(measured)[: None if has_ended else -1]  # the last step may lack calls
                self._waterfall = self._waterfall_of(process, expected.prediction, compared, complete)
            self._equivalent[key] = _EquivalentRanks(compared, self._theory_of(expected, compared))
        return self._equivalent[key]

    def _compare(
        self,
        expected: _ExpectedSteps,
        has_lost_records: bool,
        expected_calls: int,
        measured_calls: int,
        is_start: bool,
        ends_within: bool,
        ends_before: bool,
    ) -> int:
        """Compare a step, and return its index in `_compared`.

        Args:
            expected: The expected calls.
            has_lost_records: Whether some counted calls have no record in the log.
            expected_calls: Index of the step's calls in `expected.calls`.
            measured_calls: Index of the step's calls in `_measured.calls`; 0 if it has none.
            is_start: Whether the step is start-up.
            ends_within: Whether the log ends within the step.
            ends_before: Whether the log ends before the step.
        """
        context = StepContext(
            expected.prediction,
            expected.calls[expected_calls],
            is_start=is_start,
            has_calls=measured_calls > 0,
            log_ends_within=ends_within,
            log_ends_before=ends_before,
            has_lost_records=has_lost_records,
        )
        self._compared.append(compare_step(self._measured.calls[measured_calls], context))
        return len(self._compared) - 1

    def _theory_of(self, expected: _ExpectedSteps, compared: Array) -> dict[str, object]:
        """Return the columns of the table `theory` that equivalent ranks have in common."""
        sums: dict[str, int] = defaultdict(int)
        cells = measured_bytes = 0
        for index, times in zip(*map(np.ndarray.tolist, np.unique(compared, return_counts=True)), strict=True):
            step = self._compared[index]
            cells += times * step.cells
            measured_bytes += times * sum(calls.bytes for calls in step.calls)
            for cause, size in step.bytes_by_cause.items():
                sums[cause] += times * size
        return {
            "scheme": expected.prediction.scheme,
            "cells": cells,
            "expected_bytes": expected.payload_bytes,
            "measured_bytes": measured_bytes,
            "matched_bytes": sums[EXPECTED],
            "named_bytes": sum(size for cause, size in sums.items() if cause not in (EXPECTED, UNEXPLAINED)),
            "unexplained_bytes": sums[UNEXPLAINED],
            "matched_share": sums[EXPECTED] / measured_bytes if measured_bytes else None,
        }

    def _waterfall_of(
        self, process: Process, prediction: Prediction, compared: Array, complete: Array
    ) -> WaterfallRows | None:
        """Return the waterfall of the last regular step, preferably of one without an evaluation.

        Args:
            process: The process.
            prediction: Its prediction.
            compared: Index into `_compared` for each step.
            complete: Indices into `_steps` of the steps with calls, without the last one if the log ends within it.
        """
        for evaluates, index in itertools.product((False, True), complete[::-1].tolist()):
            step = int(self._steps[index])
            compared_step: ComparedStep = self._compared[compared[index]]
            if (
                any(calls.phase == "evaluation" for calls in compared_step.calls) == evaluates
                and step >= prediction.steady
                and prediction.special_step(step) is None
            ):
                return compared_step.waterfall(f"recorded, rank {process.rank}, step {step}")
        return None


def _expected_steps(job: Mapping[str, Any], steps: Array) -> _ExpectedSteps:
    """Return the expected calls of a job in these steps. Raise NotPredictedError without rules."""
    try:
        prediction = predict(job)
        calls, calls_of_step = _calls_by_step(prediction, steps)
        times = np.bincount(calls_of_step, minlength=len(calls)).tolist()
        expected_bytes = sum(
            number * sum(call.bytes for call in step_calls) for number, step_calls in zip(times, calls, strict=True)
        )
    except NotPredictedError:
        raise
    except Exception as error:  # a job from a damaged log may hold anything
        raise NotPredictedError(f"the rules fail on the job in the log: {type(error).__name__}: {error}") from error
    if expected_bytes > _MAX_BYTES or abs(prediction.closed_form.bytes) > _MAX_BYTES:
        raise NotPredictedError("the job in the log leads to more than 2^62 bytes")
    return _ExpectedSteps(prediction, calls, calls_of_step, expected_bytes)


def _calls_by_step(prediction: Prediction, steps: Array) -> tuple[list[tuple[ExpectedCall, ...]], Array]:
    """Return the distinct sets of calls that steps have, and the index of each step's set, int64, shape (steps,)."""
    if not prediction.has_special_steps:
        return [prediction.start, *prediction.steps], np.minimum(steps + 1, len(prediction.steps))
    index_of: dict[tuple[ExpectedCall, ...], int] = {}
    by_id: dict[int, tuple[tuple[ExpectedCall, ...], int]] = {}  # far faster than comparing calls
    calls_of_step = []
    for step in steps.tolist():
        calls = prediction.step(step)
        if id(calls) not in by_id:
            by_id[id(calls)] = calls, index_of.setdefault(calls, len(index_of))
        calls_of_step.append(by_id[id(calls)][1])
    return [*index_of], np.array(calls_of_step, np.int64)


def _captured_job(process: Process) -> Mapping[str, Any]:
    jobs = list(process.tables.jobs.values())
    if len(jobs) != 1:
        raise NotPredictedError(f"the process trained {len(jobs)} models" if jobs else "no job was captured")
    return jobs[0]


def _other_versions(versions: Mapping[str, object]) -> str | None:
    other = [
        f"{name} {versions[name]} (rules: {version})"
        for name, version in (TORCH, DEEPSPEED)
        if name in versions and str(versions[name]).partition("+")[0] != version
    ]
    return ", ".join(other) or None
