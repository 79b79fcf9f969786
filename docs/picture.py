"""Draws the README's picture: a figure of the page of several runs, as a browser draws it.

python docs/picture.py docs/report.svg demo-logs/ddp demo-logs/zero0 demo-logs/zero1 demo-logs/zero2 demo-logs/zero3

Needs playwright, and Chromium on the PATH.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from playwright.sync_api import sync_playwright

from commtrace.cli import main as commtrace

FIGURE = "operation_volumes"
WIDTH = 900

# The figure as it was made, in colours of its own, and not as the page has dressed it.
DRAW = """([name, width]) => {
    const figure = JSON.parse(document.querySelector(`#${name} script`).textContent);
    return Plotly.toImage(figure, {format: 'svg', width, height: figure.layout.height});
}"""


def main(picture: str, *logs: str) -> None:
    """Draw FIGURE of these logs into the SVG file `picture`."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        if commtrace(["report", *logs, "--html", str(file)]):
            sys.exit(1)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn]")
        image = page.evaluate(DRAW, [FIGURE, WIDTH])
        browser.close()
    Path(picture).write_text(unquote(image.partition(",")[2]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
