"""Sections of the terminal report, by the names that `commtrace report --sections` takes. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

SECTIONS: Final = (
    "findings", "theory", "operations", "whole-job", "dimensions", "phases", "steps", "call-sites", "sizes", "times",
    "bandwidth", "ranks", "network", "log",
)  # fmt: skip
"""All sections in the order of the report."""

NOT_SHOWN: Final = ("sizes", "times")
"""Sections that are shown only on request, so that the report of a healthy run fits on two screens."""
