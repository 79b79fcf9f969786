"""Notes on a log: what is damaged or missing in it. Reports begin with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from commtrace.formatting import MAX_SINGLE
from commtrace.rank_ranges import shorten_names
from commtrace.statements import Statement, merge_statements, statement_kind

NoteKind = Literal["runs", "version", "cut", "foreign", "unreadable", "garbled", "missing", "process", "salvage"]
"""Values of the column `kind` of the table `notes`; "salvage": records were recovered."""


@dataclass(frozen=True)
class Note:
    """A fact about the log that the user should know.

    Attributes:
        kind: What kind of fact it is.
        path: The file or folder that it is about.
        what: What is unusual about it.
        consequence: What follows; "" for nothing.
        rank: The rank that it is about; None if it is about several, or not known.
        subject: What it is about, if the path does not show it.
    """

    kind: NoteKind
    path: Path
    what: str
    consequence: str
    rank: int | None = None
    subject: str = ""

    @property
    def text(self) -> str:
        """What is unusual, and about what, if the path does not show it."""
        return f"{self.subject}: {self.what}" if self.subject else self.what

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" + (f"; {self.consequence}" if self.consequence else "")


def print_notes(notes: Iterable[Note], *, per_rank: bool = False) -> None:
    """Print notes to stderr, one per line. Merge notes of many ranks unless `per_rank`."""
    for note in notes if per_rank else merge_notes(notes):
        print(f"commtrace: {note}", file=sys.stderr)


def merge_notes(notes: Iterable[Note]) -> list[Note]:
    """Merge notes of more than 32 ranks that differ only in numbers, at the position of the first."""
    groups: dict[tuple[object, ...], list[Note]] = {}
    group_of_note = []
    for note in notes:
        kind = (note.kind, statement_kind(note.what), statement_kind(note.consequence))
        group_of_note.append(groups.setdefault(kind, []))
        group_of_note[-1].append(note)
    shown = {id(group): iter(_merge(group)) for group in groups.values()}
    return [note for group in group_of_note for note in islice(shown[id(group)], 1)]


def _merge(notes: list[Note]) -> list[Note]:
    """Return one note for notes of one kind on more than 32 ranks, else the notes."""
    ranks = {note.rank for note in notes if note.rank is not None}
    if len(ranks) <= MAX_SINGLE:
        return notes
    folder = Path(os.path.commonpath([note.path for note in notes]))
    what, consequence = (merge_statements([getattr(note, name) for note in notes]) for name in ("what", "consequence"))
    subject = Statement("{:,} notes on rank {}", len(notes), shorten_names(sorted(ranks)))
    return [Note(notes[0].kind, folder, what, consequence, subject=subject)]


def error_reason(error: OSError) -> str:
    """Return the system's message for an error in lower case, for the middle of a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
