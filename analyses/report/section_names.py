"""Sections of the terminal report, by the names that `commtrace report --sections` takes. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

SECTIONS: Final = (
    "findings",
    "theory",
    "operations",
    "whole-job",
    "dimensions",
    "phases",
    "steps",
    "call-sites",
    "sizes",
    "times",
    "bandwidth",
    "ranks",
    "network",
    "log",
)
"""All of them, in the order of the report."""

NOT_SHOWN: Final = ("sizes", "times")
"""Those that are shown only if asked for, so that the report of a healthy run fits on two screens."""
