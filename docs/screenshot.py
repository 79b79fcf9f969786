"""Write the README's screenshot: the top of a run's HTML report, in a browser.

    python docs/screenshot.py demo-logs/zero1 docs/page.png

Needs playwright, and Chromium on the PATH.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from commtrace.cli import main as commtrace

WIDTH, HEIGHT = 1200, 1640


def main(log: str, screenshot: str) -> None:
    """Write the upper part of the HTML report of `log` to the PNG file `screenshot`."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        file = Path(directory) / "page.html"
        if commtrace(["report", log, "--html", str(file)]):
            sys.exit(1)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-drawn]")
        page.add_style_tag(content=".modebar { display: none !important }")  # plotly shows it only under a pointer
        page.screenshot(path=screenshot)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
