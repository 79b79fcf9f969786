"""Calls of one step as a log and as rules have them, and what is left of them when they have been matched."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from commtrace.analyses.compare.call_keys import SUMMED, CallKey
from commtrace.analyses.compare.rules_run import RuledStep
from commtrace.analyses.compare.run_calls import EqualCalls, StepCalls
from commtrace.analyses.compare.step_matching import match_calls
from commtrace.theory import ExpectedCall, Prediction


def counted_calls(
    role: str, op: str, payload: int, calls: int = 1, *, ranks: int = 2, phase: str = "forward", site: str = ""
) -> EqualCalls:
    """Return recorded calls."""
    key = CallKey(op, payload, "float32", "-", phase, role, str(ranks), "-")
    return EqualCalls(key, calls, payload * calls, site)


def summed_calls(role: str, op: str, size: int, calls: int) -> EqualCalls:
    """Return recorded calls of which only the sum of their payloads is known."""
    key = CallKey(op, SUMMED, "float32", "-", "forward", role, "2", "-")
    return EqualCalls(key, calls, size, "a line", Fraction(size, 2))


def unmatched_calls(
    expected: Iterable[ExpectedCall], measured: Iterable[EqualCalls], prediction: Prediction | None = None
) -> list[EqualCalls]:
    """Return the calls of a step that are only expected (calls below 0) or only recorded.

    Without a prediction, groups have two ranks.
    """
    sizes: Any = prediction or SimpleNamespace(ranks_of=lambda role: 2)
    cells = match_calls(RuledStep.from_rules(sizes, [*expected]), StepCalls(tuple(measured)))
    return [calls for cell in cells for calls in cell.unmatched]
