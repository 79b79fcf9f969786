"""How every figure looks: an operation has one colour everywhere, and bytes have binary units everywhere.

The colours are those of Okabe and Ito, which people with any colour vision tell apart. Operations that belong together
share a colour and differ by a pattern, so that the rarer ones stay distinct without a colour that is too similar.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

BLUE, ORANGE, GREEN, PINK, VERMILION, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A94A0",
)  # fmt: skip

# Operation: colour and pattern. The order is that of legends and stacks.
OPERATIONS: Final[dict[str, tuple[str, str]]] = {
    "all_reduce": (BLUE, ""),
    "all_gather": (ORANGE, ""),
    "reduce_scatter": (GREEN, ""),
    "all_to_all": (VERMILION, ""),
    "broadcast": (PINK, ""),
    "send": (SKY, ""),
    "recv": (SKY, "/"),
    "sendrecv": (SKY, "x"),
    "reduce": (BLUE, "/"),
    "gather": (ORANGE, "/"),
    "scatter": (GREEN, "/"),
    "scan": (BLUE, "x"),
    "exscan": (BLUE, "\\"),
    "put": (VERMILION, "/"),
    "get": (VERMILION, "\\"),
    "accumulate": (VERMILION, "x"),
    "barrier": (GREY, ""),
}
OTHER: Final = (GREY, "/")

# What is not an operation: none of their colours.
CLOSED_FORM, MORE, LESS, UNEXPLAINED = "#66727F", "#AA4465", "#44AA99", "#B8A13B"

# Light enough at one end and dark enough at the other for a white and a black page: viridis without its ends.
SCALE: Final = [[0.0, "#3E6C9E"], [0.33, "#1F948C"], [0.66, "#5EC962"], [1.0, "#E3DB33"]]

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, GRID = "#1B232D", "#E3E7EC"

_AXIS: Final = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zerolinecolor": GRID,
    "automargin": True,
    "title": {"standoff": 8, "font": {"size": 12}},
}
TEMPLATE: Final = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 12, "color": INK},
        "title": {"x": 0, "xref": "paper", "xanchor": "left", "font": {"size": 16}},
        "paper_bgcolor": "white",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": [colour for colour, _ in OPERATIONS.values()],
        "xaxis": _AXIS,
        "yaxis": {**_AXIS, "ticklabelstandoff": 6},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
        },
        "margin": {"l": 8, "r": 16, "t": 44, "b": 8},
        "hoverlabel": {"align": "left", "font": {"family": FONT}},
        "bargap": 0.25,
        "uniformtext": {"minsize": 9, "mode": "hide"},
    }
)

_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def label(text: object, longest: int = 80) -> str:
    """Text as plotly shows it and no more: names come from a log, and plotly reads HTML, links included.

    Long names lose their beginning. Letters that have no shape, or turn the direction of writing, are replaced.
    """
    plain = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))
    short = plain if len(plain) <= longest else "…" + plain[1 - longest :]
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def wrapped(text: object, width: int = 60, lines: int = 6) -> str:
    """A label of at most so many lines."""
    return "<br>".join(label(line) for line in textwrap.wrap(str(text), width, max_lines=lines, placeholder=" …"))


def in_order(operations: Iterable[object]) -> list[str]:
    """Operations in the order of OPERATIONS, others after them."""
    known = [*OPERATIONS]
    return sorted({str(op) for op in operations}, key=lambda op: (known.index(op) if op in known else len(known), op))


def paint(op: str) -> dict[str, Any]:
    """The `marker` of an operation's bars."""
    colour, shape = OPERATIONS.get(op, OTHER)
    pattern = {"shape": shape, "fillmode": "overlay", "size": 6, "solidity": 0.35} if shape else {"shape": ""}
    return {"color": colour, "pattern": pattern}


def words_places(values: Iterable[float], longest_of: Iterable[float]) -> list[str]:
    """`textposition` of bars of these lengths: within those more than 0.6 of the longest of others, behind the rest."""
    most = _largest(longest_of)
    return ["inside" if most and _largest([value]) > 0.6 * most else "outside" for value in values]


@dataclass(frozen=True)
class Scale:
    """A unit for all values of an axis: `axis` divides by it."""

    divisor: float
    unit: str

    def axis(self, values: Sequence[float] | pd.Series[Any]) -> list[float | None]:
        """The values in this unit; None where there is none."""
        return [None if pd.isna(value) else float(value) / self.divisor for value in values]

    def reach(self, values: Iterable[float]) -> float:
        """How far the axis must reach for the largest of the values; 1 where all are 0."""
        return _largest(values) / self.divisor or 1.0


def bytes_scale(values: Iterable[float]) -> Scale:
    """The binary unit in which the largest of these is between 1 and 1024."""
    largest = _largest(values)
    power = min(max(int(largest).bit_length() - 1, 0) // 10, 6)
    return Scale(float(1 << 10 * power), ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[power])


def time_scale(values_ns: Iterable[float]) -> Scale:
    """The unit in which the largest of these times in ns is between 1 and 1000."""
    largest = _largest(values_ns)
    for divisor, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if largest >= divisor:
            return Scale(divisor, unit)
    return Scale(1.0, "ns")


def sums_of_stacks(x: Sequence[Any], y: Sequence[Any], words: Iterable[str]) -> go.Scatter:
    """What stacks add up to, behind their ends."""
    return go.Scatter(
        x=x,
        y=y,
        mode="text",
        text=[f" {word}" for word in words],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        name="",
    )


def _largest(values: Iterable[float]) -> float:
    return max((abs(float(value)) for value in values if not pd.isna(value)), default=0.0)


def finish(figure: go.Figure, title: str, height: int) -> go.Figure:
    """The figure with what all have in common. `height` in px; the width is that of where it is shown."""
    return figure.update_layout(template=TEMPLATE, title_text=title, height=height, autosize=True)
