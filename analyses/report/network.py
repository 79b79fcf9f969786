"""The report's section on a network: what calls took, beside what it should take for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pandas as pd
from rich.console import RenderableType

from commtrace.formatting import format_bytes, format_count, format_duration, format_share
from commtrace.text_tables import TextColumn, left_column, paragraph

from .theory import Page

FEW_ROWS: Final = 20

MEANING: Final = (
    "Measured: the transfer time of an operation, what its last rank spends in it, where that is known; waiting for "
    "others is not in it. Median of the operations timed. Efficiency: expected by measured."
)


def title(tables: Any) -> str:
    """Heading, with the network's name."""
    return f"Against the network {tables['network_used']['name'].iloc[0]}"


def about(tables: Any) -> str:
    """What is known of the network, and where times come from that it was not measured for."""
    told = f"{tables['network_used']['about'].iloc[0]}."
    frame = tables["network"]
    extrapolated = int((frame["how"] == "extrapolated").sum())
    if extrapolated:
        told += f" {extrapolated:,} of {len(frame):,} expected times are extrapolated from other groups or sizes."
    return told


def render(page: Page) -> Iterator[RenderableType]:
    """The section below its heading."""
    frame = page.tables["network"]
    yield paragraph(about(page.tables), page.width)
    some = frame.head(FEW_ROWS)
    columns: dict[str, tuple[TextColumn, Callable[[Any], str]]] = {
        "op": (left_column("operation"), str),
        "ranks": (TextColumn("ranks"), format_count),
        "payload_bytes": (TextColumn("payload"), format_bytes),
        "calls": (TextColumn("calls"), format_count),
        "timed": (TextColumn("timed", optional=True), format_count),
        "measured_ns": (TextColumn("measured"), format_duration),
        "expected_ns": (TextColumn("expected"), format_duration),
        "efficiency": (TextColumn("efficiency"), format_share),
        "how": (TextColumn("", number=False, optional=True), lambda how: "" if pd.isna(how) else str(how)),
    }
    yield page.table(columns, some)
    if len(some) < len(frame):
        yield paragraph(f"The first {len(some)} of {len(frame):,} by expected time in all.", page.width)
    yield paragraph(MEANING, page.width)
    missing = some.loc[some["why_not"].notna()]
    for reason, rows in missing.groupby("why_not", sort=False):
        yield paragraph(f"{', '.join(rows['op'].unique())}: {reason}.", page.width, first="- ")
