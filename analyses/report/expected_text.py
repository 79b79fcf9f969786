"""Report sections that compare a run with its expected calls and with a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.formatting import format_bytes, format_plural, format_share, format_signed, merge_texts
from commtrace.text_tables import TextColumn, left_column, paragraph, text_table

from .spec_table import spec_table

MAX_CAUSES: Final = 8
MAX_SITES: Final = 3
MAX_ROWS: Final = 20

NETWORK_LEGEND: Final = (
    "Measured: the median transfer time of the timed operations, which is the time that the last rank to arrive spends "
    "in the operation. Efficiency: expected / measured."
)


def render_theory(tables: Mapping[str, pd.DataFrame], width: int) -> Iterator[RenderableType]:
    """Yield the theory section, without its heading."""
    theory = tables["theory"]
    compared = theory.loc[theory["not_predicted"].isna()]
    reasons = merge_texts(dict.fromkeys(theory["not_predicted"].dropna(), ()))
    if len(reasons):
        others = format_plural(len(theory) - len(compared), "process", "processes")
        title = f"{others} not compared" if len(compared) else "Not compared"
        yield paragraph(f"{title}: {'; '.join(reasons)}.", width)
    if not len(compared):
        return
    yield paragraph(_agreement(compared), width)
    versions = compared["other_versions"].dropna().unique()
    if len(versions):
        yield paragraph(f"Rules were written against other versions: {'; '.join(versions)}.", width)
    yield from _causes(tables["reconciliation"], width)
    yield from _waterfall(tables["waterfall"], "step of one rank", width)
    by_role = tables.get("waterfall_by_role")
    for role, rows in () if by_role is None else by_role.groupby("role", sort=False):
        yield from _waterfall(rows, f"dimension {role}", width)


def _agreement(compared: pd.DataFrame) -> str:
    measured, matched, explained, unexplained = (
        int(compared[f"{name}_bytes"].sum()) for name in ("measured", "matched", "named", "unexplained")
    )
    share = "all" if matched == measured else format_share(matched / measured) if measured else "none"
    deltas = "no differences"
    if explained or unexplained:
        deltas = f"differences with a known cause: {format_bytes(explained)}; unexplained: {format_bytes(unexplained)}"
    ranks = format_plural(compared["rank"].nunique(), "rank")
    payload = f"{share} of the payload of {ranks}, {format_bytes(measured)}"
    return f"{', '.join(compared['scheme'].unique())}: {payload}, matches the expected calls; {deltas}."


def _causes(reconciliation: pd.DataFrame, width: int) -> Iterator[RenderableType]:
    differing = reconciliation.loc[reconciliation["cause"] != "expected"]
    groups = [(str(cause), rows) for cause, rows in differing.groupby("cause")]
    groups.sort(key=lambda group: int(group[1]["difference_bytes"].abs().sum()), reverse=True)
    for cause, rows in groups[:MAX_CAUSES]:
        yield paragraph(_describe_cause(cause, rows), width, first="- ")
    if len(groups) > MAX_CAUSES:
        yield paragraph(f"and {len(groups) - MAX_CAUSES:,} more, all in --json", width, first="- ")


def _describe_cause(cause: str, rows: pd.DataFrame) -> str:
    """Describe a cause: "unexplained: all_reduce: 3 extra calls, 1 missing, +12 B of payload, in 3 steps"."""
    extra_calls, missing = int(rows["measured_calls"].sum()), int(rows["expected_calls"].sum())
    calls = [format_plural(extra_calls, "extra call")] if extra_calls else []
    calls += [f"{missing:,} missing" if calls else format_plural(missing, "missing call")] if missing else []
    training = rows["step"] >= 0
    where = f"in {format_plural(rows['step'].nunique(), 'step')}"
    if not training.all():
        where = "in steps and at start-up" if training.any() else "at start-up"
    sites = sorted({site for sites in rows["sites"].unique() for site in sites.split("; ") if site})
    places = f", from {'; '.join(sites[:MAX_SITES])}{' ...' * (len(sites) > MAX_SITES)}" if sites else ""
    ops = ", ".join(sorted(rows["op"].unique()))
    payload = format_signed(rows["difference_bytes"].sum(), format_bytes)
    return f"{cause}: {ops}: {', '.join(calls)}, {payload} of payload, {where}{places}"


def _waterfall(rows: pd.DataFrame, head: str, width: int) -> Iterator[RenderableType]:
    """Yield the waterfall from the closed form to the recorded wire bytes; the bytes of causes have a sign."""
    if not len(rows):
        return
    closed_form = int(rows["bytes"].iloc[0])
    cells = []
    for label, size, kind in zip(rows["label"], rows["bytes"], rows["kind"], strict=True):
        is_total = kind in ("closed form", "measured")
        share = format_share(size / closed_form if closed_form else None)
        cells.append([str(label), format_bytes(size) if is_total else format_signed(size, format_bytes), share])
    share_column = TextColumn("of closed form", optional=True)
    yield Text()
    yield text_table([left_column(head, shortenable=True), TextColumn("wire (min)"), share_column], cells, width)


def network_title(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return the heading, with the network's name."""
    return f"Compared with the network {tables['network_used']['name'].iloc[0]}"


def network_source(tables: Mapping[str, pd.DataFrame]) -> str:
    """Return where the network's numbers come from, and how many expected times are extrapolated."""
    text = f"{tables['network_used']['about'].iloc[0]}."
    table = tables["network"]
    extrapolated = int((table["how"] == "extrapolated").sum())
    if extrapolated:
        text += f" {extrapolated:,} of {len(table):,} expected times are extrapolated from other groups or payloads."
    return text


def render_network(tables: Mapping[str, pd.DataFrame], width: int) -> Iterator[RenderableType]:
    """Yield the network section, without its heading."""
    table = tables["network"]
    yield paragraph(network_source(tables), width)
    shown = table.head(MAX_ROWS)
    yield spec_table("network", shown, width)
    if len(shown) < len(table):
        yield paragraph(f"The top {len(shown)} of {len(table):,} rows by total expected time.", width)
    yield paragraph(NETWORK_LEGEND, width)
    for reason, rows in shown.dropna(subset="why_not").groupby("why_not", sort=False):
        yield paragraph(f"{', '.join(rows['op'].unique())}: {reason}.", width, first="- ")
