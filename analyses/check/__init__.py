"""The gate for continuous integration: whether a run communicated what theory expects, cell by cell."""

from __future__ import annotations

from .verdict import Verdict, judge

__all__ = ["Verdict", "judge"]
