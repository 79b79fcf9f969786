"""All sections of reports, in their order, and from them all analyses and tables. Add a section here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from . import (
    expert_load,
    host_times,
    log_section,
    message_sizes,
    network_efficiency,
    overlap,
    setup_section,
    side_by_side,
    steps,
    volume_by_purpose,
    volume_tables,
)
from .across_ranks import clocks_section, endings_section, step_time_section, stuck_calls_section, waits_section
from .compare import theory_section
from .compare.setting_differences import SETTING_DIFFERENCES
from .compare.step_differences import CALL_DIFFERENCES
from .fold_engine import AnyAnalysis
from .scaling import scaling_specs
from .sections import Block, Listing, Report, Section
from .table_specs.spec import TableSpec
from .what_if import predictions


def _findings(report: Report) -> Iterator[Block]:
    if texts := [text for section in SECTIONS for text in section.findings(report.tables)]:
        yield Listing(texts)


FINDINGS: Final = Section("findings", "Findings", blocks=_findings)

SECTIONS: Final[tuple[Section, ...]] = (
    FINDINGS,
    endings_section.ENDINGS_SECTION,
    stuck_calls_section.STUCK_SECTION,
    theory_section.THEORY_SECTION,
    volume_tables.OPERATIONS_SECTION,
    volume_tables.WHOLE_JOB_SECTION,
    volume_tables.DIMENSIONS_SECTION,
    volume_tables.PHASES_SECTION,
    volume_by_purpose.PURPOSES_SECTION,
    expert_load.EXPERTS_SECTION,
    steps.STEPS_SECTION,
    volume_tables.SITES_SECTION,
    message_sizes.SIZES_SECTION,
    host_times.TIMES_SECTION,
    host_times.BANDWIDTH_SECTION,
    overlap.OVERLAP_SECTION,
    waits_section.WAITING_SECTION,
    clocks_section.CLOCKS_SECTION,
    volume_tables.RANKS_SECTION,
    step_time_section.STEP_TIME_SECTION,
    network_efficiency.NETWORK_SECTION,
    setup_section.SECTION,
    log_section.LOG_SECTION,
)
"""The sections of the report of one run, in its order."""

ANALYSES: Final[tuple[AnyAnalysis, ...]] = tuple(analysis for section in SECTIONS for analysis in section.analyses)
"""What every report computes."""

ACROSS_RANKS: Final[tuple[AnyAnalysis, ...]] = tuple(
    analysis for section in SECTIONS for analysis in section.on_request
)
"""Analyses that match all calls of all ranks. They take as long as all others, so text reports omit them by default."""

DETAILS: Final[dict[str, AnyAnalysis]] = {
    spec.name: analysis for section in SECTIONS for spec, analysis in section.details
}
"""Analyses that figures need and no report prints, by the name of their only table."""

TABLE_GROUPS: Final[Mapping[str, tuple[TableSpec, ...]]] = {
    "report": tuple(spec for section in SECTIONS for spec in section.tables if not section.option),
    "figures": tuple(spec for section in SECTIONS for spec, _ in section.details),
    "network": tuple(spec for section in SECTIONS for spec in section.tables if section.option == "--network"),
    "comparison": side_by_side.TABLES,
    "differences": (CALL_DIFFERENCES, SETTING_DIFFERENCES),
    "scaling": scaling_specs.TABLES,
    "what_if": predictions.TABLES,
}
"""The tables of the report of a run (all of them in every JSON report; empty if not applicable), those that only
figures use, those of `--network`, and those of runs side by side, of `commtrace diff`, of `commtrace scaling` and of
`commtrace whatif`."""

TABLES: Final[Mapping[str, TableSpec]] = {spec.name: spec for specs in TABLE_GROUPS.values() for spec in specs}
"""Every table by name."""


def describe_columns(names: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Return unit and meaning of each column of the named tables, as in the JSON documents."""
    return {
        name: {column.name: {"unit": column.unit, "meaning": column.meaning} for column in TABLES[name].columns}
        for name in names
    }
