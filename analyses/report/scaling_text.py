"""Text report of runs on increasing numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pandas as pd
from rich.console import RenderableType

from commtrace.text_tables import paragraph

from .spec_table import spec_table

_PARTS: Final = (
    ("scaling", "speedup", "Speed"),
    ("scaling", "step_parts", "Where the time of a step goes, means over the ranks"),
    ("scaling", "sent", "What a rank sends in a step"),
    ("scaling_projection", "model", "The model: computing, latency, bandwidth, waiting"),
)


def render(tables: Mapping[str, pd.DataFrame], sentences: Sequence[str], width: int) -> Iterator[RenderableType]:
    """Yield the comparison, top to bottom.

    Args:
        tables: Those of `commtrace.analyses.scaling`.
        sentences: What they say.
        width: Characters of the longest line.
    """
    for name, view, title in _PARTS:
        if len(tables[name]):
            yield title
            yield spec_table(name, tables[name], width, view=view)
            yield ""
    for sentence in sentences:
        yield paragraph(sentence, width, first="- ")
