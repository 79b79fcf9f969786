"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pandas as pd

from commtrace.analyses import figures
from commtrace.analyses.job_summary import summarize_job
from commtrace.analyses.report.findings import findings, warnings
from commtrace.analyses.report.log_facts import cost_per_call, facts, log_lists
from commtrace.analyses.report.network_text import MEANING, network_source, network_title
from commtrace.analyses.steps import ALL
from commtrace.analyses.table_specs import TABLES
from commtrace.formatting import format_bytes, format_count, format_plural, format_share, format_small_share, is_known
from commtrace.reading.recorded_run import RecordedRun

from .page import Page, PageSection, Tile, render
from .sections import figure_section, spec_table

MAX_SITES: Final = 40
"""Call sites that the page shows by default."""


def page_of_run(name: str, run: RecordedRun, tables: Mapping[str, pd.DataFrame], *, sites: int = MAX_SITES) -> str:
    """Return the page of one run.

    Args:
        name: The page's title.
        run: The run.
        tables: Its tables, by name, with those that only figures are drawn from.
        sites: Call sites to show; 0: all.
    """
    sections = [figure_section(name, figure, tables) for name, figure in figures.FIGURES.items()]
    if "network" in tables:
        shown = tables["network"].head(TABLES["network"].max_rows)
        text = f"{network_source(tables)} {MEANING}"
        sections.append(PageSection("network", network_title(tables), text, table=spec_table("network", shown)))
    return render(
        Page(
            title=name,
            subtitle=summarize_job(run) or "what was trained was not captured",
            tiles=[*_tiles(tables)],
            findings=[*findings(tables)],
            warnings=[*warnings(run, tables)],
            facts=[("run", run.id), *facts(run, tables).items()],
            lists=[*log_lists(run, tables).items()],
            sections=[*sections, _call_sites(tables["volume_by_site"], sites)],
        )
    )


def _call_sites(table: pd.DataFrame, sites: int) -> PageSection:
    shown = table.head(sites) if sites else table
    more = f", the first {len(shown)} of {len(table):,}" if len(shown) < len(table) else ""
    return PageSection(
        "sites",
        f"Call sites{more}",
        "Lines of code that made the calls, outside of the wrappers of torch and DeepSpeed. Sums over the ranks.",
        table=spec_table("volume_by_site", shown) if len(shown) else None,
        absent="" if len(shown) else "The log holds no call.",
    )


def _tiles(tables: Mapping[str, pd.DataFrame]) -> Iterator[Tile]:
    """Yield the run at a glance."""
    coverage = tables["coverage"].iloc[0]
    seen, world_size = int(coverage["ranks_seen"]), coverage["world_size"]
    missing = bool(is_known(world_size)) and seen < int(world_size)
    job = f"of {format_count(world_size)}" if is_known(world_size) else "of an unknown number"
    hosts = format_plural(int(coverage["hosts"]), "host")
    yield Tile("recorded ranks", format_count(seen), f"{job}, on {hosts}", missing)
    records, calls = coverage["records"], coverage["calls"]
    counted = bool(is_known(calls) and calls)
    note = f"{format_share(records / calls)} of those counted" if counted else ""
    yield Tile("calls recorded", format_count(records), note, counted and records < calls)
    steady = tables["steady_step"]
    for _, step in steady.loc[steady["op"] == ALL].iterrows():
        yield from _step_tiles(step)
    cost = tables["tracing_cost"].dropna(subset=["share"])
    if coverage["simulated"]:
        yield Tile("times", "none", "simulated: nothing was sent")
    elif len(cost):
        note = f"of the run's time; {cost_per_call(cost)}"
        yield Tile("tracing cost", format_small_share(cost["share"].mean()), note)
    else:
        yield Tile("tracing cost", "not known")


def _step_tiles(step: pd.Series[Any]) -> Iterator[Tile]:
    differing = int(step["differing_steps"])
    alike = f"{differing:,} differ from the median" if differing else "all identical"
    yield Tile("training steps", format_count(step["steps"]), alike)
    calls = f"{format_count(step['calls_per_rank'])} calls"
    yield Tile("payload of a step", format_bytes(step["payload_bytes_per_rank"]), f"per rank, in {calls}")
    yield Tile("sent in a step", format_bytes(step["wire_bytes_per_rank"]), "per rank (min)")
