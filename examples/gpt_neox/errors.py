"""Errors of the example that its user can fix."""

from __future__ import annotations

from commtrace.errors import CommtraceError


class DataError(CommtraceError):
    """The training text is missing or too short."""
