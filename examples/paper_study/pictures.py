"""The study's figures as SVG files, drawn by a Chromium browser."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from commtrace.errors import CommtraceError, MissingLibraryError

from .parts import Section

WIDTH: Final = 900
"""Width of a picture in px."""
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PAGE: Final = "<!DOCTYPE html><meta charset='utf-8'><script src='plotly.js'></script>"
_DRAW: Final = """([figure, width]) => {
    const drawn = JSON.parse(figure);
    drawn.layout.margin = {...drawn.layout.margin, t: 76};
    return Plotly.toImage(drawn, {format: 'svg', width, height: drawn.layout.height});
}"""


def draw(sections: Sequence[Section], folder: Path) -> list[Path]:
    """Draw every figure to `folder`/NAME.svg. Raises MissingLibraryError, or CommtraceError without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise MissingLibraryError("--document: needs playwright; pip install playwright") from None
    from plotly.offline import get_plotlyjs

    browser_path = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser_path is None:
        raise CommtraceError(f"--document: no browser on PATH; one of {', '.join(_BROWSERS)} is needed")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        (Path(place) / "plotly.js").write_text(get_plotlyjs())
        (Path(place) / "page.html").write_text(_PAGE)
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((Path(place) / "page.html").as_uri())
        for section in sections:
            for name, figure in section.figures.items():
                image = page.evaluate(_DRAW, [figure.to_json(), WIDTH])
                file = folder / f"{name}.svg"
                file.write_text(unquote(image.partition(",")[2]) + "\n")
                drawn.append(file)
        browser.close()
    return drawn
