"""What live processes of this host do whose drain threads take no turns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from commtrace.process_setup.system_files import waits_for_storage
from commtrace.recording.ring import RingContent, Silence, read_turn

SILENT_NS: Final = 5_000_000_000
"""Time by which a turn must be overdue for a process to be looked at."""
LATE_NS: Final = 1_000_000_000
"""Time from which on it is not known that the process went on: a call is said to be stuck before it is looked at."""
_STOPPED: Final = ("T", "t")  # t: by a debugger
CONFIRM_SECONDS: Final = 1.0
"""Time in which a process takes a turn that has just been resumed."""


def with_silences(rings: Mapping[Path, RingContent]) -> dict[Path, RingContent]:
    """Return the rings with `silence` of those whose processes take no turns.

    If one seems to keep the lock, this takes CONFIRM_SECONDS: a process that has just been resumed seems to keep it,
    too, until its next turn.
    """
    silent = {key: ring for key, ring in rings.items() if ring.is_alive and ring.silent_ns >= SILENT_NS}
    silences = {key: _silence(ring) for key, ring in silent.items()}
    if "lock" in silences.values():
        time.sleep(CONFIRM_SECONDS)
    for key, ring in silent.items():
        if silences[key] == "lock" and read_turn(ring.path) != ring.turn_ns:
            silences[key] = "resumed"
    for key, ring in rings.items():
        if ring.is_alive and (ring.silent_ns >= LATE_NS or ring.process_state in _STOPPED):
            silences.setdefault(key, "late")
    return {key: ring._replace(silence=silences.get(key, "")) for key, ring in rings.items()}


def _silence(ring: RingContent) -> Silence:
    if ring.process_state in _STOPPED:
        return "stopped"
    thread = f"/proc/{ring.identity.get('pid')}/task/{ring.drain_thread}"
    return "storage" if ring.drain_thread and waits_for_storage(thread) else "lock"
