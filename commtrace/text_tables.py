"""Tables and paragraphs that fit a width. Numbers are never cut: words give way first, then columns that may."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.table import Table
from rich.text import Text

GAP: Final = 2

SHORTEST: Final = 36
"""Letters that a column which gives way keeps, as long as another column can be left out."""


@dataclass(frozen=True)
class Column:
    """A column: numbers stand right. `gives`: its words are shortened from the left, `optional`: it may be left out."""

    title: str
    number: bool = True
    gives: bool = False
    optional: bool = False


def word(title: str, *, gives: bool = False) -> Column:
    """A column of words."""
    return Column(title, number=False, gives=gives)


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, dots: str) -> Table:
    """A table of at most `width` letters. `dots` stands for what was cut."""
    keep = list(range(len(columns)))
    while _least(columns, rows, keep) > width and any(columns[at].optional for at in keep):
        keep.remove(max(at for at in keep if columns[at].optional))
    gap = GAP if _least(columns, rows, keep) <= width else 1
    table = Table(
        box=None, padding=(0, gap, 0, 0), pad_edge=False, collapse_padding=False, show_edge=False, header_style="bold"
    )
    widths = {at: _widest(columns, rows, at) for at in keep}
    spare = width - sum(widths[at] for at in keep if not columns[at].gives) - gap * (len(keep) - 1)
    for at in keep:
        if columns[at].gives:
            widths[at] = min(widths[at], max(spare, 1))
        justify: Literal["left", "right"] = "right" if columns[at].number else "left"
        table.add_column(
            Text(columns[at].title), justify=justify, no_wrap=True, min_width=widths[at], max_width=widths[at]
        )
    for row in rows:
        table.add_row(*(Text(shorten(row[at], widths[at], dots)) for at in keep))
    return table


def _widest(columns: Sequence[Column], rows: Sequence[Sequence[str]], at: int) -> int:
    return max(len(columns[at].title), *(len(row[at]) for row in rows), 0)


def _least(columns: Sequence[Column], rows: Sequence[Sequence[str]], keep: Sequence[int]) -> int:
    widths = [_widest(columns, rows, at) for at in keep]
    return sum(
        min(width, SHORTEST) if columns[at].gives else width for at, width in zip(keep, widths, strict=True)
    ) + GAP * (len(keep) - 1)


def shorten(text: str, width: int, dots: str) -> str:
    """Cut folders from the left: the file tells lines of code apart. A function too long for the rest is cut."""
    if len(text) <= width:
        return text
    place, blank, function = text.partition(" ")
    function = function.rpartition(".")[2]  # the class goes first
    folders = [at for at, letter in enumerate(place) if letter == "/"]
    for at in folders:
        if len(dots + place[at:] + blank + function) <= width:
            return dots + place[at:] + blank + function
    file = dots + place[folders[-1] :] if folders else place
    room = width - len(file + blank) - len(dots)
    return file + blank + function[:room] + dots if room > 0 else dots + file[len(file) - max(width - len(dots), 0) :]


def paragraph(text: str, width: int, *, first: str = "", style: str = "") -> Text:
    """Wrapped text; `first` begins it, and the following lines stand below what comes after it."""
    lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
    return Text("\n".join(lines), style=style)
