"""Reports of one run, of runs side by side, and of runs by number of ranks.

`terminal` and `several_runs_text` render text, `document` JSON, `html` pages. Text and
pages share the sentences of `findings`; `commtrace.analyses.table_specs` describes the tables.
"""

from __future__ import annotations

from typing import Final

SECTIONS: Final = (
    "findings", "theory", "operations", "whole-job", "dimensions", "phases", "steps", "call-sites", "sizes", "times",
    "bandwidth", "waiting", "clocks", "ranks", "step-time", "network", "log",
)  # fmt: skip
"""All sections in the order of the report."""

NOT_SHOWN: Final = ("sizes", "times", "waiting", "clocks", "step-time")
"""Sections that are shown only on request, so that the report of a healthy run fits on two screens."""
