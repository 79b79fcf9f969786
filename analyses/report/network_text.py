"""Section on a network: measured and expected times of operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pandas as pd
from rich.console import RenderableType

from commtrace.text_tables import paragraph

from .spec_table import spec_table

MAX_ROWS: Final = 20

MEANING: Final = (
    "Measured: the median transfer time of the timed operations, which is the time that the last rank spends in one, "
    "without waiting for others. Efficiency: expected / measured."
)


def network_title(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the heading, with the network's name."""
    return f"Against the network {tables['network_used']['name'].iloc[0]}"


def network_source(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return where the network's numbers come from, and how many expected times are extrapolated."""
    text = f"{tables['network_used']['about'].iloc[0]}."
    table = tables["network"]
    extrapolated = int((table["how"] == "extrapolated").sum())
    if extrapolated:
        text += f" {extrapolated:,} of {len(table):,} expected times are extrapolated from other groups or sizes."
    return text


def render_network(tables: Mapping[str, pd.DataFrame], width: int) -> Iterator[RenderableType]:
    """Yield the section below its heading."""
    table = tables["network"]
    yield paragraph(network_source(tables), width)
    shown = table.head(MAX_ROWS)
    yield spec_table("network", shown, width)
    if len(shown) < len(table):
        yield paragraph(f"The first {len(shown)} of {len(table):,} by expected time in all.", width)
    yield paragraph(MEANING, width)
    for reason, rows in shown.dropna(subset="why_not").groupby("why_not", sort=False):
        yield paragraph(f"{', '.join(rows['op'].unique())}: {reason}.", width, first="- ")
