"""What is wrong with a log, for people: found at opening, shown first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NoteKind = Literal["runs", "version", "cut", "foreign", "unreadable", "garbled", "missing", "process", "salvage"]


@dataclass(frozen=True)
class Note:
    """Something about the log that the user should know: what was found at `path`, and what follows from it."""

    kind: NoteKind
    path: Path
    what: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; {self.consequence}" if self.consequence else "")


def error_reason(error: OSError) -> str:
    """What the system says, fit for the middle of a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
