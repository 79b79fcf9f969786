"""Text tables and paragraphs of a given width, rendered by rich. All text tables of commtrace are made here.

    table = text_table([left_column("operation"), TextColumn("calls")], [["all_reduce", "1,234"]], width=80)
    console(80).print(table)          # or, as strings: rendered_lines(table, 80)

Numbers are never cut. If a table is too wide, its shortenable columns are shortened to MIN_SHORTENED. If that is not
enough, its optional columns are left out, the rightmost first, then the shortenable ones are shortened further.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from commtrace.formatting import wrap_text

MIN_WIDTH: Final = 72
"""Minimum width of reports, in characters."""

GAP: Final = 2
"""Spaces between two columns; one if the table would otherwise be too wide."""

MIN_SHORTENED: Final = 36
"""Width to which a shortenable column is shortened before an optional column is left out."""


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
    """Lay out rows of strings as a table of at most `width`, unless columns that cannot be shortened are wider.

    The ellipsis replaces text that was cut. None: "…", or "..." if the encoding of stdout is not UTF.
    """
    if ellipsis is None:
        ellipsis = "…" if stdout_accepts_unicode() else "..."
    widest = [max(map(len, [column.head, *(row[index] for row in rows)])) for index, column in enumerate(columns)]
    shown = list(range(len(columns)))

    def least_width() -> int:
        least = [min(widest[index], MIN_SHORTENED) if columns[index].shortenable else widest[index] for index in shown]
        return sum(least) + GAP * (len(least) - 1)

    while least_width() > width and any(columns[index].optional for index in shown):
        shown.remove(max(index for index in shown if columns[index].optional))
    gap = GAP if least_width() <= width else 1
    table = Table(
        box=None, padding=(0, gap, 0, 0), pad_edge=False, collapse_padding=False, show_edge=False, header_style="bold"
    )
    spare = width - sum(widest[index] for index in shown if not columns[index].shortenable) - gap * (len(shown) - 1)
    shortenable = sorted((index for index in shown if columns[index].shortenable), key=widest.__getitem__)
    for position, index in enumerate(shortenable):  # the narrowest first, so that others get what it does not need
        widest[index] = min(widest[index], max(spare // (len(shortenable) - position), 1))
        spare -= widest[index]
    for index in shown:
        justify: Literal["left", "right"] = "right" if columns[index].number else "left"
        table.add_column(
            Text(columns[index].head), justify=justify, no_wrap=True, min_width=widest[index], max_width=widest[index]
        )
    for row in rows:
        table.add_row(*(Text(shorten_call_site(row[index], widest[index], ellipsis)) for index in shown))
    return table


def shorten_call_site(text: str, width: int, ellipsis: str) -> str:
    """Shorten "folder/file.py:40 Class.function" to `width` characters.

    The class is removed first, with folders from the left; then the end of the function. The file distinguishes call
    sites, so it is cut last. Of a phrase, such as a purpose, the end is removed.
    """
    if len(text) <= width:
        return text
    if " " in text and not _has_place(text):
        return text[: max(width - len(ellipsis), 0)] + ellipsis
    location, space, function = text.partition(" ")
    function = function.rpartition(".")[2]
    slashes = [index for index, character in enumerate(location) if character == "/"]
    for slash in slashes:
        shortened = ellipsis + location[slash:] + space + function
        if len(shortened) <= width:
            return shortened
    file = ellipsis + location[slashes[-1] :] if slashes else location
    room = width - len(file + space) - len(ellipsis)
    if room > 0:
        return file + space + function[:room] + ellipsis
    return ellipsis + file[len(file) - max(width - len(ellipsis), 0) :]


def _has_place(text: str) -> bool:
    """Return whether a text begins with a file, and is no phrase."""
    return any(mark in text.partition(" ")[0] for mark in "/:")


def paragraph(text: str, width: int, *, first: str = "", style: str = "") -> Text:
    """Return wrapped text. `first` precedes the first line; the other lines are indented by its length."""
    return Text("\n".join(wrap_text(text, width, first)), style=style)


def terminal_width() -> int:
    """Return the width of the terminal, or the value of COLUMNS, but at least MIN_WIDTH."""
    return max(MIN_WIDTH, shutil.get_terminal_size((80, 24)).columns)


def stdout_accepts_unicode() -> bool:
    """Return whether the encoding of stdout is UTF-8 or another UTF."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def console(width: int, file: io.TextIOBase | None = None) -> Console:
    """Return a rich console that prints strings verbatim, to `file` (default: stdout)."""
    return Console(width=width, file=file, highlight=False, markup=False, emoji=False, soft_wrap=False)  # type: ignore[arg-type]


def rendered_lines(renderable: RenderableType, width: int) -> list[str]:
    """Return the lines of a table or a paragraph as plain strings, without trailing spaces."""
    text = io.StringIO()
    console(width, text).print(renderable)
    return [line.rstrip() for line in text.getvalue().splitlines()]
