"""Pages of one run, of runs side by side, and of runs by number of ranks: sections of figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pandas as pd

from commtrace.analyses import figures
from commtrace.analyses.grouping import rows_of
from commtrace.analyses.job_summary import summarize_job
from commtrace.analyses.report import findings
from commtrace.analyses.report.expected_text import NETWORK_LEGEND, network_source, network_title
from commtrace.analyses.side_by_side import compare
from commtrace.analyses.steps import ALL
from commtrace.analyses.table_specs import TABLES
from commtrace.analyses.table_specs.equivalent_ranks import reduce_ranks, text_rows
from commtrace.formatting import format_bytes, format_count, format_plural, format_share, format_small_share, is_known
from commtrace.reading.recorded_run import RecordedRun
from commtrace.run import Run

from .rendering import Page, PageSection, PageTable, Tile, drawing, render

MAX_SITES: Final = 40
"""Call sites that the page shows by default."""

MAX_ROWS: Final = 60
"""Rows of any other table that the page shows."""


def page_of_run(
    name: str, run: RecordedRun, tables: Mapping[str, pd.DataFrame], *, sites: int = MAX_SITES, per_rank: bool = False
) -> str:
    """Return the page of one run.

    Args:
        name: Title of the page.
        run: The run.
        tables: Its tables, including those that only figures use.
        sites: Maximum number of call sites; 0: all.
        per_rank: Show the first rows of tables of many ranks, instead of classes of equivalent ranks.
    """
    sections = [_figure_section(name, figure, tables) for name, figure in figures.FIGURES.items()]
    sections += _across_ranks(tables, per_rank=per_rank)
    if "network" in tables:
        shown = tables["network"].head(MAX_ROWS)
        text = f"{network_source(tables)} {NETWORK_LEGEND}"
        sections.append(_table_section("network", network_title(tables), text, "network", shown))
    return render(
        Page(
            title=name,
            subtitle=summarize_job(run) or "what was trained was not captured",
            tiles=[*_tiles(tables)],
            findings=[*findings.findings(tables)],
            warnings=[*findings.diagnosis(tables), *findings.warnings(run, tables)],
            facts=[("run", run.id), *findings.facts(run, tables).items()],
            lists=[*findings.log_lists(run, tables).items()],
            sections=[*sections, _call_sites(tables["volume_by_site"], sites)],
        )
    )


_ACROSS_RANKS: Final = {
    "stuck": ("Calls that do not end", ("stuck_calls", "stuck_ranks"),
        "The calls in which the job hangs, or died, and where each of their ranks is."),
    "waiting": ("Waiting, and step times across ranks",
        ("step_time_parts", "stragglers", "delays", "wait_patterns", "waits_by_operation", "waits_by_rank"),
        "A call waits until the last rank that it depends on has begun it; the rest is its transfer."),
    "clocks": ("Clocks of the hosts", ("clocks", "clock_steps"),
        "Bounds on each host's clock relative to the reference's, from the calls alone."),
}  # fmt: skip
"""Sections of tables that compare ranks: title, tables, what to look for."""


def _across_ranks(tables: Mapping[str, pd.DataFrame], *, per_rank: bool) -> Iterator[PageSection]:
    """Yield the sections of _ACROSS_RANKS that have rows; clocks only if there are several hosts."""
    for name, (title, names, text) in _ACROSS_RANKS.items():
        shown = [table for table in names if table in tables and len(tables[table])]
        if shown and (name != "clocks" or len(tables["clocks"]) > 1):
            rows = {table: tables[table] if per_rank else reduce_ranks(TABLES[table], tables[table]) for table in shown}
            folded = [(TABLES[table].title, _spec_table(table, rows[table].head(MAX_ROWS))) for table in shown]
            yield PageSection(name, title, text, tables=folded)


def _call_sites(table: pd.DataFrame, sites: int) -> PageSection:
    shown = table.head(sites) if sites else table
    more = f", the first {len(shown)} of {len(table):,}" if len(shown) < len(table) else ""
    text = "Lines of code that made the calls, outside of the wrappers of torch and DeepSpeed. Sums over the ranks."
    return _table_section("sites", f"Call sites{more}", text, "volume_by_site", shown, absent="The log has no calls.")


def _tiles(tables: Mapping[str, pd.DataFrame]) -> Iterator[Tile]:
    """Yield the key numbers of a run."""
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
    for step in rows_of(steady.loc[steady["op"] == ALL]):
        variation = f"{step.differing_steps:,} differ from the median" if step.differing_steps else "all identical"
        yield Tile("training steps", format_count(step.steps), variation)
        calls = f"per rank, in {format_count(step.calls_per_rank)} calls"
        yield Tile("payload of a step", format_bytes(step.payload_bytes_per_rank), calls)
        yield Tile("sent in a step", format_bytes(step.wire_bytes_per_rank), "per rank (min)")
    cost = tables["tracing_cost"].dropna(subset=["share"])
    if coverage["simulated"]:
        yield Tile("times", "none", "simulated: nothing was sent")
    elif len(cost):
        note = f"of the run's time; {findings.cost_per_call(cost)}"
        yield Tile("tracing cost", format_small_share(cost["share"].mean()), note)
    else:
        yield Tile("tracing cost", "not known")


def page_of_runs(runs: Mapping[str, Run], tables: Mapping[str, dict[str, pd.DataFrame]]) -> str:
    """Return the page of runs side by side, from the runs and their tables, both by the names that the page shows."""
    compared = compare(runs, tables)
    text = (
        "A training step of each run, per rank. Wire bytes are the fewest bytes that a rank can send for the payload."
    )
    overview = _table_section("runs", "The runs", text, "runs", compared["runs"])
    sections = [_figure_section(name, figure, compared) for name, figure in figures.COMPARISONS.items()]
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"{format_plural(len(runs), 'run')} side by side",
            warnings=findings.warnings_of_runs(runs, tables),
            facts=[(str(row.run), f"{row.path}, run {row.id}") for row in rows_of(compared["runs"])],
            sections=[overview, *sections],
        )
    )


def page_of_scaling(runs: Mapping[str, Run], tables: Mapping[str, pd.DataFrame], sentences: Sequence[str]) -> str:
    """Return the page of runs by number of ranks, from the tables of `commtrace.analyses.scaling` and the findings."""
    ranks = tables["scaling"]["ranks"]
    text = "Means over the ranks. Expected bytes and the closed form are of the lowest rank, if the job has rules."
    volumes = _table_section("sent", "What a rank sends in a step", text, "scaling", tables["scaling"], "sent")
    text = "Fixed and divided computation, latency and bandwidth of calls, and waiting for late ranks."
    absent = "No model: calls have one size only, or their times are not known."
    name, title = "scaling_projection", "The model, and more ranks"
    model = _table_section("model", title, text, name, tables[name], "model", absent=absent)
    sections = [_figure_section(name, figure, tables) for name, figure in figures.SCALING.items()]
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"scaling from {ranks.min():,} to {ranks.max():,} ranks",
            findings=sentences,
            facts=[(name, f"{run.log.path}, run {run.id}") for name, run in runs.items()],
            sections=[*sections, volumes, model],
        )
    )


def _table_section(
    name: str, title: str, text: str, table: str, rows: pd.DataFrame, view: str = "page", *, absent: str = ""
) -> PageSection:
    """Return the section of a table. `absent`: why there are no rows, if there are none."""
    if absent and not len(rows):
        return PageSection(name, title, text, absent=absent)
    return PageSection(name, title, text, tables=[("", _spec_table(table, rows, view))])


def _spec_table(name: str, table: pd.DataFrame, view: str = "page") -> PageTable:
    """Return a table of strings, by its description in `commtrace.analyses.table_specs`."""
    columns, rows = text_rows(TABLES[name], view, table)
    heads, kinds = [column.head for column in columns], [column.kind for column in columns]
    return PageTable(heads, kinds, [[_indented(cell) for cell in row] for row in rows])


def _indented(text: str) -> str:
    """Return a text with its leading spaces as no-break spaces, which browsers keep."""
    return text if not text.startswith(" ") else "\N{NO-BREAK SPACE}" * (len(text) - len(text.lstrip())) + text.lstrip()


def _figure_section(name: str, figure: figures.Figure, tables: Mapping[str, pd.DataFrame]) -> PageSection:
    """Return the section of a figure, or the reason why it cannot be drawn."""
    table = tables.get(figure.table)
    if table is None or not figure.has_data(table):
        return PageSection(name, figure.title, "", absent=figure.absent + _why_not_predicted(figure.table, tables))
    rows, title = table, "The numbers"
    if name == "expected_and_measured":
        rows, title = _differences(table), "What differs, sums over ranks and training steps"
    shown = rows.head(MAX_ROWS)
    if len(shown) < len(rows):
        title += f", the first {len(shown)} of {len(rows):,}"
    return PageSection(
        name,
        figure.title,
        figure.look_for,
        drawings=[replace(drawing(name, figure.draw(table)), title="")],
        tables=[(title, _spec_table(figure.table, shown, figure.view))] if figure.view and len(shown) else [],
    )


def _why_not_predicted(table: str, tables: Mapping[str, pd.DataFrame]) -> str:
    """Return why a run is not compared with theory, if `table` is a table of that comparison."""
    theory = tables.get("theory")
    if theory is None or table not in ("waterfall", "reconciliation"):
        return ""
    return "".join(f" ({reason})" for reason in theory["not_predicted"].dropna().unique()[:3])


def _differences(reconciliation: pd.DataFrame) -> pd.DataFrame:
    """Return what differs in training steps by dimension, operation and cause, the largest difference first."""
    differing = ~reconciliation["cause"].isin(["", "expected"])
    rows = reconciliation.loc[(reconciliation["step"] >= 0) & differing]
    sums = {name: (name, "sum") for name in ("expected_calls", "measured_calls", "difference_bytes")}
    groups = rows.groupby(["role", "op", "cause"], as_index=False).agg(**sums, sites=("sites", "max"))
    return groups.sort_values("difference_bytes", key=lambda difference: difference.abs(), ascending=False)
