"""The pages of several runs: side by side, and by number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from commtrace.analyses import figures
from commtrace.analyses.comparison import compare
from commtrace.analyses.fold_engine import rows_of
from commtrace.analyses.report.findings import warnings_of_runs
from commtrace.formatting import format_plural
from commtrace.run import Run

from .page import Page, PageSection, render
from .sections import figure_section, spec_table


def page_of_runs(runs: Mapping[str, Run], tables: Mapping[str, dict[str, pd.DataFrame]]) -> str:
    """Return the page of runs side by side.

    Args:
        runs: The runs, by the names that the page gives them.
        tables: The tables of each run, by the same names.
    """
    compared = compare(runs, tables)
    overview = PageSection(
        "runs",
        "The runs",
        "A training step of each run, per rank. Wire bytes are the least bytes that a rank must send for the payload.",
        table=spec_table("runs", compared["runs"]),
    )
    sections = [figure_section(name, figure, compared) for name, figure in figures.COMPARISONS.items()]
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"{format_plural(len(runs), 'run')} side by side",
            tiles=[],
            findings=[],
            warnings=warnings_of_runs(runs, tables),
            facts=[(str(row.run), f"{row.path}, run {row.id}") for row in rows_of(compared["runs"])],
            lists=[],
            sections=[overview, *sections],
        )
    )


def page_of_scaling(runs: Mapping[str, Run], tables: Mapping[str, pd.DataFrame], sentences: Sequence[str]) -> str:
    """Return the page of runs by number of ranks.

    Args:
        runs: The runs, by name.
        tables: Those of `commtrace.analyses.scaling`.
        sentences: What they say.
    """
    ranks, projection = tables["scaling"]["ranks"], tables["scaling_projection"]
    volumes = PageSection(
        "sent",
        "What a rank sends in a step",
        "Means over the ranks. Expected, and the closed form: of the lowest rank, where theory has rules for the job.",
        table=spec_table("scaling", tables["scaling"], "sent"),
    )
    model = PageSection(
        "model",
        "The model, and more ranks",
        "Fixed and divided computing, latency and bandwidth of calls, and waiting for late ranks.",
        table=spec_table("scaling_projection", projection, "model") if len(projection) else None,
        absent="" if len(projection) else "No model: calls have one size only, or their times are not known.",
    )
    sections = [figure_section(name, figure, tables) for name, figure in figures.SCALING.items()]
    return render(
        Page(
            title=", ".join(runs),
            subtitle=f"scaling from {ranks.min():,} to {ranks.max():,} ranks",
            tiles=[],
            findings=sentences,
            warnings=[],
            facts=[(name, f"{run.log.path}, run {run.id}") for name, run in runs.items()],
            lists=[],
            sections=[*sections, volumes, model],
        )
    )
