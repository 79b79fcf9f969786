"""Section of the comparison with theory: agreement, causes of differences, and the way from the closed form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd

from commtrace.analyses.sections import (
    Block,
    Listing,
    Paragraph,
    Report,
    Section,
    ShownCells,
    Tables,
)
from commtrace.analyses.table_specs.spec import TableSpec
from commtrace.formatting import MAX_SINGLE, format_bytes, format_plural, format_share, format_signed
from commtrace.text_tables import TextColumn, left_column
from commtrace.theory.rules.registry import name_versions

from . import rules_analysis
from .theory_specs import EXPECTED_CALLS, RECONCILIATION, THEORY, WATERFALL, WATERFALL_BY_ROLE

MAX_SITES: Final = 3
MAX_REASONS: Final = 3
"""Reasons why processes are not compared that are shown if there are more than 32."""


def _show_theory(report: Report) -> Iterator[Block]:
    theory = report.tables["theory"]
    compared = theory.loc[theory["not_predicted"].isna()]
    reasons = theory["not_predicted"].dropna().unique().tolist()
    if len(reasons) > MAX_SINGLE:
        reasons[MAX_REASONS:] = [f"and {len(reasons) - MAX_REASONS:,} more reasons"]
    if reasons:
        others = format_plural(len(theory) - len(compared), "process", "processes")
        title = f"{others} not compared" if len(compared) else "Not compared"
        yield Paragraph(f"{title}: {'; '.join(reasons)}.")
    if not len(compared):
        return
    yield Paragraph(_agreement(compared))
    versions = compared["other_versions"].dropna().unique()
    if len(versions):
        yield Paragraph(name_versions("; ".join(versions)))
    if causes := _causes(report.tables["reconciliation"]):
        yield Listing(causes)
    yield from _waterfall(WATERFALL, report.tables["waterfall"], "step of one rank")
    for role, rows in report.tables["waterfall_by_role"].groupby("role", sort=False):
        yield from _waterfall(WATERFALL_BY_ROLE, rows, f"dimension {role}")


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


def _causes(reconciliation: pd.DataFrame) -> list[str]:
    differing = reconciliation.loc[reconciliation["cause"] != "expected"]
    groups = [(str(cause), rows) for cause, rows in differing.groupby("cause")]
    groups.sort(key=lambda group: int(group[1]["difference_bytes"].abs().sum()), reverse=True)
    return [_describe_cause(cause, rows) for cause, rows in groups]


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


def _waterfall(spec: TableSpec, rows: pd.DataFrame, head: str) -> Iterator[Block]:
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
    columns = [left_column(head, shortenable=True), TextColumn("wire (min)"), share_column]
    yield ShownCells(spec, columns, cells)


def _closed_form(tables: Tables) -> Iterator[str]:
    sums = tables["waterfall"].groupby("kind")["bytes"].sum()
    form, measured = sums.get("closed form", 0), sums.get("measured", 0)
    if form:
        yield f"A rank sends {_beside_form(measured, form)} a step{_largest_cause(tables['waterfall'])}."


def _beside_form(measured: float, form: float) -> str:
    if measured == form:
        return f"exactly what the closed form predicts, {format_bytes(form)}"
    ratio = f"{measured / form:.2f}"
    if ratio == "1.00":
        more = "more" if measured > form else "less"
        return f"{format_bytes(abs(measured - form))} {more} than the closed form predicts, {format_bytes(form)}"
    return f"{ratio} times what the closed form predicts, {format_bytes(form)}"


def _largest_cause(waterfall: pd.DataFrame) -> str:
    causes = waterfall.loc[waterfall["kind"].isin(["cause", "unexplained"]) & (waterfall["bytes"] != 0)]
    if not len(causes):
        return ""
    cause = causes.iloc[int(causes["bytes"].abs().to_numpy().argmax())]
    return f"; largest difference: {cause['label']}, {format_signed(cause['bytes'], format_bytes)}"


THEORY_SECTION: Final = Section(
    "theory",
    "Comparison with theory",
    (THEORY, EXPECTED_CALLS, RECONCILIATION, WATERFALL, WATERFALL_BY_ROLE),
    (rules_analysis.ANALYSIS,),
    blocks=_show_theory,
    findings=_closed_form,
)
