"""Text tables and paragraphs of a given width, rendered by rich. Every text table of commtrace is made here.

    table = text_table([left_column("operation"), TextColumn("calls")], [["all_reduce", "1,234"]], width=80)
    console(80).print(table)          # or, as strings: rendered_lines(table, 80)

Numbers are never cut. A table that is too wide loses its optional columns from the right, then its shortenable columns
are shortened.
"""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

MIN_WIDTH: Final = 72
"""Columns of the narrowest report that commands print."""

GAP: Final = 2
"""Blanks between two columns; one if the table is too wide otherwise."""

MIN_SHORTENED: Final = 36
"""Characters that a shortenable column keeps as long as an optional column can be left out instead."""


@dataclass(frozen=True)
class TextColumn:
    """A column of a text table."""

    head: str  # text above the column
    number: bool = True  # whether cells are aligned right
    shortenable: bool = False  # whether cells may be shortened, as call sites are (`shorten_call_site`)
    optional: bool = False  # whether the column may be left out of a table that is too wide


def left_column(head: str, *, shortenable: bool = False, optional: bool = False) -> TextColumn:
    """Return a column whose cells are aligned left."""
    return TextColumn(head, number=False, shortenable=shortenable, optional=optional)


def text_table(
    columns: Sequence[TextColumn], rows: Sequence[Sequence[str]], width: int, ellipsis: str | None = None
) -> Table:
    """Lay out rows of texts as a table, whose lines are at most `width` long unless the numbers alone are longer.

    The ellipsis stands for what was cut. None: "…", or "..." where stdout takes ASCII only.
    """
    if ellipsis is None:
        ellipsis = "…" if stdout_takes_unicode() else "..."
    widest = [max(map(len, [column.head, *(row[at] for row in rows)])) for at, column in enumerate(columns)]
    shown = list(range(len(columns)))

    def least_width() -> int:
        least = [min(widest[at], MIN_SHORTENED) if columns[at].shortenable else widest[at] for at in shown]
        return sum(least) + GAP * (len(least) - 1)

    while least_width() > width and any(columns[at].optional for at in shown):
        shown.remove(max(at for at in shown if columns[at].optional))
    gap = GAP if least_width() <= width else 1
    table = Table(
        box=None, padding=(0, gap, 0, 0), pad_edge=False, collapse_padding=False, show_edge=False, header_style="bold"
    )
    spare = width - sum(widest[at] for at in shown if not columns[at].shortenable) - gap * (len(shown) - 1)
    for at in shown:
        if columns[at].shortenable:
            widest[at] = min(widest[at], max(spare, 1))
        justify: Literal["left", "right"] = "right" if columns[at].number else "left"
        table.add_column(
            Text(columns[at].head), justify=justify, no_wrap=True, min_width=widest[at], max_width=widest[at]
        )
    for row in rows:
        table.add_row(*(Text(shorten_call_site(row[at], widest[at], ellipsis)) for at in shown))
    return table


def shorten_call_site(text: str, width: int, ellipsis: str) -> str:
    """Shorten "folder/file.py:40 Class.function" to `width` characters.

    Folders go first, from the left, because the file distinguishes call sites; then the class; then the function's end.
    """
    if len(text) <= width:
        return text
    place, blank, function = text.partition(" ")
    function = function.rpartition(".")[2]
    folders = [at for at, letter in enumerate(place) if letter == "/"]
    for at in folders:
        if len(ellipsis + place[at:] + blank + function) <= width:
            return ellipsis + place[at:] + blank + function
    file = ellipsis + place[folders[-1] :] if folders else place
    room = width - len(file + blank) - len(ellipsis)
    if room > 0:
        return file + blank + function[:room] + ellipsis
    return ellipsis + file[len(file) - max(width - len(ellipsis), 0) :]


def paragraph(text: str, width: int, *, first: str = "", style: str = "") -> Text:
    """Return wrapped text. `first` stands before its first line; the other lines are indented by as much."""
    lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
    return Text("\n".join(lines), style=style)


def terminal_width() -> int:
    """Return the columns of the terminal, or those that COLUMNS names, at least MIN_WIDTH."""
    return max(MIN_WIDTH, shutil.get_terminal_size((80, 24)).columns)


def stdout_takes_unicode() -> bool:
    """Whether stdout takes more than ASCII."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def console(width: int, file: io.TextIOBase | None = None) -> Console:
    """Return a rich console that prints texts as they are, to `file` (default: stdout)."""
    return Console(width=width, file=file, highlight=False, markup=False, emoji=False, soft_wrap=False)  # type: ignore[arg-type]


def rendered_lines(renderable: RenderableType, width: int) -> list[str]:
    """Return the lines of a table or a paragraph as plain strings, without blanks at their ends."""
    text = io.StringIO()
    console(width, text).print(renderable)
    return [line.rstrip() for line in text.getvalue().splitlines()]
