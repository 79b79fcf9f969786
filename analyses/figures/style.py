"""Colours, units, labels and traces that all figures share.

An operation has one colour in every figure, and bytes have binary units. The colours are those of Okabe and Ito, which
are distinct for any colour vision. Related operations share a colour and differ by a pattern, so that the rarer ones
stay distinct without a colour that is too similar.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
import plotly.graph_objects as go

from commtrace.formatting import format_bytes
from commtrace.operations import OPERATIONS

BLUE, ORANGE, GREEN, PINK, VERMILION, SKY, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A94A0",
)  # fmt: skip

_COLOURS: Final = {
    "blue": BLUE, "orange": ORANGE, "green": GREEN, "pink": PINK, "vermilion": VERMILION, "sky": SKY, "grey": GREY,
}  # fmt: skip
_STYLES: Final = {name: (_COLOURS[row.colour], row.pattern) for name, row in OPERATIONS.items()}
OTHER: Final = (GREY, "/")

# Bars that are not operations use other colours.
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
        "colorway": [colour for colour, _ in _STYLES.values()],
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
    """Return text from a log, escaped: plotly interprets HTML, links included.

    Texts over `longest` characters lose their beginning. Invisible characters, and those that change the writing
    direction, are replaced.
    """
    plain = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))
    short = plain if len(plain) <= longest else "…" + plain[1 - longest :]
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def wrapped(text: object, width: int = 60, lines: int = 6) -> str:
    """Return a label wrapped at `width` characters, of at most `lines` lines."""
    return "<br>".join(label(line) for line in textwrap.wrap(str(text), width, max_lines=lines, placeholder=" …"))


def in_order(operations: Iterable[object]) -> list[str]:
    """Return the distinct operations in the order of `operations.OPERATIONS`, others after them."""
    known = [*OPERATIONS]
    return sorted({str(op) for op in operations}, key=lambda op: (known.index(op) if op in known else len(known), op))


def paint(op: str) -> dict[str, Any]:
    """Return the `marker` of an operation's bars."""
    colour, shape = _STYLES.get(op, OTHER)
    pattern = {"shape": shape, "fillmode": "overlay", "size": 6, "solidity": 0.35} if shape else {"shape": ""}
    return {"color": colour, "pattern": pattern}


def operation_style(op: object) -> dict[str, Any]:
    """Return the properties of a trace of an operation's bars: their name, their group in the legend and `marker`."""
    return {"name": label(op), "legendgroup": label(op), "marker": paint(str(op))}


def hover_texts(texts: Iterable[str]) -> dict[str, Any]:
    """Return the properties of a trace with these hover texts, in escaped HTML."""
    return {"customdata": [*texts], "hovertemplate": "%{customdata}<extra></extra>"}


def numbered_rows(names: Iterable[object]) -> dict[str, Any]:
    """Return a vertical axis of rows 0, 1, ... with these names, and row 0 at the top."""
    labels = [label(name) for name in names]
    return {
        "tickvals": list(range(len(labels))),
        "ticktext": labels,
        "range": [max(len(labels), 1) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def text_positions(values: Iterable[float], longest_of: Iterable[float]) -> list[str]:
    """Return the `textposition` of bars: inside if longer than 0.6 of the longest of `longest_of`, else outside."""
    longest = _largest(longest_of)
    return ["inside" if longest and _largest([value]) > 0.6 * longest else "outside" for value in values]


def horizontal_bars(
    y: Sequence[Any] | pd.Series[Any],
    x: Sequence[Any] | pd.Series[Any],
    hover: Iterable[str],
    *,
    text: Iterable[str] | None = None,
    text_position: str | Sequence[str] = "outside",
    text_anchor: str = "end",
    **options: Any,
) -> go.Bar:
    """Return horizontal bars.

    Args:
        y: Positions or names of the bars.
        x: Their lengths, in the unit of the axis.
        hover: Hover text of each bar, in escaped HTML.
        text: Text at each bar.
        text_position: "inside" or "outside", for all bars or for each.
        text_anchor: Position of text inside a bar: "start", "middle" or "end".
        options: Further properties of `go.Bar`.
    """
    if text is not None:
        options |= {"text": [*text], "textposition": text_position, "insidetextanchor": text_anchor, "textangle": 0}
        options["cliponaxis"] = False
    return go.Bar(orientation="h", y=y, x=x, **hover_texts(hover), **options)


def span_bars(begin: pd.Series[Any], length: pd.Series[Any], scale: Scale, **options: Any) -> go.Bar:
    """Return horizontal bars of these lengths that start at `begin`; `options` are those of `horizontal_bars`."""
    bars = horizontal_bars(x=scale.axis(length), base=scale.axis(begin), **options)
    # The outline keeps bars shorter than a pixel visible.
    return bars.update(marker_line={"color": bars.marker.color, "width": 1})


def heat_map(unit: str, ticks: Mapping[str, Any] | None = None, **options: Any) -> go.Heatmap:
    """Return a heat map that starts at 0; `ticks` are further properties of its colour bar, `options` of the map."""
    bar = {"title": {"text": unit, "side": "top"}, "thickness": 12, "outlinewidth": 0, **(ticks or {})}
    return go.Heatmap(zmin=0, colorscale=SCALE, colorbar=bar, **options)


@dataclass(frozen=True)
class Scale:
    """The unit of an axis, and the number to divide values by."""

    divisor: float
    unit: str

    def axis(self, values: Sequence[float] | pd.Series[Any]) -> list[float | None]:
        """Return the values in this unit; missing ones as None."""
        return [None if pd.isna(value) else float(value) / self.divisor for value in values]

    def reach(self, values: Iterable[float]) -> float:
        """Return the largest of the values in this unit, 1 if all are 0."""
        return _largest(values) / self.divisor or 1.0


def bytes_scale(values: Iterable[float]) -> Scale:
    """Return the binary unit in which the largest of these values is between 1 and 1024."""
    return _scale(values, 1024, ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))


def time_scale(values_ns: Iterable[float]) -> Scale:
    """Return the unit in which the largest of these times in ns is between 1 and 1000."""
    return _scale(values_ns, 1000, ("ns", "us", "ms", "s"))


def _scale(values: Iterable[float], factor: int, units: Sequence[str]) -> Scale:
    largest = _largest(values)
    power = sum(largest >= factor**power for power in range(1, len(units)))
    return Scale(float(factor**power), units[power])


def stack_totals(
    totals: pd.Series[Any],
    lengths: Sequence[Any],
    places: Sequence[Any] | None = None,
    formatter: Callable[[Any], str] = format_bytes,
) -> go.Scatter:
    """Return the totals of horizontal stacks as text after their ends.

    `lengths` are the totals in the unit of the axis. `places` are the positions of the stacks on the other axis, by
    default their names.
    """
    return go.Scatter(
        x=lengths,
        y=[label(name) for name in totals.index] if places is None else places,
        mode="text",
        text=[f" {formatter(total)}" for total in totals],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        name="",
    )


def show_legend_once(figure: go.Figure) -> None:
    """Show each name only once in the legend, even if several panels have traces of it."""
    seen: set[str] = set()
    for trace in figure.data:
        trace.showlegend = bool(trace.name) and trace.showlegend is not False and trace.name not in seen
        seen.add(trace.name)


def _largest(values: Iterable[float]) -> float:
    return max((abs(float(value)) for value in values if not pd.isna(value)), default=0.0)


def finish(figure: go.Figure, title: str, height: int) -> go.Figure:
    """Apply the common layout. `height` is in px; the figure is as wide as its container."""
    return figure.update_layout(template=TEMPLATE, title_text=title, height=height, autosize=True)
