"""What the ranks of `programs/stalled.py` do, and where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import processes

KINDS: Final[dict[str, tuple[str, str | None]]] = {
    "sleep": ("sleeping", "stall"),
    "all": ("sleeping", "stall"),
    "lock": ("waiting for a lock or thread", "stall"),
    "queue": ("waiting for a lock or thread", "get"),
    "crashed": ("waiting for a lock or thread", "get"),
    "thread": ("waiting for a lock or thread", "join"),
    "loader": ("waiting for data", "__next__"),
    "pipe": ("waiting for data", "stall"),
    "process": ("waiting for a process", "run"),
    "compute": ("computing", "stall"),
    "native": ("computing", "stall"),
    "stopped": ("stopped", None),
    "locked": ("keeping the interpreter's lock, waiting", None),
    "locked loop": ("keeping the interpreter's lock, computing", None),
}
"""Kind -> what the main thread of the stalled rank does, and the function that the program's line called."""


def places_of(kind: str) -> list[str]:
    """Return the lines at which a kind stalls, as the table shows them; none if the log cannot show one."""
    lines = (processes.PROGRAMS / "stalled.py").read_text().splitlines()
    found = (number for number, text in enumerate(lines, 1) if re.search(rf"# here:.*\b{kind}\b", text))
    return [f"programs/stalled.py:{number} stall" for number in found]


def assert_two_culprits(culprits: Sequence[Any]) -> None:
    """Assert that two independent hangs are known, "sleep" of rank 1 and "lock" of rank 3, whichever began first."""
    ordered = sorted(culprits, key=lambda culprit: culprit.ranks)
    for culprit, rank, waiting, kind in zip(ordered, (1, 3), (0, 2), ("sleep", "lock"), strict=True):
        assert (culprit.ranks, culprit.waiting, culprit.confidence) == ((rank,), (waiting,), "high")
        assert culprit.activity == KINDS[kind][0]
        assert culprit.line in places_of(kind)
