"""Rows of the tables `expected` and `reconciliation` of one step of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import pandas as pd

from commtrace.analyses.table_specs import TABLES
from commtrace.theory import ExpectedCall

from .causes import PROGRAM_CAUSES
from .step_comparison import ComparedStep
from .step_matching import CellKey

EXPECTED: Final = "expected"
"""Cause of calls that are as expected."""

_NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")
_NEVER_MISSING: Final = {"rank": "int64", "step": "int64", "bytes": "int64", "matched_share": "float64"}

Row = dict[str, object]


def make_table(name: str, rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Return a table with the columns of its description."""
    types = {
        column.name: _NEVER_MISSING.get(column.name, "Int64") if column.kind == "number" else object
        for column in TABLES[name].columns
    }
    return pd.DataFrame(rows, columns=[*types]).astype(types)


def bytes_by_cause(step: ComparedStep) -> dict[str, int]:
    """Return the payload of the matched calls (EXPECTED) and of the unmatched calls of each cause."""
    sums: dict[str, int] = defaultdict(int, {EXPECTED: sum(cell.matched_bytes for cell in step.cells)})
    for cause, unmatched in step.explained:
        sums[cause] += abs(unmatched.bytes)
    return sums


def max_calls(calls: Iterable[ExpectedCall]) -> dict[CellKey, int]:
    """Return the most calls of each cell whose number depends on the order of modules and gradients."""
    most: dict[CellKey, int] = defaultdict(int)
    bounded = set()
    for call in calls:
        most[call.role, call.op] += call.calls if call.max_calls is None else call.max_calls
        bounded |= {(call.role, call.op)} if call.max_calls is not None else set()
    return {cell: most[cell] for cell in bounded}


def expected_rows(expected: Sequence[ExpectedCall]) -> Iterator[Row]:
    """Yield the rows of the table `expected` of a step, without `rank` and `step`."""
    by_key: dict[CellKey, list[ExpectedCall]] = defaultdict(list)
    for call in expected:
        by_key[call.role, call.op].append(call)
    most = max_calls(expected)
    for (role, op), calls in sorted(by_key.items()):
        min_bytes = sum(call.bytes if call.min_payload is None else call.min_payload * call.calls for call in calls)
        yield {
            "role": role,
            "op": op,
            "calls": sum(call.calls for call in calls),
            "calls_max": most.get((role, op)),
            "payload_bytes": sum(call.bytes for call in calls),
            "payload_bytes_min": min_bytes if any(call.min_payload is not None for call in calls) else None,
        }


def reconciliation_rows(step: ComparedStep) -> Iterator[Row]:
    """Yield the rows of the table `reconciliation` of a step, without `rank` and `step`."""
    # _NUMBERS by cell, cause and, for causes in the program, call site
    sums: dict[tuple[CellKey, str, str], list[int]] = {}
    sites: dict[tuple[CellKey, str, str], set[str]] = defaultdict(set)
    for cell in step.cells:
        if cell.matched_calls:
            sums[cell.key, EXPECTED, ""] = [*[cell.matched_calls] * 2, *[cell.matched_bytes] * 2]
            sites[cell.key, EXPECTED, ""] = {*cell.sites}
    for cause, calls in step.explained:
        key = (calls.key.role, calls.key.op), cause, calls.site if cause in PROGRAM_CAUSES else ""
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
