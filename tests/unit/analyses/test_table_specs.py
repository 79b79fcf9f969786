"""Table specifications, compared with the tables of real logs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pandas as pd
import pytest
from counted_dry_runs import Call, dry_run
from factory import LogFactory, training
from networks import ideal, results

from commtrace.analyses import analyse
from commtrace.analyses.analysis_catalog import TABLES
from commtrace.analyses.compare.recorded_calls import read_calls
from commtrace.analyses.compare.two_runs import compare_calls
from commtrace.analyses.fold_engine import fold
from commtrace.analyses.network_efficiency import network_analysis
from commtrace.analyses.report.document import comparison_to_json, report_to_json, scaling_to_json
from commtrace.analyses.scaling import scaling
from commtrace.analyses.side_by_side import compare
from commtrace.analyses.table_specs.spec import formatted_rows
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.layouts import Rate, networks_of, predicted_layouts
from commtrace.analyses.what_if.predictions import (
    exposed_shares,
    required_bandwidth,
    run_facts,
    what_if,
)
from commtrace.analyses.what_if.simulated_step import simulated_step
from commtrace.analyses.what_if.timelines import step_timelines
from commtrace.errors import NoSuchTableError
from commtrace.network.networks import MeasuredNetwork
from commtrace.run import open_run
from commtrace.schema import Phase

LOGS = Path(__file__).parents[3] / "notebooks" / "logs"
ZEROS = {name: LOGS / name for name in ("zero1", "zero3")}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """Return every table that commtrace makes."""
    zeros = {name: open_run(path) for name, path in ZEROS.items()}
    folder = tmp_path_factory.mktemp("scaling")
    for ranks in (2, 4):
        training(folder / str(ranks), ranks=ranks)
    differences = compare_calls(*(read_calls(run) for run in zeros.values()))
    network = network_analysis(MeasuredNetwork("it", results([*ideal("all_reduce", 2), *ideal("all_gather", 2)])))
    calls = [Call(1, 1, phase=Phase.FORWARD), Call(1, 1)]
    dry = open_run(dry_run(tmp_path_factory.mktemp("dryrun"), {0: calls, 1: calls}))
    return {
        **analyse(zeros["zero3"], details=True),
        **fold(zeros["zero3"], [network]),
        **compare(zeros),
        "call_differences": differences.table,
        "setting_differences": differences.settings,
        **scaling({ranks: open_run(folder / ranks) for ranks in ("2", "4")}),
        "what_if": what_if(changed := changed_run(replayed_run(zeros["zero3"])), catalogue=True),
        "required_bandwidth": required_bandwidth(changed),
        "what_if_run": run_facts(changed.recorded),
        "step_timelines": step_timelines(changed),
        "exposed_by_speed": exposed_shares(changed),
        **dry.bandwidth_bounds(rate=1e12),
        **predicted_layouts({"it": simulated_step(dry)}, networks_of(["1GB/s"]), Rate(1e12, "as stated")),
    }


def test_every_column_is_described_and_every_described_column_exists(tables: dict[str, pd.DataFrame]) -> None:
    described = {name: [column.name for column in spec.columns] for name, spec in TABLES.items()}
    assert described == {name: [*tables[name].columns] for name in TABLES}
    assert set(tables) == set(TABLES)


def test_empty_tables_have_their_columns(tmp_path: Path) -> None:
    LogFactory(tmp_path).process()
    run = open_run(tmp_path)
    for name, table in (analyse(run, details=True) | compare({"empty": run})).items():
        assert [*table.columns] == [column.name for column in TABLES[name].columns], name


def test_views_name_columns_and_every_value_has_a_text(tables: dict[str, pd.DataFrame]) -> None:
    for spec in TABLES.values():
        for view in ("terminal", *spec.views):
            rows = formatted_rows(spec.columns_of(view), tables[spec.name])
            assert len(rows) == len(tables[spec.name])
            assert all(isinstance(cell, str) and cell not in ("nan", "<NA>", "None") for row in rows for cell in row)


def test_descriptions_are_sentences() -> None:
    for spec in TABLES.values():
        assert spec.rows.endswith(".")
        for column in spec.columns:
            assert column.head
            assert column.meaning.endswith("."), column
            assert "|" not in column.meaning, "it would end a cell of a Markdown table"


def test_json_documents_describe_their_tables(tables: dict[str, pd.DataFrame]) -> None:
    run = open_run(ZEROS["zero1"])
    texts = [
        report_to_json(run, run.tables()),
        comparison_to_json(compare({"one": run})),
        scaling_to_json({name: table for name, table in tables.items() if name.startswith("scaling")}, ["A sentence."]),
    ]
    for document in map(json.loads, texts):
        assert list(document["columns"]) == list(document["tables"])
        for name, rows in document["tables"].items():
            for row in rows:
                assert list(row) == list(document["columns"][name])


def test_a_run_describes_its_tables() -> None:
    run = open_run(ZEROS["zero1"])
    described = run.describe_table("volume_by_operation")
    assert [*described.index] == [*run.table("volume_by_operation").columns]
    assert described.loc["payload_bytes", "unit"] == "bytes"
    assert described.loc["payload_bytes", "meaning"]
    with pytest.raises(NoSuchTableError, match="no table is called 'no_table'"):
        run.describe_table("no_table")


def test_the_reference_page_has_all_tables() -> None:
    pytest.importorskip("mkdocs")
    page = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "generated_pages.py"))["tables_page"]()
    for spec in TABLES.values():
        assert f"### `{spec.name}`" in page
    for line in page.splitlines():
        assert not line.startswith("|") or line.count("|") == 4
