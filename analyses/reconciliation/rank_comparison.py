"""Comparison of all ranks with their expected calls. Alike ranks share their expectation and its comparison."""

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
from .measured_calls import MeasuredSteps
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
class _Expectation:
    """Expected calls of alike ranks.

    Attributes:
        prediction: The prediction.
        calls: The distinct sets of calls that steps have.
        calls_of_step: Position in `calls` of the calls of each step, from -1 on, shape (steps,).
        payload_bytes: Payload of the calls of all steps.
    """

    prediction: Prediction
    calls: Sequence[Sequence[ExpectedCall]]
    calls_of_step: Array
    payload_bytes: int


@dataclass(frozen=True, eq=False)
class _AlikeRanks:
    """Comparison shared by ranks with the same expected and the same measured calls.

    Attributes:
        positions: Position in `RankComparison._compared` of each step.
        theory: Columns of their rows of the table `theory`.
    """

    positions: Array
    theory: Mapping[str, object]


class RankComparison:
    """Comparison of the recorded and the expected calls of all ranks. Equal steps are compared once."""

    def __init__(self, measured: MeasuredSteps, steps: Array) -> None:
        self._measured = measured
        self._steps = steps
        self._expectations: list[tuple[Mapping[str, Any], _Expectation | NotPredictedError]] = []  # by job
        self._compared: list[ComparedStep] = []
        self._position_of = functools.cache(self._compare)
        self._alike: dict[tuple[object, ...], _AlikeRanks] = {}
        self._ranks: list[tuple[int, _AlikeRanks]] = []
        self._theory: list[dict[str, object]] = []
        self._waterfall: WaterfallRows | None = None

    def tables(self, *, agreeing: bool) -> NamedTables:
        """Return the tables of the added processes; unless `agreeing`, without steps in which nothing differs."""
        bars, bars_by_role = self._waterfall or ([], [])
        shown = [step if agreeing or step.differs else None for step in self._compared]
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
        lengths = np.array([len(step_rows) for step_rows in rows], np.int64)
        begins = np.cumsum(lengths) - lengths

        @functools.cache
        def rows_and_steps(alike: _AlikeRanks) -> Array:
            own = lengths[alike.positions]
            return np.stack([concatenated_ranges(begins[alike.positions], own), np.repeat(self._steps, own)])

        of_ranks = [rows_and_steps(alike) for _, alike in self._ranks]
        taken, steps = np.concatenate([np.zeros((2, 0), np.int64), *of_ranks], axis=1)
        ranks = np.array([rank for rank, _ in self._ranks], np.int64)
        of_row = np.repeat(ranks, [own.shape[1] for own in of_ranks])
        return table.take(taken).assign(rank=of_row, step=steps).reset_index(drop=True)

    def add(
        self, number: int, process: Process, given_job: Mapping[str, Any] | None, problem: str | None, own_last: int
    ) -> None:
        """Add a process.

        Args:
            number: Its position in the log.
            process: The process.
            given_job: A job row that replaces the captured one.
            problem: Why the process is not compared, if so.
            own_last: Its last step, which may be before that of the run.
        """
        known = process.tables.process.get("versions")
        versions = known if isinstance(known, Mapping) else {}
        summary: dict[str, object] = {"rank": process.rank, "other_versions": _other_versions(versions)}
        try:
            job = _captured_job(process) if given_job is None else given_job
            expectation = self._expectation({**job, "versions": versions})
            if problem:
                raise NotPredictedError(problem)
        except NotPredictedError as reason:
            self._theory.append({**summary, "not_predicted": str(reason)})
            return
        alike = self._alike_ranks(number, process, expectation, own_last)
        self._ranks.append((process.rank, alike))
        self._theory.append({**summary, **alike.theory})

    def _expectation(self, job: Mapping[str, Any]) -> _Expectation:
        """Return the expected calls of a job, the same object for equal jobs. Raises NotPredictedError."""
        expectation = next((expected for known, expected in self._expectations if known == job), None)
        if expectation is None:
            try:
                expectation = _expect(job, self._steps)
            except NotPredictedError as reason:
                expectation = reason
            self._expectations.append((job, expectation))
        if isinstance(expectation, NotPredictedError):
            raise expectation
        return expectation

    def _alike_ranks(self, number: int, process: Process, expectation: _Expectation, own_last: int) -> _AlikeRanks:
        """Return the comparison of a process, the same object for alike ones."""
        measured = self._measured.of(number, self._steps)
        has_ended, has_lost_records = process.tables.end is not None, process.lost_records > 0
        key = expectation, measured.tobytes(), own_last, has_ended, has_lost_records
        if key not in self._alike:
            ends_within = (self._steps == own_last) & (not has_ended)
            steps = [expectation.calls_of_step, measured, self._steps < 0, ends_within, self._steps > own_last]
            first, alike = group_rows(steps)
            distinct = zip(*(column[first].tolist() for column in steps), strict=True)
            different = [self._position_of(expectation, has_lost_records, *step) for step in distinct]
            positions = np.array(different, np.int64)[alike]
            if self._waterfall is None:
                own = np.flatnonzero(measured)[: None if has_ended else -1]  # the last step may lack calls
                self._waterfall = self._waterfall_of(process, expectation.prediction, positions, own)
            self._alike[key] = _AlikeRanks(positions, self._theory_of(expectation, positions))
        return self._alike[key]

    def _compare(
        self, expectation: _Expectation, has_lost_records: bool, expected: int, measured: int, *ends: bool
    ) -> int:
        """Compare a step, and return its position in `_compared`.

        Args:
            expectation: The expected calls.
            has_lost_records: Whether some counted calls have no record in the log.
            expected: Position of the step's calls in `expectation.calls`.
            measured: Their position in `_measured.calls`, 0 without any.
            ends: Whether the step is start-up, whether the log ends within it, and whether the log ends before it.
        """
        is_start, ends_within, ends_before = ends
        context = StepContext(
            expectation.prediction,
            expectation.calls[expected],
            is_start=is_start,
            has_calls=measured > 0,
            log_ends_within=ends_within,
            log_ends_before=ends_before,
            has_lost_records=has_lost_records,
        )
        self._compared.append(compare_step(self._measured.calls[measured], context))
        return len(self._compared) - 1

    def _theory_of(self, expectation: _Expectation, positions: Array) -> dict[str, object]:
        """Return the columns of the table `theory` that alike ranks have in common."""
        sums: dict[str, int] = defaultdict(int)
        cells = measured_bytes = 0
        for position, times in zip(*map(np.ndarray.tolist, np.unique(positions, return_counts=True)), strict=True):
            step = self._compared[position]
            cells += times * step.cells
            measured_bytes += times * sum(calls.bytes for calls in step.calls)
            for cause, size in step.bytes_by_cause.items():
                sums[cause] += times * size
        return {
            "scheme": expectation.prediction.scheme,
            "cells": cells,
            "expected_bytes": expectation.payload_bytes,
            "measured_bytes": measured_bytes,
            "matched_bytes": sums[EXPECTED],
            "named_bytes": sum(size for cause, size in sums.items() if cause not in (EXPECTED, UNEXPLAINED)),
            "unexplained_bytes": sums[UNEXPLAINED],
            "matched_share": sums[EXPECTED] / measured_bytes if measured_bytes else None,
        }

    def _waterfall_of(
        self, process: Process, prediction: Prediction, positions: Array, measured: Array
    ) -> WaterfallRows | None:
        """Return the waterfall of the last regular measured step, preferably of one without an evaluation.

        `measured` has the positions of the measured steps in `_steps`.
        """
        for evaluates, position in itertools.product((False, True), measured[::-1].tolist()):
            step = int(self._steps[position])
            compared: ComparedStep = self._compared[positions[position]]
            if (
                any(calls.phase == "evaluation" for calls in compared.calls) == evaluates
                and step >= prediction.steady
                and prediction.special_step(step) is None
            ):
                return compared.waterfall(f"recorded, rank {process.rank}, step {step}")
        return None


def _expect(job: Mapping[str, Any], steps: Array) -> _Expectation:
    """Return the expected calls of a job in steps from -1 on. Raises NotPredictedError."""
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
        raise NotPredictedError("the job in the log leads to more bytes than 64 bits can count")
    return _Expectation(prediction, calls, calls_of_step, expected_bytes)


def _calls_by_step(prediction: Prediction, steps: Array) -> tuple[list[tuple[ExpectedCall, ...]], Array]:
    """Return the distinct sets of calls of steps, and the position of each step's set in them, from step -1 on."""
    if not prediction.has_special_steps:
        return [prediction.start, *prediction.steps], np.minimum(steps + 1, len(prediction.steps))
    different: dict[tuple[ExpectedCall, ...], int] = {}
    by_id: dict[int, tuple[tuple[ExpectedCall, ...], int]] = {}  # far faster than comparing calls
    calls_of_step = []
    for step in steps.tolist():
        calls = prediction.step(step)
        if id(calls) not in by_id:
            by_id[id(calls)] = calls, different.setdefault(calls, len(different))
        calls_of_step.append(by_id[id(calls)][1])
    return [*different], np.array(calls_of_step, np.int64)


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
