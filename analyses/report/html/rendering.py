"""Content of a page, and its rendering as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from commtrace.errors import MissingLibraryError

try:
    import jinja2
    import markupsafe
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise MissingLibraryError.of_extra("--html", error.name, "html") from None


@dataclass(frozen=True)
class Tile:
    """A number at the top of a page."""

    name: str
    value: str
    note: str = ""
    alarming: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table of strings. Of kinds of columns, "number" is aligned right, and "text" may be broken into lines."""

    head: Sequence[str]
    kinds: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Drawing:
    """A figure: plotly's JSON, safe in a script element, and its height in px. The title may be ""."""

    name: str
    title: str
    figure: str
    height: int


@dataclass(frozen=True)
class PageSection:
    """A section of a page.

    Attributes:
        name: Its anchor.
        title: Its heading.
        text: What to look for.
        notes: Paragraphs below it.
        absent: Why there is no figure or table.
        drawings: Figures.
        tables: Titles and tables. A table is folded behind its title; one whose title is "" is not folded.
        commands: Shell commands that make the section's data.
        facts: Texts by name.
        lists: Titles and lists of texts; a title may be "".
    """

    name: str
    title: str
    text: str
    notes: Sequence[str] = ()
    absent: str = ""
    drawings: Sequence[Drawing] = ()
    tables: Sequence[tuple[str, PageTable]] = ()
    commands: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()


@dataclass(frozen=True)
class Page:
    """Everything that the template shows."""

    title: str
    subtitle: str
    sections: Sequence[PageSection]
    state: str = ""
    """Of when it is, if the run goes on."""
    tiles: Sequence[Tile] = ()
    findings: Sequence[str] = ()
    warnings: Sequence[str] = ()
    anchors: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Anchor and heading on this page of the sections that texts refer to, by their name in `--sections`."""


def linked(text: str, anchors: Mapping[str, tuple[str, str]]) -> markupsafe.Markup:
    """Return a text with links to sections in place of the option by which a terminal shows them."""
    result = markupsafe.Markup("")
    for index, part in enumerate(re.split(r"--sections ([\w-]+)", text)):
        if index % 2 and part in anchors:
            result += markupsafe.Markup('<a href="#{}">{}</a>').format(*anchors[part])
        else:
            result += f"--sections {part}" if index % 2 else part
    return result


def drawing(name: str, figure: Any) -> Drawing:
    """Return a plotly figure as a drawing of a page, with its own title."""
    data = embeddable_json(json.loads(figure.to_json()))
    return Drawing(name, figure.layout.title.text or name, data, int(figure.layout.height))


def render(page: Page) -> str:
    """Return the HTML of a page, with inline styles and scripts."""
    template, style, code = (
        resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.html", "style.css", "page.js")
    )
    scripts = [embeddable_script(get_plotlyjs()), embeddable_script(code)]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["linked"] = linked
    return environment.from_string(template).render(
        page=page,
        style=style,
        scripts=scripts,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {' '.join(map(script_digest, scripts))}; base-uri 'none'; form-action 'none'",
    )


def embeddable_script(code: str) -> str:
    """Return JavaScript that is safe in a script element."""
    return code.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def script_digest(script: str) -> str:
    """Return the source expression by which a Content Security Policy allows a script."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def embeddable_json(value: Any) -> str:
    """Return JSON that is safe in a script element: it has no character special to HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
