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
from functools import partial
from typing import Any, Final

import pandas as pd

from commtrace.analyses.fold_engine import Analysis, NamedTables
from commtrace.analyses.table_specs import TABLES
from commtrace.reading.log import Process
from commtrace.reading.recorded_run import RecordedRun
from commtrace.theory import ExpectedCall, NotPredictedError, Prediction, predict
from commtrace.theory.rules.registry import DEEPSPEED, TORCH

from . import measured_calls
from .causes import PROGRAM_CAUSES, UNEXPLAINED, StepContext, explain
from .matching import Cell, CellKey, compare
from .measured_calls import EqualCalls, calls_by_step
from .waterfall import waterfall

EXPECTED: Final = "expected"

_CELL: Final = ("rank", "step", "role", "op")
_NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
TABLE_NAMES: Final = ("theory", "expected", "reconciliation", "waterfall", "waterfall_by_role")
_MAX_BYTES: Final = 1 << 62
_NEVER_MISSING: Final = {"rank": "int64", "step": "int64", "bytes": "int64", "matched_share": "float64"}


def _finish(table: pd.DataFrame, run: RecordedRun, jobs: Sequence[Mapping[str, Any]] = ()) -> NamedTables:
    rows: dict[str, list[dict[str, object]]] = {name: [] for name in TABLE_NAMES}
    tables = dict(iter(table.groupby("process")))
    measured = [calls_by_step(tables.get(number, table.iloc[:0])) for number in range(len(run.processes))]
    own_last = [max(steps, default=-1) for steps in measured]
    problems = [process.steps_problem(last) for process, last in zip(run.processes, own_last, strict=True)]
    last_step = max((last for last, problem in zip(own_last, problems, strict=True) if not problem), default=-1)
    for process, steps, problem in zip(run.processes, measured, problems, strict=True):
        # Stages have equally many ranks each, and are in the order of the ranks.
        job = jobs[process.rank * len(jobs) // (run.world_size or len(run.processes))] if jobs else None
        _add_process(process, steps, last_step, rows, job, problem)
    return {name: _table(name, rows[name]) for name in TABLE_NAMES}


def _table(name: str, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    types = {
        column.name: _NEVER_MISSING.get(column.name, "Int64") if column.kind == "number" else object
        for column in TABLES[name].columns
    }
    return pd.DataFrame(rows, columns=[*types]).astype(types)


def _add_process(
    process: Process,
    measured: Mapping[int, list[EqualCalls]],
    last_step: int,
    rows: dict[str, list[Any]],
    given_job: Mapping[str, Any] | None,
    problem: str | None,
) -> None:
    """Append the rows of one process to `rows`. It may lack `last_step`, the last step of the run.

    `given_job` replaces the captured job; `problem` is why the process is not compared.
    """
    known = process.tables.process.get("versions")
    versions = known if isinstance(known, Mapping) else {}
    summary: dict[str, object] = {"rank": process.rank, "other_versions": _other_versions(versions)}
    steps = range(-1, last_step + 1)
    try:
        job = _captured_job(process) if given_job is None else given_job
        prediction, expected_bytes = _predict({**job, "versions": versions}, steps)
        if problem:
            raise NotPredictedError(problem)
    except NotPredictedError as reason:
        rows["theory"].append({**summary, "not_predicted": str(reason)})
        return
    ended, lost_records = process.tables.end is not None, process.lost_records
    own_last = max(measured, default=-1)
    # The last step may be incomplete in the log of a process that did not end in order.
    regular_steps = (step for step in measured if step >= prediction.steady and prediction.special_step(step) is None)
    complete_steps = [step for step in regular_steps if ended or step < own_last]
    evaluated = {step for step in complete_steps if any(calls.phase == "evaluation" for calls in measured[step])}
    waterfall_step = max(complete_steps, key=lambda step: (step not in evaluated, step), default=None)
    sums: dict[str, int] = defaultdict(int)
    for step in steps:
        calls = measured.get(step, [])
        context = StepContext(prediction, step, own_last, ended, lost_records, bool(calls))
        cells = compare(prediction.step(step), calls, prediction.ranks_of)
        explained = explain([leftover for cell in cells for leftover in cell.leftovers], context)
        rows["expected"] += _expected_rows(process.rank, step, prediction.step(step))
        rows["reconciliation"] += _reconciliation_rows(process.rank, step, cells, explained)
        sums[EXPECTED] += sum(cell.matched_bytes for cell in cells)
        for cause, leftover in explained:
            sums[cause] += abs(leftover.bytes)
        wire_is_known = all(same.wire is not None for same in calls)
        if step == waterfall_step and wire_is_known and not rows["waterfall"]:
            label = f"measured, rank {process.rank}, step {step}"
            rows["waterfall"], rows["waterfall_by_role"] = waterfall(prediction, cells, explained, calls, label)
    measured_bytes = sum(same.bytes for calls in measured.values() for same in calls)
    rows["theory"].append(
        {
            **summary,
            "scheme": prediction.scheme,
            "expected_bytes": expected_bytes,
            "measured_bytes": measured_bytes,
            "matched_bytes": sums[EXPECTED],
            "named_bytes": sum(size for cause, size in sums.items() if cause not in (EXPECTED, UNEXPLAINED)),
            "unexplained_bytes": sums[UNEXPLAINED],
            "matched_share": sums[EXPECTED] / measured_bytes if measured_bytes else None,
        }
    )


def _predict(job: Mapping[str, Any], steps: Iterable[int]) -> tuple[Prediction, int]:
    """Return what theory expects of a job, and the bytes of all calls in these steps."""
    try:
        prediction = predict(job)
        expected_bytes = sum(call.bytes for step in steps for call in prediction.step(step))
    except NotPredictedError:
        raise
    except Exception as error:  # a job from a damaged log may hold anything
        raise NotPredictedError(f"the rules fail on the job in the log: {type(error).__name__}: {error}") from error
    if expected_bytes > _MAX_BYTES or abs(prediction.closed_form.bytes) > _MAX_BYTES:
        raise NotPredictedError("the job in the log leads to more bytes than 64 bits can count")
    return prediction, expected_bytes


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


def _expected_rows(rank: int, step: int, expected: Iterable[ExpectedCall]) -> Iterator[dict[str, object]]:
    by_key: dict[CellKey, list[ExpectedCall]] = defaultdict(list)
    for call in expected:
        by_key[call.role, call.op].append(call)
    for (role, op), calls in sorted(by_key.items()):
        most = sum(call.calls if call.most is None else call.most for call in calls)
        least = sum(call.bytes if call.least is None else call.least * call.calls for call in calls)
        yield {
            **dict(zip(_CELL, (rank, step, role, op), strict=True)),
            "calls": sum(call.calls for call in calls),
            "calls_max": most if any(call.most is not None for call in calls) else None,
            "payload_bytes": sum(call.bytes for call in calls),
            "payload_bytes_min": least if any(call.least is not None for call in calls) else None,
        }


def _reconciliation_rows(
    rank: int, step: int, cells: Iterable[Cell], explained: Iterable[tuple[str, EqualCalls]]
) -> Iterator[dict[str, object]]:
    # _NUMBERS by cell, cause and, for causes in the program, call site
    sums: dict[tuple[CellKey, str, str], list[int]] = {}
    sites: dict[tuple[CellKey, str, str], set[str]] = defaultdict(set)
    for cell in cells:
        if cell.matched_calls:
            sums[cell.key, EXPECTED, ""] = [*[cell.matched_calls] * 2, *[cell.matched_bytes] * 2]
            sites[cell.key, EXPECTED, ""] = {*cell.sites}
    for cause, leftover in explained:
        key = (leftover.role, leftover.op), cause, leftover.site if cause in PROGRAM_CAUSES else ""
        numbers, recorded = sums.setdefault(key, [0, 0, 0, 0]), int(leftover.calls > 0)
        numbers[recorded] += abs(leftover.calls)
        numbers[2 + recorded] += abs(leftover.bytes)
        sites[key].add(leftover.site)
    for (cell_key, cause, site), numbers in sums.items():
        yield {
            **dict(zip((*_CELL, *_NUMBERS), (rank, step, *cell_key, *numbers), strict=True)),
            "difference_bytes": numbers[3] - numbers[2],
            "cause": cause,
            "sites": "; ".join(sorted(sites[cell_key, cause, site] - {""})),
        }


def _has_job(run: RecordedRun) -> bool:
    return any(process.tables.jobs for process in run.processes)


ANALYSIS: Final = Analysis("reconciliation", measured_calls.partial, measured_calls.merge, _finish, _has_job)


def analysis_of(*jobs: Mapping[str, Any]) -> Analysis:
    """Return the analysis with job rows in place of the captured ones, for a pipeline one per stage."""
    return Analysis("reconciliation", measured_calls.partial, measured_calls.merge, partial(_finish, jobs=jobs))
