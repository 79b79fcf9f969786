"""The HTML report: its contents, and its behaviour in a browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import ALONE, PAIR, WORLD, LogFactory, record, training
from figure_tables import EVIL, reconciliation_table, two_roles_table, waterfall_table

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from commtrace.analyses import analyse, figures
from commtrace.analyses.report.html.page_contents import page_of_run, page_of_runs
from commtrace.analyses.report.html.rendering import linked
from commtrace.analyses.report.several_runs_text import warnings_of_runs
from commtrace.analyses.side_by_side import compare
from commtrace.cli import main
from commtrace.run import open_run

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        if (path := shutil.which(name))
    ),
    None,
)
WIDTHS = {"phone": 390, "laptop": 1280, "wide": 1920}
SCREENS = [
    pytest.param(width, id=name, marks=() if name == "laptop" else pytest.mark.exhaustive)
    for name, width in WIDTHS.items()
]
"""One screen by default: a browser takes seconds for each page."""


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that opens the page."""
    absent = CHROMIUM is None or find_spec("playwright") is None
    reason = "no Chromium found, or playwright is not installed: the page is not opened in a browser"
    marked: Callable[..., None] = pytest.mark.long(pytest.mark.skipif(absent, reason=reason)(test))
    return marked


def page_of(directory: Path, name: str = "run") -> str:
    """Return the page of the run in a directory, with a prediction."""
    run = open_run(directory)
    tables = analyse(run, details=True)
    return page_of_run(name, run, {**tables, **theory_tables()})


def theory_tables() -> dict[str, pd.DataFrame]:
    """Return the tables of a prediction with two parallel dimensions."""
    return {
        "waterfall": waterfall_table(),
        "waterfall_by_role": two_roles_table(),
        "reconciliation": reconciliation_table(),
    }


def page_of_two(directory: Path) -> str:
    """Return the page of two runs, one of them with a prediction."""
    runs = {name: open_run(directory / name) for name in ("one", "two")}
    tables = {name: analyse(run) for name, run in runs.items()}
    tables["two"] |= theory_tables()
    return page_of_runs([*runs], compare(runs, tables), warnings_of_runs(runs, tables))


def hostile(directory: Path) -> None:
    """Write a log in which every name contains HTML, a script or a link."""
    log = LogFactory(directory)
    process = log.process(0, host="node17", pid=1, blind_spots=[EVIL], world_size=2)
    for number, op in enumerate([EVIL, "all_reduce", "</script><script>alert(3)</script>"], start=1):
        process.add("kinds", id=number, op=op, variant=EVIL, api=EVIL, dtype=EVIL, reduce_op=EVIL)
    process.add("groups", id=WORLD, ranks=[0, 1], name=EVIL, desc=EVIL, index=0, backend=EVIL)
    process.add("roles", group=WORLD, role="data", source=EVIL)
    process.add("sites", id=1, file=f"/x/{EVIL}.py", line=1, function=EVIL)
    process.add("job", id=0, source=EVIL, engine=EVIL, precision=EVIL, zero_stage=EVIL, parameters=[])
    rows = [record(kind=1 + number % 3, step=number // 6, t_begin=1000 * number + 1) for number in range(60)]
    process.write(rows).stats(hook_errors=1, first_error=EVIL).add("end", reason=EVIL, mono_ns=1, unix_ns=1)
    (directory / log.run / "node17" / "<img src=x onerror=alert(4)>.npy").write_bytes(b"x")


# --- contents -------------------------------------------------------------------------------------------------------


def test_the_command_writes_one_file_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log", steps=6)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "log"), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}: run 20261121-045421-3f9a1c; open it in a browser\n"
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.count('class="figure"') == len(figures.FIGURES) - 3
    assert "There is no prediction for this run" not in text
    assert sorted(tmp_path.iterdir()) == [tmp_path / "log", page]


def test_a_file_is_replaced_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log")
    page = tmp_path / "page.html"
    page.write_text("something of mine")
    assert main(["report", str(tmp_path / "log"), "--html", str(page)]) == 2
    assert "--force" in capsys.readouterr().err
    assert page.read_text() == "something of mine"
    assert main(["report", str(tmp_path / "log"), "--html", str(page), "--force"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log")
    assert main(["report", str(tmp_path / "log"), "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "make its folder first" in capsys.readouterr().err


def test_the_page_begins_with_what_must_be_known(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    process = log.process(0, world_size=4).known()
    process.write([record(step=0), record(step=1)]).stats(calls=10, dropped=8)
    text = page_of(tmp_path)
    for warning in ("Ranks 1-3 left no log", "8 dropped", "1 process ended early, or is still running"):
        assert warning in text
        assert text.index(warning) < text.index("<nav")


def test_the_tiles_say_what_the_tables_say_and_a_page_that_is_made_again_is_the_same(tmp_path: Path) -> None:
    training(tmp_path, ranks=2, steps=3)
    page = page_of(tmp_path)
    assert page_of(tmp_path) == page
    tiles = dict(re.findall(r"<dt>([^<]+)</dt>\s*<dd>([^<]+)", page))
    assert tiles["recorded ranks"] == "2"
    assert tiles["calls recorded"] == "14"
    assert tiles["training steps"] == "3"
    assert tiles["payload of a step"] == "6.00 KiB"
    assert tiles["sent in a step"] == "5.00 KiB"


def test_findings_link_to_sections() -> None:
    anchors = {"waiting": ("waiting", "Waiting & transfer")}
    assert linked("<b> (--sections waiting)", anchors) == '&lt;b&gt; (<a href="#waiting">Waiting &amp; transfer</a>)'
    assert linked("see --sections clocks", anchors) == "see --sections clocks"


def test_a_run_without_a_call_has_a_page(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0)
    run = open_run(tmp_path)
    text = page_of_run("empty", run, analyse(run, details=True))
    assert 'class="figure"' not in text
    assert "The log has no calls." in text


@pytest.mark.long
@pytest.mark.parametrize("count", [10_000, pytest.param(40_000, marks=pytest.mark.exhaustive)])
def test_a_page_is_small_however_long_the_run(tmp_path: Path, count: int) -> None:
    random = np.random.default_rng(1)
    log = LogFactory(tmp_path)
    for rank in range(8):
        process = log.process(rank, pid=rank + 1, world_size=8)
        process.known({WORLD: list(range(8)), PAIR: [0, 1], ALONE: [rank]}, {WORLD: "data", PAIR: "tensor"})
        rows = np.repeat(record(), count)
        for name, highest in (("kind", 6), ("site", 3), ("group", 3)):
            rows[name] = 1 + random.integers(0, highest, count)
        rows["payload"] = 1 << random.integers(0, 32, count)
        rows["step"] = np.arange(count) // 50
        rows["t_begin"] = 1 + random.integers(0, 10**12, count)
        rows["t_return"], rows["t_end"] = rows["t_begin"] + 1000, rows["t_begin"] + 2000
        process.write(rows).end()
    assert len(page_of(tmp_path).encode()) < 6_000_000


def test_runs_side_by_side_as_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "one", steps=2)
    training(tmp_path / "two", steps=4, ranks=4)
    paths = [str(tmp_path / "one"), str(tmp_path / "two")]
    for width in (72, 120):
        assert main(["report", *paths, "--width", str(width)]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        assert re.search(r"^two +4 +4 +2 +6\.00 KiB +7\.50 KiB +-", out, re.MULTILINE)
    assert main(["report", *paths, "--json"]) == 0
    out = capsys.readouterr().out
    assert '"format": "commtrace-comparison"' in out
    assert '"run": "two"' in out


def test_names_from_the_log_are_text_and_nothing_else(tmp_path: Path) -> None:
    hostile(tmp_path)
    text = page_of(tmp_path, name=EVIL)
    head, _, rest = text.partition("<header>")
    assert EVIL not in text
    assert "<script>alert" not in text
    assert "<a href='javascript" not in text
    assert "<img" not in rest.split("<script>")[0]
    assert "&lt;script&gt;alert(1)" in rest
    assert "<title>&lt;script&gt;" in head


# --- in a browser ---------------------------------------------------------------------------------------------------


@dataclass
class Visit:
    """An open page, with its messages and requests."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def refuse(visit: Visit, dialog: Any) -> None:
    """Record a dialog as a message, and close it, because it blocks the page."""
    visit.messages.append(f"dialog: {dialog.message}")
    dialog.dismiss()


def open_page(
    browser: Any, text: str, folder: Path, *, width: int = 1280, colours: str = "light", **context: Any
) -> Visit:
    """Open a page and wait until it is drawn."""
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours, **context).new_page()
    visit = Visit(page)
    page.on("console", lambda message: visit.messages.append(message.text))
    page.on("pageerror", lambda error: visit.messages.append(str(error)))
    page.on("dialog", lambda dialog: refuse(visit, dialog))
    page.on("request", lambda request: visit.requests.append(request.url))
    page.goto(file.as_uri())
    if context.get("java_script_enabled", True):
        page.wait_for_selector("html[data-drawn]", timeout=120_000)
    return visit


DRAWN = """() => [...document.querySelectorAll('.figure')].map(figure => ({
    name: figure.parentElement.id,
    marks: figure.querySelectorAll('.main-svg .trace path, .main-svg .heatmaplayer image').length,
}))"""

# Texts that stick out of their figure, and labels of one axis that overlap.
CLASHES = """() => [...document.querySelectorAll('.figure')].flatMap(figure => {
    const room = figure.getBoundingClientRect();
    const seen = text => text.textContent.trim() && getComputedStyle(text).display !== 'none';
    const texts = [...figure.querySelectorAll('.main-svg text')].filter(seen);
    const out = texts.filter(text => {
        const box = text.getBoundingClientRect();
        return box.width && (box.left < room.left - 1 || box.right > room.right + 1 || box.bottom > room.bottom + 1);
    }).map(text => 'sticks out: ' + text.textContent);
    const groups = ['xaxislayer-above', 'yaxislayer-above'].flatMap(name => [...figure.querySelectorAll('.' + name)]);
    const on = groups.flatMap(group => {
        const boxes = [...group.querySelectorAll('.xtick text, .ytick text, .x2tick text, .y2tick text')].filter(seen)
            .map(text => [text.textContent, text.getBoundingClientRect()]);
        return boxes.flatMap(([name, a], at) => boxes.slice(at + 1).filter(([, b]) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2)
            .map(([other]) => name + ' lies on ' + other));
    });
    return [...out, ...on].map(text => figure.parentElement.id + ': ' + text);
})"""


@in_browser
@pytest.mark.parametrize("colours", ["light", pytest.param("dark", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("width", SCREENS)
def test_every_figure_is_drawn_and_nothing_is_asked_for(width: int, colours: str, browser: Any, tmp_path: Path) -> None:
    training(tmp_path / "log", steps=6)
    visit = open_page(browser, page_of(tmp_path / "log"), tmp_path, width=width, colours=colours)
    assert visit.messages == []
    assert visit.requests == [(tmp_path / "page.html").as_uri()]
    drawn = {figure["name"]: figure["marks"] for figure in visit.page.evaluate(DRAWN)}
    assert sorted(drawn) == sorted(figures.FIGURES)
    assert min(drawn.values()) > 0
    assert visit.page.evaluate(CLASHES) == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.evaluate("document.documentElement.dataset.theme") == colours
    visit.page.context.close()


@in_browser
@pytest.mark.parametrize("width", SCREENS)
def test_runs_side_by_side_are_drawn(width: int, browser: Any, tmp_path: Path) -> None:
    training(tmp_path / "one", steps=2)
    training(tmp_path / "two", steps=4, ranks=4)
    visit = open_page(browser, page_of_two(tmp_path), tmp_path, width=width)
    assert visit.messages == []
    assert len(visit.requests) == 1
    drawn = {figure["name"]: figure["marks"] for figure in visit.page.evaluate(DRAWN)}
    assert list(drawn) == list(figures.COMPARISONS)
    assert min(drawn.values()) > 0
    assert visit.page.evaluate(CLASHES) == []
    visit.page.context.close()


@in_browser
def test_hostile_names_do_nothing(browser: Any, tmp_path: Path) -> None:
    hostile(tmp_path / "log")
    text = page_of(tmp_path / "log", name=EVIL)
    visit = open_page(browser, text, tmp_path)
    for figure in visit.page.query_selector_all(".figure .nsewdrag"):  # draws the hover texts
        figure.hover()
    assert visit.messages == []
    assert len(visit.requests) == 1
    assert (
        visit.page.evaluate("document.querySelectorAll('main img, main a[href^=javascript], svg a, iframe').length")
        == 0
    )
    scripts = "[...document.scripts].filter(script => script.type !== 'application/json').length"
    assert visit.page.evaluate(scripts) == 2
    assert "<script>alert(1)</script>" in visit.page.inner_text("h1")
    assert "<script>alert(1)</script>" in visit.page.text_content("#volume svg")
    visit.page.context.close()


@in_browser
def test_the_page_lets_nothing_else_run_or_load(browser: Any, tmp_path: Path) -> None:
    training(tmp_path / "log")
    text = page_of(tmp_path / "log").replace(
        "<footer>", "<script>document.title = 'taken'</script><img src='https://example.invalid/x.png'><footer>"
    )
    visit = open_page(browser, text, tmp_path)
    assert visit.page.title() == "run · commtrace"
    assert len(visit.messages) == 2
    assert all("Content Security Policy" in message for message in visit.messages)
    visit.page.context.close()


@in_browser
@pytest.mark.exhaustive
def test_the_switch_changes_the_colours_of_page_and_figures(browser: Any, tmp_path: Path) -> None:
    training(tmp_path / "log")
    page = open_page(browser, page_of(tmp_path / "log"), tmp_path).page
    ink = "getComputedStyle(document.querySelector('#volume .ytick text')).fill"
    themes = []
    for _ in range(4):
        themes.append(
            (
                page.inner_text("#theme span"),
                page.evaluate("document.documentElement.dataset.theme"),
                page.evaluate(ink),
            )
        )
        page.click("#theme")
        page.wait_for_timeout(300)
    light, dark = "rgb(27, 35, 45)", "rgb(230, 234, 238)"
    assert themes == [
        ("auto", "light", light),
        ("light", "light", light),
        ("dark", "dark", dark),
        ("auto", "light", light),
    ]
    page.context.close()


@in_browser
@pytest.mark.exhaustive
def test_it_prints_light_and_within_the_paper(browser: Any, tmp_path: Path) -> None:
    training(tmp_path / "log")
    page = open_page(browser, page_of(tmp_path / "log"), tmp_path, width=1920, colours="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    widest = "Math.max(...[...document.querySelectorAll('.main-svg')].map(svg => svg.getBoundingClientRect().right))"
    assert page.evaluate(widest) <= page.evaluate("document.body.getBoundingClientRect().right") <= 960
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.context.close()


@in_browser
def test_without_scripts_the_tables_are_there(browser: Any, tmp_path: Path) -> None:
    training(tmp_path / "log")
    page = open_page(browser, page_of(tmp_path / "log"), tmp_path, java_script_enabled=False).page
    assert "The figures need JavaScript" in page.inner_text("main")
    assert page.locator("#call-sites tbody tr").count() == 3
    page.context.close()
