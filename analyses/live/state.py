"""The state of a run that goes on, as a JSON document for programs: what `commtrace top` shows, with exact numbers."""

from __future__ import annotations

from collections import Counter

from commtrace.analyses.report.document import live_run_to_json

from .followed_run import LiveRun
from .screen import alarms


def state_to_json(live: LiveRun, problem: str = "") -> str:
    """Return the state of a run as of its last reading.

    Args:
        live: The run.
        problem: Why it was not read again; "" if it was.
    """
    return live_run_to_json(
        live.run,
        live.tables,
        read_ns=live.read_ns,
        problem=problem or None,
        is_over=live.is_over,
        processes=dict(Counter(end.state for end in live.run.ends)),
        step=live.step if live.step >= 0 else None,
        records=live.records,
        totalled=live.totalled,
        alarms=alarms(live),
    )
