"""The report's section on theory: how much of the payload is as expected, a step as a sum, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.formatting import format_bytes, format_plural, format_share, format_signed
from commtrace.text_tables import TextColumn, left_column, paragraph

FEW_CAUSES: Final = 8
FEW_SITES: Final = 3


class Page(Protocol):
    """What of a page is needed here."""

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        """Tables by name."""

    @property
    def width(self) -> int:
        """Letters of a line."""

    def table(self, columns: dict[str, tuple[TextColumn, Callable[[Any], str]]], frame: pd.DataFrame) -> RenderableType:
        """A frame's columns as a table."""


def render(page: Page) -> Iterator[RenderableType]:
    """The section below its heading."""
    told = page.tables["theory"]
    reasons = told["not_predicted"].dropna().unique()
    compared = told.loc[told["not_predicted"].isna()]
    if len(reasons):
        where = "" if not len(compared) else f" for {format_plural(len(told) - len(compared), 'process', 'processes')}"
        yield paragraph(f"Not compared{where}: {'; '.join(reasons)}.", page.width)
    if not len(compared):
        return
    yield paragraph(_agreement(compared), page.width)
    versions = compared["other_versions"].dropna().unique()
    if len(versions):
        yield paragraph(f"Rules were written from other versions: {'; '.join(versions)}.", page.width)
    yield from _causes(page)
    yield from _waterfall(page)


def _agreement(compared: pd.DataFrame) -> str:
    measured, matched = int(compared["measured_bytes"].sum()), int(compared["matched_bytes"].sum())
    named, rest = int(compared["named_bytes"].sum()), int(compared["unexplained_bytes"].sum())
    schemes = ", ".join(compared["scheme"].unique())
    part = "all" if matched == measured else format_share(matched / measured) if measured else "none"
    differs = (
        f"other, with a known cause: {format_bytes(named)}; unexplained: {format_bytes(rest)}"
        if named or rest
        else "nothing differs"
    )
    where = format_plural(compared["rank"].nunique(), "rank")
    payload = f"{part} of the payload of {where}, {format_bytes(measured)}"
    return f"{schemes}: {payload}, is as expected, call by call; {differs}."


def _causes(page: Page) -> Iterator[RenderableType]:
    table = page.tables["reconciliation"]
    some = table.loc[table["cause"] != "expected"]
    if not len(some):
        return
    found = [(sum(part["difference_bytes"].abs()), str(cause), part) for cause, part in some.groupby("cause")]
    found.sort(key=lambda one: one[0], reverse=True)
    for _, cause, part in found[:FEW_CAUSES]:
        yield paragraph(_cause(cause, part), page.width, first="- ")
    if len(found) > FEW_CAUSES:
        yield paragraph(f"and {len(found) - FEW_CAUSES:,} more, all in --json", page.width, first="- ")


def _cause(cause: str, part: pd.DataFrame) -> str:
    """Describe a cause: "unexplained: 3 calls more and 1 missing of all_reduce, +12 B, in 3 steps, from a.py:4 f"."""
    more, missing = int(part["measured_calls"].sum()), int(part["expected_calls"].sum())
    calls = [f"{format_plural(more, 'call')} more"] * bool(more) + [f"{format_plural(missing, 'call')} missing"] * bool(
        missing
    )
    sites = sorted({site for sites in part["sites"] for site in sites.split("; ") if site})
    places = f", from {'; '.join(sites[:FEW_SITES])}{' ...' * (len(sites) > FEW_SITES)}" if sites else ""
    steps, training = part["step"].nunique(), part["step"] >= 0
    where = f"in {format_plural(steps, 'step')}"
    if not training.all():
        where = "in steps and start-up" if training.any() else "in start-up"
    ops = ", ".join(sorted(part["op"].unique()))
    payload = format_signed(part["difference_bytes"].sum(), format_bytes)
    return f"{cause}: {' and '.join(calls)} of {ops}, {payload} of payload, {where}{places}"


def _waterfall(page: Page) -> Iterator[RenderableType]:
    frame = page.tables["waterfall"]
    if not len(frame):
        return
    yield from _from_form_to_measured(page, frame, "a rank's step, as it must at least be sent")
    parts = page.tables.get("waterfall_by_role")
    for role, rows in () if parts is None else parts.groupby("role", sort=False):
        yield from _from_form_to_measured(page, rows, f"the same, {role}")


def _from_form_to_measured(page: Page, frame: pd.DataFrame, title: str) -> Iterator[RenderableType]:
    whole = int(frame["bytes"].iloc[0])
    form = frame["kind"].isin(["closed form", "measured"])
    frame = frame.assign(
        written=[
            format_bytes(value) if full else format_signed(value, format_bytes)
            for value, full in zip(frame["bytes"], form, strict=True)
        ],
        part=frame["bytes"] / whole if whole else float("nan"),
    )
    columns: dict[str, tuple[TextColumn, Callable[[Any], str]]] = {
        "label": (left_column(title, shortenable=True), str),
        "written": (TextColumn("wire"), str),
        "part": (TextColumn("of the formula", optional=True), format_share),
    }
    yield Text()
    yield page.table(columns, frame)
