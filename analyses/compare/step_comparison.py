"""Comparison of the expected and measured calls of one step: rows of the tables `expected` and `reconciliation`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from commtrace.theory import ExpectedCall

from .causes import PROGRAM_CAUSES, StepContext, explain
from .counted_calls import EqualCalls
from .step_matching import Cell, CellKey, compare
from .waterfall import WaterfallRows, waterfall

EXPECTED: Final = "expected"

_NUMBERS: Final = ("expected_calls", "measured_calls", "expected_bytes", "measured_bytes")


@dataclass(frozen=True)
class ComparedStep:
    """The comparison of a step of a rank.

    Attributes:
        calls: The measured calls.
        context: The expected calls, and what causes depend on.
        expected: Rows of the table `expected`, without `rank` and `step`.
        reconciliation: Rows of the table `reconciliation`, likewise.
        bytes_by_cause: Payload of the matched calls (EXPECTED) and of the unmatched calls of each cause.
    """

    calls: Sequence[EqualCalls]
    context: StepContext
    expected: Sequence[dict[str, object]]
    reconciliation: Sequence[dict[str, object]]
    bytes_by_cause: dict[str, int]

    @property
    def cells(self) -> int:
        """Number of cells that have expected or measured calls."""
        return len({(row["role"], row["op"]) for row in (*self.expected, *self.reconciliation)})

    @property
    def differs(self) -> bool:
        """Whether a call is not as expected."""
        return any(row["cause"] != EXPECTED for row in self.reconciliation)

    def waterfall(self, label: str) -> WaterfallRows | None:
        """Return the waterfall of the step, with `label` in its last row; None if wire bytes are not known."""
        if any(calls.wire is None for calls in self.calls):
            return None
        cells, explained = _match(self.calls, self.context)
        return waterfall(self.context.prediction, cells, explained, self.calls, label)


def compare_step(calls: Sequence[EqualCalls], context: StepContext) -> ComparedStep:
    """Compare the measured calls of a step with the expected ones."""
    cells, explained = _match(calls, context)
    sums: dict[str, int] = defaultdict(int, {EXPECTED: sum(cell.matched_bytes for cell in cells)})
    for cause, unmatched in explained:
        sums[cause] += abs(unmatched.bytes)
    rows = [*_expected_rows(context.expected)], [*_reconciliation_rows(cells, explained)]
    return ComparedStep(calls, context, *rows, sums)


def _match(calls: Sequence[EqualCalls], context: StepContext) -> tuple[list[Cell], list[tuple[str, EqualCalls]]]:
    """Return the cells of a step, and their unmatched calls with their causes."""
    cells = compare(context.expected, calls, context.prediction.ranks_of)
    return cells, explain([unmatched for cell in cells for unmatched in cell.unmatched], context)


def _expected_rows(expected: Iterable[ExpectedCall]) -> Iterator[dict[str, object]]:
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


def _reconciliation_rows(
    cells: Iterable[Cell], explained: Iterable[tuple[str, EqualCalls]]
) -> Iterator[dict[str, object]]:
    # _NUMBERS by cell, cause and, for causes in the program, call site
    sums: dict[tuple[CellKey, str, str], list[int]] = {}
    sites: dict[tuple[CellKey, str, str], set[str]] = defaultdict(set)
    for cell in cells:
        if cell.matched_calls:
            sums[cell.key, EXPECTED, ""] = [*[cell.matched_calls] * 2, *[cell.matched_bytes] * 2]
            sites[cell.key, EXPECTED, ""] = {*cell.sites}
    for cause, calls in explained:
        key = (calls.role, calls.op), cause, calls.site if cause in PROGRAM_CAUSES else ""
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
