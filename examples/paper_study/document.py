"""The study as a document: docs/study.md and its figures are what `commtrace study DIR --document docs` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Final

from commtrace.output_files import atomic_write

from .page import Study, few, minutes
from .parts import Section

DOCUMENT: Final = "study.md"
PICTURES: Final = "study"

_HEAD: Final = "document.md"
_TITLES: Final = {"volume": "Volume", "time": "Time"}


def write(folder: Path, study: Study) -> Path:
    """Write `folder`/study.md; pictures are expected in `folder`/study. Raises OutputError."""
    file = folder / DOCUMENT
    with atomic_write(file, force=True) as part:
        part.write_text("\n".join(lines(study)) + "\n", encoding="utf-8")
    return file


def lines(study: Study) -> Iterator[str]:
    """The document, in Markdown."""
    yield resources.files(__package__).joinpath(_HEAD).read_text("utf-8").rstrip()
    for name, sections in study.sections.items():
        yield f"\n## {_TITLES.get(name, name)}\n"
        for part, done, wall, cpu in study.costs():
            if part == name:
                yield (
                    f"{done:,} experiments, {minutes(cpu)} of CPU time on the machine that wrote this; their wall "
                    f"times, with several at a time, add up to {minutes(wall)}."
                )
        for section in sections:
            yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"\n### {f'Figure {section.number}: ' if section.number else ''}{section.title}\n"
    for paragraph in section.text:
        yield f"- {paragraph}"
    if section.missing:
        yield f"\nNot done: {few(section.missing)}."
    for name in section.figures:
        yield f"\n![{section.title}]({PICTURES}/{name}.svg)"
    if section.figures and section.look_for:
        yield f"\n{section.look_for}"
    for command in section.commands:
        yield f"\n    {command}"
