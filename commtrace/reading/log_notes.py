"""Notes on a log: what is damaged or missing in it. Reports begin with them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from commtrace.formatting import MAX_SINGLE, shorten_names, without_numbers

NoteKind = Literal["runs", "version", "cut", "foreign", "unreadable", "garbled", "missing", "process", "salvage"]
"""Values of the column `kind` of the table `notes`; "salvage": records were recovered."""

_PROCESS_PREFIX: Final = re.compile(r"^rank\S+ on [^:]+: ")
"""Matches the beginning of a note on recovered records."""


@dataclass(frozen=True)
class Note:
    """A fact about the log that the user should know: what is unusual about `path`, and the consequence."""

    kind: NoteKind
    path: Path
    what: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; {self.consequence}" if self.consequence else "")


def print_notes(notes: Iterable[Note], *, per_rank: bool = False) -> None:
    """Print notes to stderr, one per line. Merge notes of many ranks unless `per_rank`."""
    for note in notes if per_rank else merge_notes(notes):
        print(f"commtrace: {note}", file=sys.stderr)


def merge_notes(notes: Iterable[Note]) -> list[Note]:
    """Merge notes of more than 32 ranks that differ only in numbers, at the position of the first."""
    groups: dict[tuple[str, ...], list[Note]] = {}
    group_of_note = []
    for note in notes:
        texts = (without_numbers(_PROCESS_PREFIX.sub("", text)) for text in (note.what, note.consequence))
        group_of_note.append(groups.setdefault((note.kind, *texts), []))
        group_of_note[-1].append(note)
    shown = {id(group): iter(_merge(group)) for group in groups.values()}
    return [note for group in group_of_note for note in islice(shown[id(group)], 1)]


def _merge(notes: list[Note]) -> list[Note]:
    """Return one note for notes of more than 32 ranks that differ only in numbers, else the notes."""
    matches = (re.search(r"\brank0*(\d+)", f"{note.path.name} {note.what}") for note in notes)
    ranks = {int(match[1]) for match in matches if match}
    if len(ranks) <= MAX_SINGLE:
        return notes
    folder = Path(os.path.commonpath([note.path for note in notes]))
    fields = [[_PROCESS_PREFIX.sub("", note.what) for note in notes], [note.consequence for note in notes]]
    what, consequence = (texts[0] if len({*texts}) == 1 else without_numbers(texts[0]) for texts in fields)
    return [
        Note(notes[0].kind, folder, f"{len(notes):,} notes on rank {shorten_names(sorted(ranks))}: {what}", consequence)
    ]


def error_reason(error: OSError) -> str:
    """Return the system's message for an error in lower case, for the middle of a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
