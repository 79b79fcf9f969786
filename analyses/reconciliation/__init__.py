"""Comparison of the recorded calls with those that theory expects of the captured job. Columns: `table_specs`.

A cell is one operation of one parallel dimension in one step of one rank. Calls of a cell are compared by payload, and
by group size in dimensions whose groups differ in size; from step DETAILED_STEPS on, by number and bytes. Calls that
match, or whose size is within its bounds, have the cause "expected". All others are leftovers, with the sentence of a
cause (`causes.CAUSES`) or "unexplained". Only processes that trained one model, of a scheme with rules, are compared.

The waterfall leads from the paper's closed form (equation 2 or 3 with the real number of parameters, times the bytes of
a parameter's element) to the wire bytes of one rank's step. Sums are exact; running sums are rounded to whole bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import Analysis, NamedTables
from commtrace.analyses.grouping import Array, concatenated_ranges, group_rows
from commtrace.analyses.table_specs import TABLES
from commtrace.reading.process_reader import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.reading.summary_reader import MIXED
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.rules.registry import DEEPSPEED, TORCH

from . import measured_calls
from .causes import UNEXPLAINED, StepContext
from .compared_steps import EXPECTED, ComparedStep, compare_step
from .measured_calls import MeasuredSteps, last_steps, measured_steps
from .waterfall import WaterfallRows

TABLE_NAMES: Final = ("theory", "expected", "reconciliation", "waterfall", "waterfall_by_role")
_MAX_BYTES: Final = 1 << 62
_FIRST_RECORDS: Final = 16
_NEVER_MISSING: Final = {"rank": "int64", "step": "int64", "bytes": "int64", "matched_share": "float64"}


def _finish(
    table: pd.DataFrame, run: RecordedRun, jobs: Sequence[Mapping[str, Any]] = (), *, agreeing: bool = True
) -> NamedTables:
    measured = measured_steps(table, len(run.processes))
    own_last = last_steps(table, len(run.processes))
    comparison = _Comparison(measured, compared_steps(own_last, run))
    for number, (process, last) in enumerate(zip(run.processes, own_last, strict=True)):
        # Stages have equally many ranks each, and are in the order of the ranks.
        job = jobs[process.rank * len(jobs) // (run.world_size or len(run.processes))] if jobs else None
        comparison.add(number, process, job, _problem(process, last, run), last)
    return comparison.tables(agreeing=agreeing)


def compared_steps(last_steps: Iterable[int], run: RecordedRun) -> Array:
    """Return the steps that are compared, ascending from -1 (start-up), given the last one of each process."""
    last = [own for own, process in zip(last_steps, run.processes, strict=True) if not _problem(process, own, run)]
    steps = np.arange(_first_whole_step(run), max(last, default=-1) + 1)
    return steps[_is_compared(steps, run)]


def _problem(process: Process, last_step: int, run: RecordedRun) -> str | None:
    """Return why a process with this last step is not compared, if so."""
    return process.steps_problem(last_step) or run.selection_problem


def _first_whole_step(run: RecordedRun) -> int:
    """Return the first step of which no process has removed records, -1: start-up.

    Records are written in the order in which calls end, more or less: the first ones that are left may be of several
    steps, and those of calls that are never waited for come last.
    """
    first = -1
    for process in run.processes:
        if process.removed and process.segments:
            records = next(process.segments[0].blocks(_FIRST_RECORDS), None)
            first = max(first, -1 if records is None else int(records["step"].max(initial=-1)) + 1)
    return first


def _is_compared(steps: Array, run: RecordedRun) -> Array:
    """Return whether the calls of each step are in the log, apart from those of other steps, bool, shape (n,)."""
    compared = np.asarray(run.select_steps(steps) & (steps != MIXED))
    for process in run.processes:
        for first, last in process.summary.summed_steps if process.summary else ():
            compared &= (steps < first) | (steps > last)
    return compared


def _table(name: str, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    types = {
        column.name: _NEVER_MISSING.get(column.name, "Int64") if column.kind == "number" else object
        for column in TABLES[name].columns
    }
    return pd.DataFrame(rows, columns=[*types]).astype(types)


@dataclass(frozen=True)
class _AlikeRanks:
    """What the comparison of ranks has in common that are expected to do the same, and did the same.

    Attributes:
        positions: Position in `_Comparison._compared` of each step.
        theory: Columns of their rows of the table `theory`.
    """

    positions: Array
    theory: Mapping[str, object]


@dataclass(frozen=True)
class _Expectation:
    """What theory expects of alike ranks.

    Attributes:
        job: Their job.
        prediction: The prediction.
        calls: The different calls of a step.
        calls_of_step: Position in `calls` of the calls of each step, from -1 on, shape (steps,).
        payload_bytes: Payload of the calls of all steps.
    """

    job: Mapping[str, Any]
    prediction: Prediction
    calls: Sequence[Sequence[ExpectedCall]]
    calls_of_step: Array
    payload_bytes: int


class _Comparison:
    """The tables, process by process. Alike ranks share an expectation, and their alike steps are compared once."""

    def __init__(self, measured: MeasuredSteps, steps: Array) -> None:
        self._measured = measured
        self._steps = steps
        self._expectations: list[_Expectation] = []
        self._not_predicted: list[tuple[Mapping[str, Any], NotPredictedError]] = []
        self._compared: list[ComparedStep] = []
        self._position: dict[tuple[int, ...], int] = {}
        """Position in `_compared` of the step with these properties."""
        self._ranks: list[int] = []
        self._alike: list[_AlikeRanks] = []
        """What each of `_ranks` has in common with others."""
        self._known_alike: dict[tuple[object, ...], _AlikeRanks] = {}
        self._theory: list[dict[str, object]] = []
        self._waterfall: WaterfallRows | None = None

    def tables(self, *, agreeing: bool) -> NamedTables:
        """Return the tables of the processes added; unless `agreeing`, without steps in which nothing differs."""
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
        """Return the table of all steps of all ranks, given the rows of each of `_compared`."""
        table = _table(name, [{"rank": 0, "step": 0, **row} for same in rows for row in same])
        lengths = np.array([len(same) for same in rows], np.int64)
        begins = np.cumsum(lengths) - lengths
        rows_and_steps = {
            id(alike): (
                concatenated_ranges(begins[alike.positions], lengths[alike.positions]),
                np.repeat(self._steps, lengths[alike.positions]),
            )
            for alike in self._known_alike.values()
        }
        none = np.zeros(0, np.int64)
        taken, steps = zip((none, none), *(rows_and_steps[id(alike)] for alike in self._alike), strict=True)
        ranks = np.repeat(np.array(self._ranks, np.int64), [len(own) for own in steps[1:]])
        expanded = table.take(np.concatenate(taken))
        return expanded.assign(rank=ranks, step=np.concatenate(steps)).reset_index(drop=True)

    def add(
        self, number: int, process: Process, given_job: Mapping[str, Any] | None, problem: str | None, own_last: int
    ) -> None:
        """Add the process at a position of the log. It may lack the last step of the run: its own is `own_last`.

        `given_job` replaces the captured job; `problem` is why the process is not compared.
        """
        known = process.tables.process.get("versions")
        versions = known if isinstance(known, Mapping) else {}
        summary: dict[str, object] = {"rank": process.rank, "other_versions": _other_versions(versions)}
        try:
            job = _captured_job(process) if given_job is None else given_job
            at, expectation = self._expectation({**job, "versions": versions})
            if problem:
                raise NotPredictedError(problem)
        except NotPredictedError as reason:
            self._theory.append({**summary, "not_predicted": str(reason)})
            return
        alike = self._alike_ranks(number, process, at, expectation, own_last)
        self._ranks.append(process.rank)
        self._alike.append(alike)
        self._theory.append({**summary, **alike.theory})

    def _alike_ranks(
        self, number: int, process: Process, at: int, expectation: _Expectation, own_last: int
    ) -> _AlikeRanks:
        """Return the comparison of a process, the same for alike ones; `at`: position of its expectation."""
        measured = self._measured.of(number, self._steps)
        has_ended, loses_records = process.tables.end is not None, process.lost_records > 0
        key = at, measured.tobytes(), own_last, has_ended, loses_records
        if key in self._known_alike:
            return self._known_alike[key]
        flags = (
            self._steps < 0,
            (self._steps == own_last) & (not has_ended),
            self._steps > own_last,
        )
        positions = self._compare(at, expectation, measured, flags, loses_records=loses_records)
        if self._waterfall is None:
            steps = np.flatnonzero(measured)[: None if has_ended else -1]  # of the last one, calls may be missing
            self._waterfall = self._waterfall_of(process, expectation.prediction, positions, steps)
        self._known_alike[key] = _AlikeRanks(positions, self._theory_of(expectation, positions))
        return self._known_alike[key]

    def _theory_of(self, expectation: _Expectation, positions: Array) -> dict[str, object]:
        """Return the columns of the table `theory` that alike ranks have in common."""
        sums: dict[str, int] = defaultdict(int)
        cells = measured_bytes = 0
        for position, times in zip(*map(np.ndarray.tolist, np.unique(positions, return_counts=True)), strict=True):
            step = self._compared[position]
            cells += times * step.cells
            measured_bytes += times * sum(same.bytes for same in step.calls)
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

    def _expectation(self, job: Mapping[str, Any]) -> tuple[int, _Expectation]:
        """Return what theory expects of a job, the same for equal jobs, and its position in `_expectations`."""
        for position, expectation in enumerate(self._expectations):
            if expectation.job == job:
                return position, expectation
        for known, reason in self._not_predicted:
            if known == job:
                raise reason
        try:
            self._expectations.append(_expect(job, self._steps))
        except NotPredictedError as reason:
            self._not_predicted.append((job, reason))
            raise
        return len(self._expectations) - 1, self._expectations[-1]

    def _compare(
        self, at: int, expectation: _Expectation, measured: Array, flags: Sequence[Array], *, loses_records: bool
    ) -> Array:
        """Return the position in `_compared` of each of `_steps`, given the position of its calls in `_measured`."""
        keys = [expectation.calls_of_step, measured, *(flag.astype(np.int64) for flag in flags)]
        first, alike = group_rows(keys)
        positions = []
        for calls, own, *bits in zip(*(key[first].tolist() for key in keys), strict=True):
            properties = at, int(loses_records), calls, own, *bits
            if properties not in self._position:
                self._position[properties] = len(self._compared)
                is_start, ends_within, ends_before = map(bool, bits)
                context = StepContext(
                    expectation.prediction,
                    expectation.calls[calls],
                    is_start=is_start,
                    has_calls=own > 0,
                    log_ends_within=ends_within,
                    log_ends_before=ends_before,
                    loses_records=loses_records,
                )
                self._compared.append(compare_step(self._measured.calls[own], context))
            positions.append(self._position[properties])
        return np.array(positions, np.int64)[alike]

    def _waterfall_of(
        self, process: Process, prediction: Prediction, positions: Array, measured: Array
    ) -> WaterfallRows | None:
        """Return the waterfall of the last regular one of the measured steps, rather of one without an evaluation.

        `measured` are their positions in `_steps`.
        """

        def regular(*, evaluates: bool) -> Iterator[int]:
            for position in measured[::-1].tolist():
                step = int(self._steps[position])
                calls = self._compared[positions[position]].calls
                if any(same.phase == "evaluation" for same in calls) == evaluates and (
                    step >= prediction.steady and prediction.special_step(step) is None
                ):
                    yield position

        for position in islice(chain(regular(evaluates=False), regular(evaluates=True)), 1):
            compared: ComparedStep = self._compared[positions[position]]
            return compared.waterfall(f"recorded, rank {process.rank}, step {self._steps[position]}")
        return None


def _expect(job: Mapping[str, Any], steps: Array) -> _Expectation:
    """Return what theory expects of a job in steps from -1 on. Raises NotPredictedError."""
    try:
        prediction = predict(job)
        calls, calls_of_step = _calls_by_step(prediction, steps)
        times = np.bincount(calls_of_step, minlength=len(calls)).tolist()
        expected_bytes = sum(
            number * sum(call.bytes for call in same) for number, same in zip(times, calls, strict=True)
        )
    except NotPredictedError:
        raise
    except Exception as error:  # a job from a damaged log may hold anything
        raise NotPredictedError(f"the rules fail on the job in the log: {type(error).__name__}: {error}") from error
    if expected_bytes > _MAX_BYTES or abs(prediction.closed_form.bytes) > _MAX_BYTES:
        raise NotPredictedError("the job in the log leads to more bytes than 64 bits can count")
    return _Expectation(job, prediction, calls, calls_of_step, expected_bytes)


def _calls_by_step(prediction: Prediction, steps: Array) -> tuple[list[tuple[ExpectedCall, ...]], Array]:
    """Return the different calls of a step, and the position in them of each step's calls, from step -1 on."""
    if not prediction.has_special_steps:
        return [prediction.start, *prediction.steps], np.minimum(steps + 1, len(prediction.steps))
    different: dict[tuple[ExpectedCall, ...], int] = {}
    same: dict[int, tuple[tuple[ExpectedCall, ...], int]] = {}  # by identity, which takes far less than a comparison
    calls_of_step = []
    for step in steps.tolist():
        calls = prediction.step(step)
        if id(calls) not in same:
            same[id(calls)] = calls, different.setdefault(calls, len(different))
        calls_of_step.append(same[id(calls)][1])
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


def _has_job(run: RecordedRun) -> bool:
    return any(process.tables.jobs for process in run.processes)


ANALYSIS: Final = Analysis(
    "reconciliation",
    measured_calls.partial,
    measured_calls.merge,
    _finish,
    _has_job,
    reads_cells=True,
    categorical=True,
)


DIFFERENCES: Final = replace(ANALYSIS, finish=partial(_finish, agreeing=False))
"""The same without the cells of steps in which nothing differs: of many ranks and steps, they take much memory."""


def differences_from(*jobs: Mapping[str, Any]) -> Analysis:
    """Return DIFFERENCES with job rows in place of the captured ones, for a pipeline one per stage."""
    return replace(DIFFERENCES, finish=partial(_finish, jobs=jobs, agreeing=False), reads_records=None)
