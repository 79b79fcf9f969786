"""Notes on a log: what is damaged or missing in it, as reports show it first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NoteKind = Literal["runs", "version", "cut", "foreign", "unreadable", "garbled", "missing", "process", "salvage"]
"""Kinds of notes, values of the column `kind` of the table `notes`; "salvage": records were recovered."""


@dataclass(frozen=True)
class Note:
    """A fact about the log that the user should know: what is the matter with `path`, and its consequence."""

    kind: NoteKind
    path: Path
    what: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; {self.consequence}" if self.consequence else "")


def error_reason(error: OSError) -> str:
    """Return the system's text of an error, lower case, for the middle of a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
