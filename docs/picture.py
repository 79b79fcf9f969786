"""Draws the README's picture: the first half of a report, as the terminal shows it.

python docs/picture.py demo-logs/zero3 docs/report.svg
"""

from __future__ import annotations

import io
import sys
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import commtrace
from commtrace.analyses.report.terminal import render

WIDTH = 110
LAST = "Message sizes"


def main(log: str, picture: str) -> None:
    """Render the report of `log` up to its message sizes into the SVG file `picture`."""
    run = commtrace.open(log)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for part in takewhile(lambda part: not is_last(part), render(run, run.tables(), WIDTH, sites=5)):
        console.print(part)
    Path(picture).write_text(console.export_svg(title=f"commtrace report {log}"))


def is_last(part: object) -> bool:
    """The heading of the section that is left out, with all that follows."""
    return isinstance(part, Text) and part.plain.startswith(LAST)


if __name__ == "__main__":
    main(*sys.argv[1:])
