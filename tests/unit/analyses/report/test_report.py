"""The report as text and as JSON."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import ALL_REDUCE, PAIR, UNIX_NS, WORLD, LogFactory, record, records, training
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from commtrace import formatting as units
from commtrace.analyses import analyse, analysis_catalog
from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.report.document import report_to_json, to_json_value
from commtrace.analyses.report.terminal import render
from commtrace.cli import main
from commtrace.run import Run, open_run
from commtrace.schema import State
from commtrace.text_tables import TextColumn, left_column, shorten_call_site, text_table

SECTIONS = [section.name for section in analysis_catalog.SECTIONS]
NOT_SHOWN = [section.name for section in analysis_catalog.SECTIONS if not section.default]
LOGS = Path(__file__).parents[4] / "notebooks" / "logs"


def report(source: Path | Run, width: int = 80, *, tables: NamedTables | None = None, **options: Any) -> str:
    """Return the report of a log directory or a run as text, from all tables or these."""
    run = source if isinstance(source, Run) else open_run(source)
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    for part in render(run, run.tables() if tables is None else tables, width, **options):
        console.print(part)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def big(directory: Path) -> None:
    """Write a log with large numbers everywhere, long paths, damage, and ranks that differ."""
    log = LogFactory(directory, run="torchelastic-" + "x" * 40 + "-0-20261121-045421-3f9a1c")
    for rank in range(20):
        process = log.process(rank, pid=1_000_000 + rank, host="node-with-a-long-name", world_size=4096)
        process.known({WORLD: list(range(4096))}, {WORLD: "data"})
        rows = np.repeat(record(payload=(1 << 45) + 12345 * rank + 1, t_end=10**13), 1000)
        rows["step"] = np.arange(1000) % 7
        rows["site"] = np.arange(1000) % 4
        rows["kind"] = 1 + np.arange(1000) % 7
        process.write(rows)
        process.stats(calls=123_456_789, dropped=12_345_678, hook_errors=7, first_error="ValueError: " + "long " * 60)
    (process.folder / "a-file-of-somebody-else-with-a-name-that-is-long-enough-to-be-wrapped.npy").write_bytes(b"x")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a training run of two ranks."""
    training(directory := tmp_path_factory.mktemp("training"))
    return open_run(directory)


@pytest.fixture(scope="module")
def big_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the run that `big` writes."""
    big(directory := tmp_path_factory.mktemp("big"))
    return open_run(directory)


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_no_line_is_longer_than_the_width(small_run: Run, big_run: Run, width: int) -> None:
    for run in (small_run, big_run):
        assert max(map(len, report(run, width).splitlines())) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_numbers_are_whole_at_any_width(big_run: Run, width: int) -> None:
    text = report(big_run, width)
    for number in (
        "20 of 4,096",
        "20,000 recorded of 2,469,135,780 counted",
        "246,913,560 dropped",
        "missing: 20-4095",
    ):
        assert number in " ".join(text.split())
    for row in big_run.table("volume_by_operation").itertuples():
        assert f"{row.calls:,}" in text
        assert units.format_bytes(row.payload_bytes) in text


def test_a_report_begins_with_warnings_and_findings_and_ends_with_the_log(tmp_path: Path) -> None:
    log = training(tmp_path)
    log.process(0, pid=1).add(
        "job", source="deepspeed", engine="DeepSpeedEngine", zero_stage=2, parameters=[{"shape": [3, 4]}]
    )
    log.process(1, pid=9).stats(calls=8, dropped=8)
    text = report(tmp_path)
    positions = [
        text.index(part)
        for part in (
            "Run 2026",
            "DeepSpeedEngine, ZeRO stage 2, 12 parameters",
            "2 of 2 recorded",
            "! ",
            "2 processes ended early",
            "Findings",
            "Comparison with theory",
            "By operation",
            "8.00 us a call",
            "Blind spots",
            "(use --sections all)",
        )
    ]
    assert positions == sorted(positions)


def test_sections_are_chosen_by_name(small_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    default = report(small_run)
    everything = report(small_run, sections=SECTIONS)
    assert "Message sizes" in everything
    assert "Message sizes" not in default
    for name in NOT_SHOWN:
        assert name in default.splitlines()[-1]
    directory = str(small_run.log.path)
    assert main(["report", directory, "--sections", "ranks,phases"]) == 0
    chosen = capsys.readouterr().out
    assert "By phase" in chosen
    assert "Load balance" in chosen
    assert "By operation" not in chosen
    assert len(chosen.split("\n\n")) == 3
    assert main(["report", directory, "--sections", "all"]) == 0
    assert capsys.readouterr().out == everything


def test_sections_that_do_not_exist_or_do_not_apply_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path), "--sections", "sizes,colours"])
    assert exit_.value.code == 2
    assert "'colours'" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--sections", "sizes", "--json"]) == 2
    assert "leave it out with --json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_the_report_of_a_healthy_run_fits_on_two_screens(name: str) -> None:
    # As the command does: without what matches all calls of all ranks.
    text = report(LOGS / name, 100, tables=analyse(open_run(LOGS / name), across_ranks=False))
    assert "! " not in text
    assert len(text.splitlines()) <= 2 * 48


def test_a_dimension_is_named_where_it_is_the_only_one(tmp_path: Path) -> None:
    two = LogFactory(tmp_path / "two").process().known({WORLD: [0, 1], PAIR: [0, 1]}, {WORLD: "data", PAIR: "tensor"})
    two.write([record(group=WORLD), record(group=PAIR)])
    assert "By parallel dimension" in report(tmp_path / "two")
    LogFactory(tmp_path / "one").process().known({WORLD: [0, 1]}, {WORLD: "data"}).write(record())
    run = open_run(tmp_path / "one")
    assert "parallel dimension: data" in report(run)
    assert "By parallel dimension" not in report(run)
    assert "By parallel dimension" in report(run, sections=["dimensions"])


def test_what_is_not_known_is_a_dash(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process(world_size=None).known()
    process.write(record(kind=99, t_end=0, t_wait=0, t_return=0, clock=0, state=State.BEGUN, step=-1))
    text = report(tmp_path, sections=SECTIONS)
    assert "1 rank recorded, on 1 host; the world size is not known" in text
    assert "tracing cost  not known" in text
    assert "not every process wrote how many it counted" in " ".join(text.split())
    assert "The log has no training step" in text
    assert "Not known for any call." in text
    line = next(line for line in text.splitlines() if line.startswith("unknown  ") and "100.0 %" in line)
    assert line.split() == ["unknown", "1", "1.00", "KiB", "-", "100.0", "%"]


def test_a_log_without_events(tmp_path: Path) -> None:
    LogFactory(tmp_path).process()
    assert "0 recorded" in report(tmp_path)


def test_start_up_is_kept_apart_and_equal_steps_are_called_equal(small_run: Run) -> None:
    text = report(small_run)
    assert "A training step, mean per recorded rank: all 3 steps identical" in text
    assert "Start-up, before the first step: 2 calls, payload 0 B, over all ranks." in text


def test_steps_that_differ_are_counted(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process().known()
    process.write([record(step=step, payload=8 + (step == 2)) for step in range(5)])
    assert "median of 4 steps, 1 of them different" in report(tmp_path)
    process.add("end", reason="exit", mono_ns=9_000, unix_ns=UNIX_NS)
    assert "median of 5 steps, 1 of them different" in report(tmp_path)


def test_other_runs_stand_at_the_top(tmp_path: Path) -> None:
    training(tmp_path, run="first", unix_ns=1)
    training(tmp_path, run="second", unix_ns=2)
    head = " ".join(report(tmp_path).split())[:400]
    assert "! " in head
    assert "first" in head
    assert "commtrace report" in head


def test_ranks_that_differ_stand_out(tmp_path: Path) -> None:
    log = LogFactory(tmp_path)
    for rank in range(40):
        log.process(rank, world_size=40).known({WORLD: list(range(40))}).write(
            record(payload=1024 * (1 + 9 * (rank == 33)))
        )
    run = open_run(tmp_path)
    assert "10.00" in report(run)
    text = report(run, per_rank=True)
    assert "10.00" in text
    assert "The 8 ranks with the least payload and the 8 with the most, of 40." in text


def test_sites_are_limited(small_run: Run) -> None:
    assert "By call site, the first 1 of 3" in report(small_run, sites=1)
    assert "train.py:40 main" in report(small_run, sites=0)


def test_json_is_strict_and_complete(big_run: Run) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(report_to_json(big_run, big_run.tables()), parse_constant=refuse)
    assert list(document) == ["format", "version", "run", "path", "job", "other_runs", "tables", "columns"]
    assert list(document["tables"]) == list(big_run.tables())
    for name, rows in document["tables"].items():
        assert len(rows) == len(big_run.table(name))
        assert all(list(row) == list(big_run.table(name).columns) for row in rows)
    total = sum(row["payload_bytes"] for row in document["tables"]["volume_by_operation"])
    assert total == sum(1000 * ((1 << 45) + 12345 * rank + 1) for rank in range(20))


def test_json_on_stdout_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["volume_by_operation"][0] == {
        "op": "all_reduce",
        "calls": 6,
        "payload_bytes": 24576,
        "wire_bytes": 24576,
        "payload_share": 24576 / 36864,
    }


def test_a_pipe_gets_no_colours_and_the_width_of_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "_all_gather_params_of_one_coordinator" in text
    monkeypatch.delenv("COLUMNS")
    assert main(["report", str(tmp_path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_numbers_that_json_lacks_are_null() -> None:
    values = [math.nan, math.inf, -math.inf, pd.NA, None, np.float64("nan"), np.int64(3), 2.0, 2.5, True, "x"]
    assert to_json_value(values) == [None, None, None, None, None, None, 3, 2, 2.5, True, "x"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 << 20, "10.0 MiB"),
        (1023 << 20, "1.00 GiB"),
        (1 << 62, "4.00 EiB"),
        (None, "-"),
        (1.5, "1.50 B"),
    ],
)
def test_sizes(value: Any, text: str) -> None:
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 ns"),
        (850, "850 ns"),
        (1_500, "1.50 us"),
        (999_999, "1.00 ms"),
        (12_345_678_901, "12.3 s"),
        (5 * 10**12, "5,000 s"),
        (pd.NA, "-"),
    ],
)
def test_times(value: Any, text: str) -> None:
    assert units.format_duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.0 %"), (0.0001, "<0.1 %"), (0.1234, "12.3 %"), (1, "100.0 %"), (math.nan, "-")]
)
def test_shares(value: Any, text: str) -> None:
    assert units.format_share(value) == text


@given(st.text("ab/\\:. _1é漢", min_size=1, max_size=60), st.integers(1, 200))
def test_shortened_text_fits(text: str, width: int) -> None:
    assert len(shorten_call_site(text, width, "…")) <= width


def test_long_paths_are_shortened_from_the_left() -> None:
    assert (
        shorten_call_site("deepspeed/runtime/engine.py:2711 allreduce_bucket", 40, "…")
        == "…/engine.py:2711 allreduce_bucket"
    )
    assert (
        shorten_call_site("deepspeed/engine.py:27 a_very_long_name_of_a_function", 30, "…")
        == "…/engine.py:27 a_very_long_na…"
    )


def test_phrases_are_shortened_from_the_right() -> None:
    assert shorten_call_site("parameters gathered for forward", 20, "…") == "parameters gathered…"
    assert shorten_call_site("the program's own", 2, "...") == "..."


def test_columns_that_may_go_go_before_words_become_unreadable() -> None:
    columns = [left_column("line", shortenable=True), TextColumn("calls"), TextColumn("extra", optional=True)]
    rows = [["x/" * 40 + "file.py:1 f", "1,234,567", "1.00 KiB"]]
    wide = Console(width=200, file=io.StringIO())
    for width, extra in ((120, True), (50, False)):
        wide.file = io.StringIO()
        wide.print(text_table(columns, rows, width, "…"))
        text = wide.file.getvalue()
        assert ("1.00 KiB" in text) is extra
        assert "1,234,567" in text
        assert max(map(len, text.splitlines())) <= width


def test_the_report_of_a_bounded_log_says_what_was_removed(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process(0, world_size=1).known()
    process.write(records([record(kind=ALL_REDUCE)] * 3), number=4).stats(calls=103, removed=100).add(
        "end", reason="exit"
    )
    assert "3 recorded of 103 counted: 100 removed" in report(tmp_path)


def test_the_first_lines_say_which_calls_a_failing_hook_left_out(tmp_path: Path) -> None:
    process = LogFactory(tmp_path).process(0, world_size=1).known()
    process.write(records([record(kind=ALL_REDUCE)] * 28))
    process.stats(calls=152, unrecorded=124, hook_errors=124, first_error="Traceback\nKeyError: 'op'").add("end")
    first = "\n".join(report(tmp_path).splitlines()[:8])
    assert "Recorded 28 of 152 calls (124 unrecorded)" in first
    assert "124 times (KeyError: 'op')" in first
    assert os.listdir(tmp_path)
