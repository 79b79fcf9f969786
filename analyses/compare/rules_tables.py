"""Comparison of all processes with the calls that rules expect, and its tables."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.grouping import Array, concatenated_ranges
from commtrace.analyses.table_specs.spec import TableSpec
from commtrace.reading.process_reader import Process
from commtrace.schema import Purpose
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction
from commtrace.theory.job import only_job
from commtrace.theory.rules.registry import other_versions

from .call_keys import CellKey
from .causes import UNEXPLAINED
from .compared_ranks import Comparison, EqualRanks
from .own_calls import ACTIVITY_NAMES, EVALUATION, is_activity, is_own
from .rules_run import ExpectedRun, ExpectedSteps, RuledStep, versions_of
from .run_calls import RankCalls, RunCalls, StepCalls
from .step_differences import ComparedStep
from .step_pairs import StepPairs
from .theory_specs import EXPECTED_CALLS, RECONCILIATION, THEORY, WATERFALL, WATERFALL_BY_ROLE
from .waterfall import WaterfallRows, waterfall

EXPECTED: Final = "expected"
"""Cause of calls that are as expected."""

_NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
_NEVER_MISSING: Final = {"rank": "int64", "step": "int64", "bytes": "int64", "matched_share": "float64"}

_Row: TypeAlias = dict[str, object]

_REPEATED: Final = (
    "the modules of unit {units} run at different times of a pass, each time with an all_gather; such units have no "
    "rules (the report's section purposes counts their calls); compare with a dry run (commtrace check DIR --dryrun "
    "-- CMD)"
)


class RuleComparison:
    """Comparison of the recorded calls of processes with those that rules expect.

    Attributes:
        comparison: The comparison of their ranks.
        theory: Rows of the table `theory`.
    """

    def __init__(self, name: str, contents: Sequence[StepCalls], steps: Array) -> None:
        """Create a comparison of `steps` of the run `name`, whose distinct steps are `contents`."""
        self._steps = steps
        self._expected = ExpectedRun(steps)
        expected = RunCalls("rules", self._expected.contents, {}, None)
        self.comparison = Comparison(expected, RunCalls(name, contents, {}, None), self._pair)
        self.theory: list[_Row] = []
        self._ranks: list[tuple[int, EqualRanks]] = []
        self._theory_of: dict[EqualRanks, _Row] = {}
        self._waterfall: WaterfallRows | None = None

    def add(self, process: Process, calls: RankCalls, given_job: Mapping[str, Any] | None, problem: str | None) -> None:
        """Add a process.

        Args:
            process: The process.
            calls: Its recorded calls.
            given_job: A job row that replaces the captured one; None if there is none.
            problem: Reason why the process is not compared; None if it is.
        """
        versions = versions_of(process)
        summary: _Row = {"rank": process.rank, "other_versions": other_versions(versions)}
        try:
            job = only_job([*process.tables.jobs.values()]) if given_job is None else given_job
            expected = self._expected.of({**job, "versions": versions})
            if problem:
                raise NotPredictedError(problem)
        except NotPredictedError as reason:
            (text,) = reason.args  # which may be a Statement
            self.theory.append({**summary, "not_predicted": text})
            return
        equal = self.comparison.add(process.rank, (expected.calls, calls))
        if units := self._repeated_units(equal):
            equal.ranks.remove(process.rank)
            self.theory.append({**summary, "not_predicted": _REPEATED.format(units=", ".join(sorted(units)))})
            return
        if equal not in self._theory_of:
            self._theory_of[equal] = self._theory_row(expected, equal)
            if self._waterfall is None:
                self._waterfall = self._waterfall_of(process, expected.prediction, equal, calls.last_complete_step)
        self._ranks.append((process.rank, equal))
        self.theory.append({**summary, **self._theory_of[equal]})

    def _repeated_units(self, equal: EqualRanks) -> set[str]:
        """Return the units of FSDP2 that training gathers for forward more often than in each pass."""
        explained = (
            calls for index in {*equal.compared.tolist()} for _, calls in self.comparison.steps[index].explained
        )
        return {
            calls.place
            for calls in explained
            if calls.calls > 0
            and calls.place
            and calls.purpose == Purpose.PARAMETERS_FORWARD.value
            and calls.key.phase != EVALUATION
        }

    def tables(self, *, include_matching_steps: bool) -> NamedTables:
        """Return the tables of the added processes.

        Args:
            include_matching_steps: Whether `expected` and `reconciliation` have the steps without differences, too.
        """
        bars, bars_by_role = self._waterfall or ([], [])
        shown = [step if include_matching_steps or step.explained else None for step in self.comparison.steps]
        expected = [[*_expected_rows(_predicted(step))] if step else [] for step in shown]
        reconciliation = [[*_reconciliation_rows(step)] if step else [] for step in shown]
        return {
            "theory": _table(THEORY, self.theory),
            "expected": self._expanded(EXPECTED_CALLS, expected),
            "reconciliation": self._expanded(RECONCILIATION, reconciliation),
            "waterfall": _table(WATERFALL, bars),
            "waterfall_by_role": _table(WATERFALL_BY_ROLE, bars_by_role),
        }

    def _pair(self, ranks: tuple[RankCalls, RankCalls]) -> StepPairs:
        """Return the steps of a rank: all, even after its last one."""
        expected, measured = ranks
        ends_before = self._steps > measured.last_step
        flags = (
            self._steps < 0,
            (self._steps > measured.last_complete_step) & ~ends_before,
            ends_before,
            ~ends_before | measured.ended,
            np.full(len(self._steps), measured.lost_records > 0),
        )
        return StepPairs(self._steps, (expected.at(self._steps), measured.at(self._steps)), [], flags)

    def _expanded(self, spec: TableSpec, rows: Sequence[Sequence[_Row]]) -> pd.DataFrame:
        """Return the table of all steps of all ranks, given the rows of each of `comparison.steps`."""
        table = _table(spec, [{"rank": 0, "step": 0, **row} for step_rows in rows for row in step_rows])
        row_counts = np.array([len(step_rows) for step_rows in rows], np.int64)
        begins = np.cumsum(row_counts) - row_counts
        taken_by_ranks: dict[EqualRanks, Array] = {}  # row in `table`, and step, of each row, int64, shape (2, rows)
        for equal in self.comparison.ranks:
            counts = row_counts[equal.compared]
            rows_of_steps = concatenated_ranges(begins[equal.compared], counts)
            taken_by_ranks[equal] = np.stack([rows_of_steps, np.repeat(self._steps, counts)])
        rows_by_rank = [taken_by_ranks[equal] for _, equal in self._ranks]
        taken, steps = np.concatenate([np.zeros((2, 0), np.int64), *rows_by_rank], axis=1)
        ranks = np.array([rank for rank, _ in self._ranks], np.int64)
        row_ranks = np.repeat(ranks, [rank_rows.shape[1] for rank_rows in rows_by_rank])
        return table.take(taken).assign(rank=row_ranks, step=steps).reset_index(drop=True)

    def _theory_row(self, expected: ExpectedSteps, equal: EqualRanks) -> _Row:
        """Return the columns of the table `theory` that equal ranks have in common."""
        sums: dict[str, int] = defaultdict(int)
        cells = measured_bytes = 0
        for index, steps in equal.steps_by_comparison().items():
            step, times = self.comparison.steps[index], len(steps)
            cells += times * len(step.cells)
            measured_bytes += times * step.measured.volume[1]
            sums[EXPECTED] += times * sum(cell.matched_bytes for cell in step.cells)
            for cause, unmatched in step.explained:
                sums[cause] += times * abs(unmatched.bytes)
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
        self, process: Process, prediction: Prediction, equal: EqualRanks, last_step: int
    ) -> WaterfallRows | None:
        """Return the waterfall of the last regular step up to `last_step`, preferably of one without an activity.

        Calls of activities are left out.
        """
        complete = np.flatnonzero((equal.pairs.contents[1] > 0) & (self._steps <= last_step))
        for has_activity, index in itertools.product((False, True), complete[::-1].tolist()):
            number = int(self._steps[index])
            step = self.comparison.steps[equal.compared[index]]
            measured = [calls for calls in step.measured.calls if calls.purpose not in ACTIVITY_NAMES]
            if (
                any(is_activity(calls.purpose, calls.key.phase) for calls in step.measured.calls) == has_activity
                and number >= prediction.steady
                and prediction.special_step(number) is None
            ):
                if any(calls.wire is None for calls in measured):
                    return None
                label = f"recorded, rank {process.rank}, step {number}"
                explained = [(cause, calls) for cause, calls in step.explained if calls.purpose not in ACTIVITY_NAMES]
                return waterfall(prediction, step.cells, explained, measured, label)
        return None


def _table(spec: TableSpec, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    types = {
        column.name: _NEVER_MISSING.get(column.name, "Int64") if column.kind == "number" else object
        for column in spec.columns
    }
    return pd.DataFrame(rows, columns=[*types]).astype(types)


def _predicted(step: ComparedStep) -> Sequence[ExpectedCall]:
    return step.expected.predicted if isinstance(step.expected, RuledStep) else ()


def _expected_rows(expected: Sequence[ExpectedCall]) -> Iterator[_Row]:
    """Yield the rows of the table `expected` of a step, without `rank` and `step`."""
    by_key: dict[CellKey, list[ExpectedCall]] = defaultdict(list)
    for call in expected:
        by_key[call.role, call.op].append(call)
    for (role, op), calls in sorted(by_key.items()):
        max_calls = sum(call.calls if call.max_calls is None else call.max_calls for call in calls)
        min_bytes = sum(call.bytes if call.min_payload is None else call.min_payload * call.calls for call in calls)
        yield {
            "role": role,
            "op": op,
            "calls": sum(call.calls for call in calls),
            "calls_max": max_calls if any(call.max_calls is not None for call in calls) else None,
            "payload_bytes": sum(call.bytes for call in calls),
            "payload_bytes_min": min_bytes if any(call.min_payload is not None for call in calls) else None,
        }


def _reconciliation_rows(step: ComparedStep) -> Iterator[_Row]:
    """Yield the rows of the table `reconciliation` of a step, without `rank` and `step`."""
    # _NUMBERS by cell, cause and, for causes in the program, call site
    sums: dict[tuple[CellKey, str, str], list[int]] = {}
    sites: dict[tuple[CellKey, str, str], set[str]] = defaultdict(set)
    for cell in step.cells:
        if cell.matched_calls:
            sums[cell.key, EXPECTED, ""] = [*[cell.matched_calls] * 2, *[cell.matched_bytes] * 2]
            sites[cell.key, EXPECTED, ""] = {*cell.sites}
    for cause, calls in step.explained:
        by_site = calls.calls > 0 and is_own(calls.site, calls.purpose, calls.key.phase)
        key = calls.key.cell, cause, calls.site if by_site else ""
        numbers, recorded = sums.setdefault(key, [0, 0, 0, 0]), int(calls.calls > 0)
        numbers[recorded] += abs(calls.calls)
        numbers[2 + recorded] += abs(calls.bytes)
        sites[key].add(calls.site)
    for ((role, op), cause, site), numbers in sums.items():
        yield {
            "role": role,
            "op": op,
            **dict(zip(_NUMBERS, numbers, strict=True)),
            "difference_bytes": numbers[3] - numbers[2],
            "cause": cause,
            "sites": "; ".join(sorted(sites[(role, op), cause, site] - {""})),
        }
