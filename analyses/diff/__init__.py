"""Comparison of two runs call by call: what differs between the calls of their ranks and steps."""

from __future__ import annotations

from .call_differences import RunDifferences, compare_calls
from .run_calls import RunCalls, read_calls

__all__ = ["RunCalls", "RunDifferences", "compare_calls", "read_calls"]
