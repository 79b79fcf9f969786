"""Text report of one run, rendered from its tables. Nothing is computed or printed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pandas as pd
from rich.console import RenderableType
from rich.text import Text

from commtrace.analyses.record_blocks import EVALUATION
from commtrace.analyses.table_specs import TABLES
from commtrace.analyses.table_specs.equivalent_ranks import ALIKE, reduce_ranks
from commtrace.formatting import format_bytes, format_plural
from commtrace.reading.recorded_run import RecordedRun
from commtrace.text_tables import left_column, paragraph, stdout_accepts_unicode

from . import NOT_SHOWN, SECTIONS
from .expected_text import network_title, render_network, render_theory
from .findings import diagnosis, facts, findings, log_lists, warnings
from .spec_table import spec_table

MAX_RANKS: Final = 16
MAX_SIZES: Final = 10
MAX_PATH_PARTS: Final = 8
MAX_LIST_ITEMS: Final = 12
"""Number of items shown of a list; the others are counted."""

_IDENTITY: Final = ("job", "log", "ranks")
"""Facts printed at the top of the report; the others are in section "log"."""

_LABEL_WIDTH: Final = 14
_BAR_WIDTH: Final = 16


@dataclass(frozen=True)
class _Report:
    """Input of the functions that render sections."""

    run: RecordedRun
    tables: Mapping[str, pd.DataFrame]
    width: int
    sites: int
    sections_chosen: bool
    """Whether the user chose the sections."""
    per_rank: bool

    def rows(self, name: str) -> pd.DataFrame:
        """Return the rows of a table; without `per_rank`, classes of equivalent ranks instead of many ranks."""
        return self.tables[name] if self.per_rank else reduce_ranks(TABLES[name], self.tables[name])

    def table(self, name: str, rows: pd.DataFrame | None = None) -> RenderableType:
        return spec_table(name, self.rows(name) if rows is None else rows, self.width)

    def table_section(self, title: str, name: str, rows: pd.DataFrame | None = None) -> tuple[RenderableType, ...]:
        return heading(title), self.table(name, rows)

    def paragraph(self, text: str, first: str = "") -> RenderableType:
        return paragraph(text, self.width, first=first)


def render(
    run: RecordedRun,
    tables: Mapping[str, pd.DataFrame],
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
        sections: Sections to show; None: all except NOT_SHOWN, which the last line lists.
        per_rank: Show single ranks in tables of many ranks, instead of classes of equivalent ranks.
    """
    yield Text(f"Run {run.id}" + (", simulated" if run.simulated else ""), style="bold")
    for text in diagnosis(tables):
        yield paragraph(text, width, first="! ", style="bold red")
    run_facts = facts(run, tables)
    for name in _IDENTITY:
        if name in run_facts:
            yield paragraph(run_facts[name], width, first=name.ljust(_LABEL_WIDTH))
    for text in warnings(run, tables):
        yield paragraph(text, width, first="! ", style="bold yellow")
    report = _Report(run, tables, width, sites, sections is not None, per_rank)
    if not len(tables["volume_by_operation"]):
        sections = ("log",)
    for name in SECTIONS:
        if name not in NOT_SHOWN if sections is None else name in sections:
            section = [*_RENDER[name](report)]
            yield from ([Text(), *section] if section else [])
    if sections is None:
        yield Text()
        yield paragraph(f"Not shown: {', '.join(NOT_SHOWN)} (use --sections all)", width)


def heading(text: str) -> Text:
    """Return the title of a section."""
    return Text(text, style="bold cyan")


def _findings(report: _Report) -> Iterator[RenderableType]:
    if texts := [report.paragraph(text, first="- ") for text in findings(report.tables)]:
        yield from (heading("Findings"), *texts)


def _theory(report: _Report) -> Iterator[RenderableType]:
    yield heading("Comparison with theory")
    yield from render_theory(report.tables, report.width)


def _operations(report: _Report) -> Iterator[RenderableType]:
    role = _only_role(report)
    dimension = f"; parallel dimension: {role}" if role else ""
    yield from report.table_section(f"By operation, totals over the recorded ranks{dimension}", "volume_by_operation")


def _only_role(report: _Report) -> str:
    roles = report.tables["volume_by_role"]["role"]
    return str(roles.iloc[0]) if len(roles) == 1 else ""


def _whole_job(report: _Report) -> Iterator[RenderableType]:
    if len(report.tables["whole_job"]):
        title = "The whole job (simulated): each rank that ran counts for all ranks that it represents"
        yield from report.table_section(title, "whole_job")


def _dimensions(report: _Report) -> Iterator[RenderableType]:
    if report.sections_chosen or not _only_role(report):
        yield from report.table_section("By parallel dimension", "volume_by_role_and_operation")


def _phases(report: _Report) -> Iterator[RenderableType]:
    yield from report.table_section("By phase of the step", "volume_by_phase")


def _steps(report: _Report) -> Iterator[RenderableType]:
    steps, steady = report.tables["volume_by_step"], report.tables["steady_step"]
    if not len(steady):
        yield heading("By step")
        yield report.paragraph("The log has no training step: all calls belong to start-up or evaluations.")
        return
    count, differing = int(steady["steps"].iloc[0]), int(steady["differing_steps"].max())
    basis = (
        f"median of {count:,} steps, {differing:,} of them different" if differing else f"all {count:,} steps identical"
    )
    basis = "the only step" if count == 1 else basis
    yield from report.table_section(f"A training step, mean per recorded rank: {basis}", "steady_step")
    for number, name in ((-1, "Start-up, before the first step"), (EVALUATION, "Evaluations, outside of steps")):
        rows = steps.loc[steps["step"] == number]
        if len(rows) or number == -1:
            calls, payload = format_plural(int(rows["calls"].sum()), "call"), format_bytes(rows["payload_bytes"].sum())
            yield report.paragraph(f"{name}: {calls}, payload {payload}, over all ranks.")


def _call_sites(report: _Report) -> Iterator[RenderableType]:
    table = report.tables["volume_by_site"]
    shown = table.head(report.sites) if report.sites else table
    more = f", the first {len(shown)} of {len(table):,}" if len(shown) < len(table) else ""
    yield from report.table_section(f"By call site{more}", "volume_by_site", shown)


def _sizes(report: _Report) -> Iterator[RenderableType]:
    bins = report.tables["message_size_bins"]
    bar_character = "█" if stdout_accepts_unicode() else "#"
    bars = [bar_character * max(1, round(_BAR_WIDTH * calls / bins["calls"].max())) for calls in bins["calls"]]
    yield heading("Message sizes, by the payload of a call")
    yield spec_table("message_size_bins", bins, report.width, extra_columns=[(left_column(""), bars)])
    sizes = report.tables["message_sizes"].sort_values("sum_bytes", ascending=False, kind="stable")
    yield Text()
    selection = f", the top {MAX_SIZES} of {len(sizes):,} by total payload" if len(sizes) > MAX_SIZES else ""
    yield from report.table_section("Exact sizes" + selection, "message_sizes", sizes.head(MAX_SIZES))


_MEASURES: Final = {
    "in_call": "Time inside the call, observed on the host",
    "waiting": "Time waiting for the end, where the program waited and the host observed the end",
    "to_completion": "Time from the call to its end, where the end is known",
}


def _times(report: _Report) -> Iterator[RenderableType]:
    if report.run.simulated:
        yield heading("Times")
        yield report.paragraph("Not available: this is a dry run, which sends nothing.")
        return
    table = report.tables["host_time"]
    for number, (measure, title) in enumerate(_MEASURES.items()):
        yield from (*[Text()] * bool(number), heading(title))
        rows = table.loc[table["measure"] == measure]
        known = rows["calls_known"].sum()
        yield report.table("host_time", rows) if known else report.paragraph("Not known for any call.")


def _bandwidth(report: _Report) -> Iterator[RenderableType]:
    if report.run.simulated:
        return
    table = report.tables["bandwidth"]
    yield heading("Bandwidth, GB/s (1e9 bytes), over calls with a known end")
    yield report.table("bandwidth") if len(table) else report.paragraph("Not known for any call.")
    if table["end_seen_by"].isin(["wait", "poll"]).any():
        yield report.paragraph("Waits and polls may detect completion late, so these bandwidths are lower bounds.")


def _waiting(report: _Report) -> Iterator[RenderableType]:
    yield heading("Wait and transfer")
    if report.run.simulated:
        yield report.paragraph("Not available: this is a dry run, which sends nothing.")
        return
    for name in ("wait_patterns", "waits_by_operation", "waits_by_role", "waits_by_rank", "waits_by_site"):
        rows = report.rows(name)
        complete = name in ("wait_patterns", "waits_by_operation") or ALIKE in rows
        shown = rows if complete else rows.head(report.sites or len(rows))
        if name != "waits_by_role" or len(rows) > 1:
            yield report.table(name, shown)
            yield Text()
    yield report.paragraph("Wait: the part of a call before the last rank that it depends on arrives. By step: --json.")


def _clocks(report: _Report) -> Iterator[RenderableType]:
    if len(report.tables["clocks"]) > 1:
        yield from report.table_section("Clock offsets of the hosts, with bounds from the calls", "clocks")
        if len(report.tables["clock_steps"]):
            yield from (Text(), *report.table_section("Clock jumps", "clock_steps"))


def _ranks(report: _Report) -> Iterator[RenderableType]:
    table = report.tables["ranks"]
    yield heading("Load balance across ranks")
    if len(table) > 1 and all(table[column].nunique() == 1 for column in ("calls", "payload_bytes")):
        calls = format_plural(int(table["calls"].iloc[0]), "call")
        payload = format_bytes(table["payload_bytes"].iloc[0])
        yield report.paragraph(
            f"All {len(table):,} recorded ranks are identical: {calls} and a payload of {payload} each."
        )
        return
    if len(table) <= MAX_RANKS or ALIKE in report.rows("ranks"):
        yield report.table("ranks")
        return
    half = MAX_RANKS // 2
    ordered = table.sort_values("payload_bytes", kind="stable")
    yield report.table("ranks", pd.concat([ordered.head(half), ordered.tail(half)]))
    yield report.paragraph(f"The {half} ranks with the least payload and the {half} with the most, of {len(table):,}.")


def _step_time(report: _Report) -> Iterator[RenderableType]:
    parts, path, delays = (report.tables[name] for name in ("step_time_parts", "critical_path", "delays"))
    yield heading("Where the time of a step goes, across ranks")
    if not len(parts):
        yield report.paragraph(
            "Not available: this needs three training steps of all ranks, with ends of calls observed on the host, and "
            "enough calls between hosts to compare their clocks."
        )
        return
    yield report.table("step_time_parts")
    keys = ["which", "step", "rank", "part", "op", "role", "phase", "site"]
    sums = path.groupby(keys, as_index=False, sort=False, dropna=False).agg({"begin_ns": "min", "ns": "sum"})
    longest = sums.loc[sums["which"] == "slowest"].nlargest(MAX_PATH_PARTS, "ns")
    title = f"Critical path of the slowest step, the {len(longest)} longest parts"
    yield from (Text(), *report.table_section(title, "critical_path", longest))
    stragglers = report.rows("stragglers")
    if ALIKE not in stragglers:
        stragglers = stragglers.nlargest(MAX_RANKS, "waiting_ns").sort_values("rank")
    yield from (Text(), *report.table_section("Stragglers: ranks that others wait for", "stragglers", stragglers))
    if len(delays):
        yield from (Text(), *report.table_section("Delays: ranks that compute longer than the others", "delays"))


def _network(report: _Report) -> Iterator[RenderableType]:
    if "network" in report.tables:
        yield heading(network_title(report.tables))
        yield from render_network(report.tables, report.width)


def _log(report: _Report) -> Iterator[RenderableType]:
    yield heading("The log")
    for name, text in facts(report.run, report.tables).items():
        if name not in _IDENTITY:
            yield report.paragraph(text, first=name.ljust(_LABEL_WIDTH))
    for title, texts in log_lists(report.run, report.tables).items():
        yield from (Text(), Text(title, style="bold yellow"))
        more = [f"and {len(texts) - MAX_LIST_ITEMS:,} more, all in --json"] if len(texts) > MAX_LIST_ITEMS else []
        yield from (report.paragraph(text, first="- ") for text in (*texts[:MAX_LIST_ITEMS], *more))


_RENDER: Final[Mapping[str, Callable[[_Report], Iterator[RenderableType]]]] = {
    section.__name__.strip("_").replace("_", "-"): section
    for section in (
        _findings, _theory, _operations, _whole_job, _dimensions, _phases, _steps, _call_sites, _sizes, _times,
        _bandwidth, _waiting, _clocks, _ranks, _step_time, _network, _log,
    )
}  # fmt: skip
