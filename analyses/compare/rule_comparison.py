"""Comparison of all ranks with the calls that rules expect.

Ranks with equal jobs share their expected calls. Ranks that also have equal recorded calls share the comparison.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.grouping import Array, concatenated_ranges
from commtrace.reading.process_reader import Process
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction

from .causes import UNEXPLAINED, StepContext
from .expected_run import ExpectedRun, ExpectedSteps, captured_job, other_versions, versions_of
from .run_calls import RankCalls, StepCalls, StepComparisons
from .step_comparison import ComparedStep, compare_step
from .theory_tables import EXPECTED, Row, bytes_by_cause, expected_rows, make_table, reconciliation_rows
from .waterfall import WaterfallRows, waterfall


@dataclass(frozen=True, eq=False)
class RuledStep:
    """The comparison of a step with the calls that rules expect."""

    expected: Sequence[ExpectedCall]
    comparison: ComparedStep

    @property
    def differs(self) -> bool:
        """Whether a call is not as expected."""
        return bool(self.comparison.explained)


@dataclass(frozen=True, eq=False)
class _EquivalentRanks:
    """Comparison shared by ranks with the same expected and the same recorded calls.

    Attributes:
        compared: Index into `RuleComparison.compared` for each step, int64, shape (steps,).
        theory: Columns of their rows of the table `theory`.
    """

    compared: Array
    theory: Mapping[str, object]


class RuleComparison:
    """Comparison of the recorded and the expected calls of all ranks. Equal steps are compared once.

    Attributes:
        steps: The compared steps, int64, shape (steps,).
        compared: The distinct comparisons of steps.
        ranks: The rank of each compared process, and what it shares with equivalent ones.
        theory: Rows of the table `theory`.
    """

    def __init__(self, contents: Sequence[StepCalls], steps: Array) -> None:
        self.steps = steps
        self.compared: list[RuledStep] = []
        self.ranks: list[tuple[int, _EquivalentRanks]] = []
        self.theory: list[Row] = []
        self._contents = contents
        self._expected_run = ExpectedRun(steps)
        self._comparisons: dict[ExpectedSteps, StepComparisons] = {}
        self._equivalent: dict[tuple[object, ...], _EquivalentRanks] = {}
        self._waterfall: WaterfallRows | None = None

    def tables(self, *, include_matching_steps: bool) -> NamedTables:
        """Return the tables of the added processes.

        Args:
            include_matching_steps: Whether `expected` and `reconciliation` have the steps without differences, too.
        """
        bars, bars_by_role = self._waterfall or ([], [])
        shown = [step if include_matching_steps or step.differs else None for step in self.compared]
        expected = [[*expected_rows(step.expected)] if step else [] for step in shown]
        reconciliation = [[*reconciliation_rows(step.comparison)] if step else [] for step in shown]
        return {
            "theory": make_table("theory", self.theory),
            "expected": self._expanded("expected", expected),
            "reconciliation": self._expanded("reconciliation", reconciliation),
            "waterfall": make_table("waterfall", bars),
            "waterfall_by_role": make_table("waterfall_by_role", bars_by_role),
        }

    def ranks_by_comparison(self) -> list[tuple[list[int], Array]]:
        """Return the compared ranks with equal steps, and the index into `compared` of each step."""
        ranks: dict[_EquivalentRanks, list[int]] = defaultdict(list)
        for rank, equivalent in self.ranks:
            ranks[equivalent].append(rank)
        return [(same, equivalent.compared) for equivalent, same in ranks.items()]

    def _expanded(self, name: str, rows: Sequence[Sequence[Row]]) -> pd.DataFrame:
        """Return the table of all steps of all ranks, given the rows of each step in `compared`."""
        table = make_table(name, [{"rank": 0, "step": 0, **row} for step_rows in rows for row in step_rows])
        row_counts = np.array([len(step_rows) for step_rows in rows], np.int64)
        begins = np.cumsum(row_counts) - row_counts

        @functools.cache
        def rows_and_steps(ranks: _EquivalentRanks) -> Array:
            """Return the row in `table`, and the step, of each row of a rank, int64, shape (2, rows)."""
            counts = row_counts[ranks.compared]
            return np.stack([concatenated_ranges(begins[ranks.compared], counts), np.repeat(self.steps, counts)])

        rows_by_rank = [rows_and_steps(ranks) for _, ranks in self.ranks]
        taken, steps = np.concatenate([np.zeros((2, 0), np.int64), *rows_by_rank], axis=1)
        ranks = np.array([rank for rank, _ in self.ranks], np.int64)
        row_ranks = np.repeat(ranks, [rank_rows.shape[1] for rank_rows in rows_by_rank])
        return table.take(taken).assign(rank=row_ranks, step=steps).reset_index(drop=True)

    def add(self, process: Process, calls: RankCalls, given_job: Mapping[str, Any] | None, problem: str | None) -> None:
        """Add a process.

        Args:
            process: The process.
            calls: Its recorded calls.
            given_job: A job row that replaces the captured one; None if there is none.
            problem: Reason why the process is not compared; None if it is.
        """
        versions = versions_of(process)
        summary: Row = {"rank": process.rank, "other_versions": other_versions(versions)}
        try:
            job = captured_job(process) if given_job is None else given_job
            expected = self._expected_run.of({**job, "versions": versions})
            if problem:
                raise NotPredictedError(problem)
        except NotPredictedError as reason:
            self.theory.append({**summary, "not_predicted": str(reason)})
            return
        equivalent = self._equivalent_ranks(process, calls, expected)
        self.ranks.append((process.rank, equivalent))
        self.theory.append({**summary, **equivalent.theory})

    def _equivalent_ranks(self, process: Process, calls: RankCalls, expected: ExpectedSteps) -> _EquivalentRanks:
        """Return the comparison of a process, the same object for equivalent ones."""
        measured = calls.at(self.steps)
        has_ended, has_lost_records = process.tables.end is not None, process.lost_records > 0
        key = expected, measured.tobytes(), calls.last_step, has_ended, has_lost_records
        if key not in self._equivalent:
            comparisons = self._comparisons.setdefault(
                expected, StepComparisons(functools.partial(self._compare, expected))
            )
            ends_before = self.steps > calls.last_step
            compared = comparisons.compare([
                expected.content, measured, self.steps < 0, (self.steps == calls.last_step) & (not has_ended),
                ends_before, ~ends_before | has_ended, np.full(len(self.steps), has_lost_records),
            ])  # fmt: skip
            if self._waterfall is None:
                complete = np.flatnonzero(measured)[: None if has_ended else -1]  # the last step may lack calls
                self._waterfall = self._waterfall_of(process, expected.prediction, compared, complete)
            self._equivalent[key] = _EquivalentRanks(compared, self._theory_of(expected, compared))
        return self._equivalent[key]

    def _compare(self, expected: ExpectedSteps, content: int, measured: int, is_start: bool, *ends: bool) -> int:
        """Compare a step, and return its index in `compared`.

        Args:
            expected: The expected calls.
            content: Index of the step's calls in `expected.contents`.
            measured: Index of the step's recorded calls in `_contents`; 0 if it has none.
            is_start: Whether the step is start-up.
            *ends: Whether the log ends within the step, whether it ends before, whether the process has ended, and
                whether it lost records.
        """
        within, before, has_ended, has_lost = ends
        context = StepContext(
            expected.contents[content], expected.prediction, is_start, measured > 0, within, before, has_ended, has_lost
        )
        step = RuledStep(expected.calls[content], compare_step(self._contents[measured], context))
        self.compared.append(step)
        return len(self.compared) - 1

    def _theory_of(self, expected: ExpectedSteps, compared: Array) -> Row:
        """Return the columns of the table `theory` that equivalent ranks have in common."""
        sums: dict[str, int] = defaultdict(int)
        cells = measured_bytes = 0
        for index, times in zip(*map(np.ndarray.tolist, np.unique(compared, return_counts=True)), strict=True):
            step = self.compared[index].comparison
            cells += times * len(step.cells)
            measured_bytes += times * step.measured.volume[1]
            for cause, size in bytes_by_cause(step).items():
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
            compared: Index into `compared` for each step.
            complete: Indices into `steps` of the steps with calls, without the last one if the log ends within it.
        """
        for evaluates, index in itertools.product((False, True), complete[::-1].tolist()):
            number = int(self.steps[index])
            step = self.compared[compared[index]].comparison
            measured = step.measured.calls
            if (
                any(calls.key.phase == "evaluation" for calls in measured) == evaluates
                and number >= prediction.steady
                and prediction.special_step(number) is None
            ):
                if any(calls.wire is None for calls in measured):
                    return None
                label = f"recorded, rank {process.rank}, step {number}"
                return waterfall(prediction, step.cells, step.explained, measured, label)
        return None
