"""The study as documents: hand-written text with generated tables and pictures.

A document is Markdown with blocks that the command replaces, each between two comments:

    <!-- generated: claims volume -->
    | claim | place | measured | verdict |
    ...
    <!-- end -->

`claims PART` is the table of verdicts of a part, `table NAME` a table of the page, `cost PART` the cost of a part.
Blocks without a result in the study are left unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from commtrace.errors import CommtraceError
from commtrace.output_files import atomic_write

from .claims import Claim
from .page import Study, format_minutes, format_table

DOCUMENTS: Final = ("study.md", "study-time.md")
PICTURES: Final = "study"

_BLOCK: Final = re.compile(r"(<!-- generated: (?P<name>[^>]+?) -->\n)(?P<content>.*?)(?=<!-- end -->)", re.DOTALL)


def update(folder: Path, study: Study) -> list[Path]:
    """Replace the generated blocks of the documents in a folder. Raises CommtraceError if there is no document."""
    files = [folder / name for name in DOCUMENTS if (folder / name).is_file()]
    if not files:
        raise CommtraceError(
            f"--document: {folder} has none of {', '.join(DOCUMENTS)}; give the docs folder of a checkout"
        )
    blocks = generated_blocks(study)
    for file in files:
        text = replace_blocks(file.read_text(encoding="utf-8"), blocks)
        with atomic_write(file, force=True) as part:
            part.write_text(text, encoding="utf-8")
    return files


def generated_blocks(study: Study) -> dict[str, str]:
    """Return the content of every block that the study can fill, by name."""
    blocks = {f"claims {part}": claims_markdown(claims) for part in study.sections if (claims := study.claims(part))}
    for section in study.all_sections:
        for name, table in section.tables.items():
            if len(table):
                blocks[f"table {name}"] = markdown_table(*format_table(table))
    for part, done, wall, cpu in study.costs():
        if done:
            blocks[f"cost {part}"] = markdown_table(
                ["experiments", "CPU time", "wall time, summed over concurrent experiments"],
                [[f"{done:,}", format_minutes(cpu), format_minutes(wall)]],
            )
    return blocks


def replace_blocks(text: str, blocks: dict[str, str]) -> str:
    """Return the document with the content of known blocks replaced."""
    return _BLOCK.sub(lambda block: block[1] + blocks.get(block["name"], block["content"]), text)


def claims_markdown(claims: Iterable[Claim]) -> str:
    """Return the table of verdicts, without the command, which is the same for all."""
    rows = [[claim.statement, claim.place, claim.measured, claim.verdict] for claim in claims]
    return markdown_table(["claim", "place", "measured", "verdict"], rows)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with its last newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
