"""Notes on a log: what is damaged or missing in it, as reports show it first."""

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
"""Kinds of notes, values of the column `kind` of the table `notes`; "salvage": records were recovered."""

_OF_PROCESS: Final = re.compile(r"^rank\S+ on [^:]+: ")
"""How notes on recovered records begin."""


@dataclass(frozen=True)
class Note:
    """A fact about the log that the user should know: what is the matter with `path`, and its consequence."""

    kind: NoteKind
    path: Path
    what: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" + (f"; {self.consequence}" if self.consequence else "")


def print_notes(notes: Iterable[Note], *, per_rank: bool = False) -> None:
    """Print notes to stderr, a line each; those of many ranks merged, unless `per_rank`."""
    for note in notes if per_rank else merge_notes(notes):
        print(f"commtrace: {note}", file=sys.stderr)


def merge_notes(notes: Iterable[Note]) -> list[Note]:
    """Merge notes of more than 32 ranks that differ in numbers only, at the place of the first of them."""
    alike: dict[tuple[str, ...], list[Note]] = {}
    of_note = []
    for note in notes:
        texts = (without_numbers(_OF_PROCESS.sub("", text)) for text in (note.what, note.consequence))
        of_note.append(alike.setdefault((note.kind, *texts), []))
        of_note[-1].append(note)
    shown = {id(same): iter(_merge(same)) for same in alike.values()}
    return [note for same in of_note for note in islice(shown[id(same)], 1)]


def _merge(notes: list[Note]) -> list[Note]:
    """Return one note for notes that differ in numbers only, if they are on more than 32 ranks, else the notes."""
    named = (re.search(r"\brank0*(\d+)", f"{note.path.name} {note.what}") for note in notes)
    ranks = {int(match[1]) for match in named if match}
    if len(ranks) <= MAX_SINGLE:
        return notes
    folder = Path(os.path.commonpath([note.path for note in notes]))
    texts = [[_OF_PROCESS.sub("", note.what) for note in notes], [note.consequence for note in notes]]
    what, consequence = (same[0] if len({*same}) == 1 else without_numbers(same[0]) for same in texts)
    return [
        Note(notes[0].kind, folder, f"{len(notes):,} notes on rank {shorten_names(sorted(ranks))}: {what}", consequence)
    ]


def error_reason(error: OSError) -> str:
    """Return the system's text of an error, lower case, for the middle of a sentence."""
    return (error.strerror or str(error) or type(error).__name__).lower()
