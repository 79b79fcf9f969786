"""Pass/fail check of a run against the expected calls, cell by cell."""

from __future__ import annotations

from .verdict import Verdict, compute_verdict

__all__ = ["Verdict", "compute_verdict"]
