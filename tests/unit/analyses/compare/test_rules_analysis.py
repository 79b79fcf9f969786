"""Differences from theory have a cause or are shown as unexplained, and sums are always exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pytest
from expected_runs import (
    OWN,
    PROGRAM,
    RANKS,
    SAVING,
    ZERO_1,
    call,
    calls,
    cut,
    every_step,
    in_other_pieces,
    run_of,
    with_call,
    without_a_check,
    without_optimizer,
)
from factory import LogFactory, record
from matched_calls import counted_calls, unmatched_calls

from commtrace.analyses.analysis_catalog import TABLES
from commtrace.analyses.compare.causes import CAUSES, UNEXPLAINED
from commtrace.analyses.compare.counted_calls import DETAILED_STEPS
from commtrace.run import Run, open_run
from commtrace.schema import Phase, Records
from commtrace.theory import ExpectedCall


def differing(run: Run, rank: int = 0) -> dict[str, tuple[int, int, int]]:
    """Return missing calls, extra calls, and bytes, by cause."""
    table = run.table("reconciliation")
    differences = table.loc[(table["cause"] != "expected") & (table["rank"] == rank)]
    sums = differences.groupby("cause")[["expected_calls", "measured_calls", "difference_bytes"]].sum()
    return {str(row.Index): (row[1], row[2], row[3]) for row in sums.itertuples()}


def test_a_run_as_expected(tmp_path: Path) -> None:
    run = run_of(tmp_path, every_step(), ZERO_1)
    assert differing(run) == {}
    assert run.table("theory")["scheme"].tolist() == ["ZeRO-1"] * RANKS
    assert run.table("theory")["matched_share"].tolist() == [1.0] * RANKS
    cells = run.table("reconciliation")
    assert (cells["expected_bytes"] == cells["measured_bytes"]).all()
    assert set(cells["sites"]) == {"deepspeed/runtime/zero/stage_1_and_2.py:5 step"}


DIFFERENT: Final[dict[str, tuple[Callable[[list[Records]], list[Records]], dict[str, Any], tuple[int, int, int]]]] = {
    "the log begins after start-up": (lambda rows: [row for row in rows if row["step"][0] >= 0], {}, (3, 0, -146)),
    "the log ends within this step": (cut, {"end": False}, (1, 0, -72)),
    "optimizer skipped: gradients overflowed": (without_optimizer, {}, (4, 0, -164)),
    "checkpoint saved": (with_call("broadcast", 700, site=SAVING), {}, (0, 1, 700)),
    "the program's own": (with_call("barrier", 0, site=OWN), {}, (0, 1, 0)),
    "not recorded": (with_call("all_reduce", 4000, site=PROGRAM, phase=Phase.FORWARD), {}, (0, 1, 4000)),
    "evaluation": (with_call("all_gather", 72, phase=Phase.EVALUATION), {}, (0, 1, 72)),
    "the same bytes, split into different calls (another order)": (in_other_pieces, {}, (2, 2, 0)),
    "records missing from the log": (without_a_check, {"dropped": 1}, (1, 0, -1)),
}


@pytest.mark.long
@pytest.mark.parametrize("cause", DIFFERENT)
def test_differences_have_names(cause: str, tmp_path: Path) -> None:
    change, options, numbers = DIFFERENT[cause]
    run = run_of(tmp_path, change(every_step()), ZERO_1, **options)
    for rank in range(RANKS):
        assert differing(run, rank) == {cause: numbers}
    theory = run.table("theory")
    assert theory["unexplained_bytes"].tolist() == [0] * RANKS
    assert_adds_up(run)


def test_steps_that_only_other_ranks_have(tmp_path: Path) -> None:
    """A rank that stops early lacks all later steps, and a step without calls in the middle is missing as well."""
    rows = every_step()
    early = [row for row in rows if row["step"][0] < 1]
    gap = [row for row in rows if row["step"][0] != 1]
    run = run_of(tmp_path, rows, ZERO_1, others={1: early, 2: gap})
    early_bytes = sum(payloads_of(rows)) - sum(payloads_of(early))
    gap_bytes = sum(payloads_of(rows)) - sum(payloads_of(gap))
    assert differing(run, 0) == {}
    assert differing(run, 1) == {
        "the log ends before this step, unlike the logs of other ranks": (len(rows) - len(early), 0, -early_bytes)
    }
    assert differing(run, 2) == {UNEXPLAINED: (len(rows) - len(gap), 0, -gap_bytes)}
    assert_adds_up(run)


def payloads_of(rows: list[Records]) -> list[int]:
    """Return the payloads of records."""
    return [int(row["payload"][0]) for row in rows]


def test_every_cause_has_an_example() -> None:
    tested_elsewhere = {
        "the log ends before this step, unlike the logs of other ranks",
        "gradients reduced several times: no_sync is not used",
    }
    purposes = {"checkpoint saved", "the program's own", "not recorded", "evaluation"}
    assert {*CAUSES} == {*DIFFERENT, *tested_elsewhere} - purposes


@pytest.mark.long
def test_a_typical_step_has_no_checkpoint(tmp_path: Path) -> None:
    """The step of the waterfall is one without activities, and no bytes of theirs are in it, if there is no other."""
    plain = run_of(tmp_path / "plain", every_step(), ZERO_1).table("waterfall")
    saved = [call(ExpectedCall("all_gather", 4000, ""), 2, site=SAVING)]
    others = [call(ExpectedCall("all_gather", 4000, ""), step, site=SAVING) for step in (0, 1)]
    one = run_of(tmp_path / "one", [*every_step(), *saved], ZERO_1).table("waterfall")
    all_ = run_of(tmp_path / "all", [*every_step(), *others, *saved], ZERO_1).table("waterfall")
    assert one["bytes"].tolist() == all_["bytes"].tolist() == plain["bytes"].tolist()
    assert one["label"].iloc[-1] == "recorded, rank 0, step 1"
    purposes = run_of(tmp_path / "one", [*every_step(), *saved], ZERO_1).table("volume_by_purpose")
    checkpoint = purposes.loc[purposes["purpose"] == "checkpoint saved"]
    assert checkpoint[["calls", "payload_bytes"]].to_numpy().tolist() == [[RANKS, 4000 * RANKS]]
    assert checkpoint["calls_per_rank"].isna().all()


@pytest.mark.long
@pytest.mark.parametrize("change", [cut, with_call("all_gather", 999), with_call("all_reduce", 6, site=0)])
def test_what_has_no_name_is_unexplained(change: Callable[[list[Records]], list[Records]], tmp_path: Path) -> None:
    run = run_of(tmp_path, change(every_step()), ZERO_1)
    assert [*differing(run)] == [UNEXPLAINED]
    assert (run.table("theory")["unexplained_bytes"] > 0).all()
    assert_adds_up(run)


def assert_adds_up(run: Run) -> None:
    """Assert that the waterfall adds up to the byte, and that the table of cells has every byte of the log."""
    bars = run.table("waterfall")
    if len(bars):
        assert bars["bytes"][:-1].sum() == bars["bytes"].iloc[-1]
        assert bars["kind"].iloc[0] == "closed form"
        assert bars["kind"].iloc[-1] == "measured"
    events, cells = run.events(), run.table("reconciliation")
    assert cells["measured_bytes"].sum() == events["payload_bytes"].sum()
    assert cells["measured_calls"].sum() == len(events)
    assert (cells["difference_bytes"] == cells["measured_bytes"] - cells["expected_bytes"]).all()


def test_the_waterfall_of_an_unexplained_call(tmp_path: Path) -> None:
    extra = call(ExpectedCall("all_reduce", 600, ""), 2)
    bars = run_of(tmp_path, [*every_step(), extra], ZERO_1).table("waterfall")
    rows = {(row.label, row.kind): row.bytes for row in bars.itertuples()}
    assert rows["equation 2: 2 P (d-1)/d", "closed form"] == round(2 * 73 * 2 / 3 * 2)
    assert rows[UNEXPLAINED, "unexplained"] == pytest.approx(800, abs=1)
    assert rows["all_reduce in place of reduce_scatter", "cause"] == pytest.approx(73 * 2 / 3 * 2, abs=1)


def test_late_steps_are_compared_by_operation(tmp_path: Path) -> None:
    last = DETAILED_STEPS + 1
    rows = calls(ZERO_1, range(-1, last + 1))
    clean = run_of(tmp_path / "clean", rows, ZERO_1, ranks=1)
    assert differing(clean) == {}
    assert set(clean.table("reconciliation")["step"]) == {*range(-1, last + 1)}
    assert [*differing(run_of(tmp_path / "cut", rows[:-1], ZERO_1, ranks=1))] == [UNEXPLAINED]


def test_a_run_without_a_job(tmp_path: Path) -> None:
    run = run_of(tmp_path, every_step())
    assert set(run.table("theory")["not_predicted"]) == {"no job was captured"}
    assert not sum(len(run.table(name)) for name in ("expected", "reconciliation", "waterfall"))


def test_columns(tmp_path: Path) -> None:
    full, empty = run_of(tmp_path / "a", every_step(), ZERO_1), run_of(tmp_path / "b", every_step())
    for name in ("theory", "expected", "reconciliation", "waterfall", "waterfall_by_role"):
        assert [*full.table(name).columns] == [*empty.table(name).columns] == TABLES[name].column_names
        assert full.table(name).dtypes.to_dict() == empty.table(name).dtypes.to_dict()


def test_other_versions_are_said(tmp_path: Path) -> None:
    log = LogFactory(tmp_path).process(0, world_size=1, versions={"torch": "2.6.0+cpu", "deepspeed": "0.19.8"})
    log.known().write([record()]).end()
    assert open_run(tmp_path).table("theory")["other_versions"].tolist() == ["torch 2.6.0+cpu (rules: 2.13.0)"]


def test_a_record_removed_from_the_file_shows(tmp_path: Path) -> None:
    """A record that is missing from a segment file makes a difference on its rank only."""
    rows = every_step()
    run_of(tmp_path, rows, ZERO_1)
    segment = sorted(tmp_path.rglob("*.npy"))[0]
    np.save(segment, np.delete(np.load(segment), 7))
    table = open_run(tmp_path).table("reconciliation")
    assert set(table.loc[table["rank"] == 0, "cause"]) == {"expected", UNEXPLAINED}
    assert set(table.loc[table["rank"] == 1, "cause"]) == {"expected"}


# --- the report -----------------------------------------------------------------------------------------------------


def section(run: Run, width: int) -> list[str]:
    """Return the lines of the section in a report."""
    from rich.console import Console

    from commtrace.analyses.report.terminal import render

    console = Console(width=width, record=True, highlight=False, markup=False, emoji=False, file=open("/dev/null", "w"))
    for part in render(run, run.tables(), width, sections=["theory"]):
        console.print(part)
    lines = console.export_text().splitlines()
    begin = lines.index("Comparison with theory")
    return lines[begin + 1 :]


@pytest.mark.parametrize("width", [80, 160])
def test_the_report_tells(width: int, tmp_path: Path) -> None:
    lines = section(run_of(tmp_path, [*every_step(), *with_call("all_reduce", 600)([])], ZERO_1), width)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert text.startswith("ZeRO-1: ")
    assert "- unexplained: all_reduce: 3 extra calls, +1.76 KiB of payload, in 1 step, from deepspeed/" in text
    assert "equation 2: 2 P (d-1)/d 195 B 100.0 %" in text
    assert "recorded, rank 0, step 2" in text


def test_the_report_says_why_nothing_is_compared(tmp_path: Path) -> None:
    assert section(run_of(tmp_path, every_step()), 80) == ["Not compared: no job was captured."]


def test_tables_are_frames(tmp_path: Path) -> None:
    assert all(isinstance(table, pd.DataFrame) for table in run_of(tmp_path, every_step(), ZERO_1).tables().values())


def test_a_library_s_call_in_an_evaluation_is_sooner_the_expected_one_than_a_call_of_the_program() -> None:
    """A library's calls in training match first, then those in evaluations, then calls of the program."""
    calls = [
        counted_calls("data", "broadcast", 8, site=site, phase=phase)
        for phase, site in (
            ("init", "train.py:3 main"),
            ("evaluation", "site-packages/deepspeed/utils.py:89 compare"),
            ("forward", "site-packages/deepspeed/utils.py:89 compare"),
        )
    ]
    unmatched_phases = []
    for expected in (1, 2, 3):
        leftovers = unmatched_calls([ExpectedCall("broadcast", 8, "comparison", expected)], calls)
        unmatched_phases.append([leftover.key.phase for leftover in leftovers])
    assert unmatched_phases == [["evaluation", "init"], ["init"], []]


def test_calls_of_a_checkpoint_match_those_that_rules_expect_of_one_and_no_others() -> None:
    saved = replace(counted_calls("data", "all_gather", 128, 2), purpose="checkpoint saved")
    trained = replace(counted_calls("data", "all_gather", 128, 3), purpose="parameters gathered for forward")
    training, saving = (ExpectedCall("all_gather", 128, cause, 3) for cause in ("small parameters", "checkpoint saved"))
    assert unmatched_calls([training, replace(saving, calls=2)], [saved, trained]) == []
    left = unmatched_calls([replace(training, calls=5)], [saved, trained])
    assert sorted(calls.calls for calls in left) == [-2, 2], "a lost call is not replaced by one of the checkpoint"
