"""Text report of one run, rendered from its sections. Nothing is computed or printed here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from commtrace.analyses.analysis_catalog import SECTIONS
from commtrace.analyses.log_section import facts
from commtrace.analyses.sections import (
    Block,
    Listing,
    NamedTexts,
    Paragraph,
    Report,
    Section,
    ShownCells,
    ShownTable,
    Tables,
)
from commtrace.reading.recorded_run import RecordedRun
from commtrace.text_tables import left_column, paragraph, stdout_accepts_unicode, text_table

from .spec_table import spec_table

MAX_LIST_ITEMS: Final = 12
"""Number of items shown of a list; the others are counted."""

_IDENTITY: Final = ("run", "job", "log", "ranks")
"""Facts printed at the top of the report, the first as its title; the others are in section "log"."""

_LABEL_WIDTH: Final = 14
_BAR_WIDTH: Final = 16


def render(
    run: RecordedRun,
    tables: Tables,
    width: int,
    *,
    sites: int = 10,
    sections: Collection[str] | None = None,
    per_rank: bool = False,
) -> Iterator[RenderableType]:
    """Yield the report of a run from top to bottom.

    Args:
        run: The run.
        tables: Its tables, by name.
        width: Width in columns.
        sites: Maximum number of call sites; 0: all.
        sections: Sections to show; None: those that are shown by default. The last line lists the others.
        per_rank: Show single ranks in tables of many ranks, instead of classes of equivalent ranks.
    """
    yield Text(f"Run {run.id}" + (", simulated" if run.simulated else ""), style="bold")
    for section in SECTIONS:
        yield from (paragraph(text, width, first="! ", style="bold red") for text in section.alarms(tables))
    run_facts = facts(run, tables)
    for name in _IDENTITY[1:]:
        if name in run_facts:
            yield paragraph(run_facts[name], width, first=name.ljust(_LABEL_WIDTH))
    for section in SECTIONS:
        yield from (paragraph(text, width, first="! ", style="bold yellow") for text in section.warnings(run, tables))
    report = Report(tables, run, sites, per_rank=per_rank, sections_chosen=sections is not None)
    if not len(tables["volume_by_operation"]):
        sections = ("log",)
    for section in SECTIONS:
        if section.default if sections is None else section.name in sections:
            yield from render_section(section, report, width)
    if sections is None:
        yield Text()
        others = ", ".join(section.name for section in SECTIONS if not section.default)
        yield paragraph(f"Not shown: {others} (use --sections all)", width)


def heading(text: str) -> Text:
    """Return the title of a section."""
    return Text(text, style="bold cyan")


def render_section(section: Section, report: Report, width: int) -> Iterator[RenderableType]:
    """Yield a section, with an empty line before it. The title of its first block replaces that of the section."""
    blocks = section.shown(report)
    if not blocks and report.sections_chosen and section.absent:
        blocks = [Paragraph(f"Not available: {section.absent[0].lower()}{section.absent[1:]}")]
    if not blocks:
        return
    yield Text()
    if not blocks[0].title:
        yield heading(section.title)
    yield from _block(blocks[0], width)
    for before, block in pairwise(blocks):
        if _stands_apart(before, block):
            yield Text()
        yield from _block(block, width)


def _stands_apart(before: Block, block: Block) -> bool:
    """Return whether an empty line precedes a block: if it has a title, or is a table below another table."""
    tables = ShownTable, ShownCells
    below_table = isinstance(before, tables) and isinstance(block, tables)
    return bool(block.title) or below_table or isinstance(block, ShownCells)


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    if block.title:
        yield Text(block.title, style="bold yellow") if isinstance(block, Listing) else heading(block.title)
    match block:
        case Paragraph():
            yield paragraph(block.text, width)
        case ShownTable():
            yield _table(block, width)
        case ShownCells():
            yield text_table(block.columns, block.cells, width)
        case Listing():
            yield from _items(block.texts, width)
        case NamedTexts():
            for name, text in block.texts.items():
                if name not in _IDENTITY:
                    yield paragraph(text, width, first=name.ljust(_LABEL_WIDTH))


def _table(block: ShownTable, width: int) -> RenderableType:
    if not block.bars:
        return spec_table(block.spec, block.rows, width, view=block.view or "terminal")
    character = "█" if stdout_accepts_unicode() else "#"
    counts = block.rows[block.bars]
    bars = [character * max(1, round(_BAR_WIDTH * count / counts.max())) for count in counts]
    return spec_table(block.spec, block.rows, width, extra_columns=[(left_column(""), bars)])


def _items(texts: Sequence[str], width: int) -> Iterator[RenderableType]:
    more = [f"and {len(texts) - MAX_LIST_ITEMS:,} more, all in --json"] if len(texts) > MAX_LIST_ITEMS else []
    return (paragraph(text, width, first="- ") for text in (*texts[:MAX_LIST_ITEMS], *more))
