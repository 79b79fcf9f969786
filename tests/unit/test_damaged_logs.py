"""Damaged logs: every command ends within limits of time and memory, with a report or one error line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import damaged_logs
import numpy as np
import processes
import pytest
import trainings
from factory import RUN, WORLD, LogFactory, record, training

from commtrace.analyses.scaling.scaling_tables import shared_cores
from commtrace.cli import main
from commtrace.reading.log import open_log
from commtrace.run import open_run

QUICK = (
    "check against",
    "diff",
    "diff json",
    "baseline",
    "export csv",
    "export parquet",
    "events",
    "recover",
    "scaling",
    "whatif",
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "only"),
    [
        pytest.param(120, QUICK, marks=pytest.mark.long),
        pytest.param(12, ("report json", "report all", "check"), marks=pytest.mark.long),
        pytest.param(2_000, (), marks=[pytest.mark.exhaustive, pytest.mark.timeout(1_500)]),
    ],
)
def test_every_command_ends_with_a_report_or_a_reason(count: int, only: tuple[str, ...]) -> None:
    options = [word for name in only for word in ("--only", name)]
    seed = trainings.seed() * 1_000_000
    result = processes.run(
        [sys.executable, damaged_logs.__file__, "--count", str(count), "--seed", str(seed), *options],
        limit=1_400,
    )
    assert result.status == 0, result.out + result.err


def test_damage_is_found_by_the_harness(tmp_path: Path) -> None:
    damaged_logs.unpack(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [*damaged_logs.SCHEMES]
    for scheme in damaged_logs.SCHEMES:
        assert main(["check", str(tmp_path / scheme)]) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("t_begin", -1), ("t_end", 1 << 60), ("payload", -1), ("payload", 1 << 60), ("local", 1 << 20)),
        *(("step", -2), ("micro_batch", -2), ("peer", -2), ("tag", -5)),
        *(("phase", 200), ("clock", 7), ("flags", 128), ("state", 6)),
    ],
)
def test_records_with_impossible_values_are_left_out_and_named(tmp_path: Path, field: str, value: int) -> None:
    process = LogFactory(tmp_path).process().known()
    process.write([record(), record(**{field: value}), record()]).stats()
    run = open_run(tmp_path)
    assert len(run.events()) == 2
    (note,) = run.notes
    assert (note.kind, note.path) == ("garbled", process.tables)
    assert note.what == f"1 record with impossible values ({field})"
    assert run.processes[0].lost_records == 1
    assert note.what in run.table("notes")["what"].tolist()


@pytest.mark.long
def test_records_of_a_clock_with_large_values_are_all_reported(tmp_path: Path) -> None:
    """A clock may start anywhere: only the process's own other times show which ones are damaged."""
    start = 1_800_000_000 * 10**9
    folder = tmp_path / "log"
    log = LogFactory(folder)
    for rank, clock in enumerate((start, 10**9)):
        rows = [
            record(seq=number, step=number // 2, t_begin=at, t_return=at + 9_000, t_wait=0, t_end=at + 9_000)
            for number, at in enumerate(range(clock, clock + 8 * 10**6, 10**6))
        ]
        host = f"node{rank}"
        process = log.process(rank, pid=100 + rank, host=host, boot_id=host, world_size=2, mono_ns=clock)
        process.known({WORLD: [0, 1]}).write(rows).end()
    run = open_run(folder)
    assert (len(run.events()), run.notes) == (16, ())
    tables = run.tables()
    assert tables["ranks"]["calls"].tolist() == [8, 8]
    assert tables["waits_by_rank"][["calls", "calls_unknown"]].to_numpy().sum() == 16
    assert tables["clocks"]["offset_ns"].abs().max() == pytest.approx(start - 10**9, abs=10**4)
    for command in ("report", "check", "export"):
        options = ["--out", str(tmp_path / "events.csv")] if command == "export" else []
        assert main([command, str(folder), *options]) in (0, 3)
    pytest.importorskip("pyarrow")
    assert main(["pack", str(folder), "--out", str(tmp_path / "packed")]) == 0
    assert len(open_run(tmp_path / "packed").events()) == 16


@pytest.mark.parametrize("value", [1, 1 << 60, -1, (1 << 62) + 1])
def test_damaged_times_of_a_clock_with_large_values_are_left_out(tmp_path: Path, value: int) -> None:
    times = dict.fromkeys(("t_begin", "t_return", "t_end"), 1_800_000_000 * 10**9) | {"t_wait": 0}
    process = LogFactory(tmp_path).process().known()
    process.write([*(record(**times) for _ in range(3)), record(**times | {"t_end": value})]).stats()
    run = open_run(tmp_path)
    assert len(run.events()) == 3
    assert [note.what for note in run.notes] == ["1 record with impossible values (t_end)"]


def test_damage_that_worker_processes_find_is_named(tmp_path: Path) -> None:
    LogFactory(tmp_path).process().known().write([record(), record(phase=77), record(step=5_000)]).stats()
    run = open_run(tmp_path)
    with ProcessPoolExecutor(1) as executor:
        notes = run.tables(executor)["notes"]
    assert notes["kind"].tolist() == ["garbled", "process"]
    assert notes["what"].tolist()[1].startswith("its records go up to step 5,000, but the number of calls is only 3")


def test_a_step_that_is_far_beyond_the_records_is_named_and_not_visited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_logs.unpack(tmp_path)
    (path, *_) = sorted((tmp_path / "zero1").rglob("*.npy"))
    records = np.load(path)
    records["step"][-1] = 30_000_000
    np.save(path, records)
    assert main(["check", str(tmp_path / "zero1")]) == 3
    assert "its records go up to step 30,000,000, but the number of calls" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", str(tmp_path / "zero1"), str(tmp_path / "zero1")]) == 3
    assert "step 30,000,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scheme", "old", "new", "command"),
    [
        ("zero1", '"shape": [96], "dtype"', f'"shape": [{10**30}], "dtype"', ("check", "LOG")),
        ("zero1", '"shape": [96], "dtype"', f'"shape": [{-(1 << 63)}], "dtype"', ("check", "LOG")),
        ("pipeline", '"ranks": [0, 1]', '"ranks": [0, 0]', ("diff", "LOG", "LOG")),
    ],
)
def test_tables_with_senseless_values_do_not_end_a_command(
    scheme: str, old: str, new: str, command: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_logs.unpack(tmp_path)
    for path in (tmp_path / scheme).rglob("*.jsonl"):
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    assert main([str(tmp_path / scheme) if word == "LOG" else word for word in command]) in (0, 3)
    assert capsys.readouterr().out


def test_scaling_of_a_log_with_a_senseless_list_of_cores(tmp_path: Path) -> None:
    damaged_logs.unpack(tmp_path)
    (path,) = (tmp_path / "ddp").rglob("rank00000-*.jsonl")
    lines = path.read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "cores": 1.5})
    path.write_text("\n".join(lines) + "\n")
    assert shared_cores(open_run(tmp_path / "ddp")) == ""


def test_a_log_whose_records_belong_to_no_operation_has_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged_logs.unpack(tmp_path)
    (tables,) = (tmp_path / "zero1").rglob("rank00001-*.jsonl")
    (records,) = (tmp_path / "zero1").rglob("rank00000-*.npy")
    tables.unlink()
    records.unlink()
    assert main(["report", str(tmp_path / "zero1")]) == 0
    assert "missing" in capsys.readouterr().out


def test_scaling_leaves_out_a_run_whose_steps_have_no_duration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = ("t_begin", "t_return", "t_wait", "t_start", "t_end")
    damaged_logs.unpack(tmp_path)
    for path in (tmp_path / "ddp").rglob("*.npy"):
        records = np.load(path)
        for name in times:
            records[name] = 1
        np.save(path, records)
    assert main(["scaling", str(tmp_path / "ddp"), str(tmp_path / "fsdp")]) == 2
    assert "its steps have no duration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("process", {"rank": 0, "world_size": 1 << 40}),
        ("process", {"rank": 1 << 40}),
        ("stats", {"calls": -1}),
        ("stats", {"cost_ns": 1 << 60}),
        ("stats", {"drain_cpu_ns": float("inf")}),
        ("clock", {"mono_ns": 1 << 62, "unix_ns": 1}),
        ("groups", {"id": 9, "ranks": [0, 1 << 30]}),
        *(("groups", {"id": 9, "ranks": ranks}) for ranks in ("0-999999999999", "0-9:0", "3-1", "0,,1", "-1", 7)),
        ("groups", {"id": 9, "ranks": ",".join(["0-999999"] * 2)}),
        ("stands_for", {"ranks": "0-99999999999", "count": 3}),
        ("notices", {"file": "\ud800"}),
    ],
)
def test_lines_with_impossible_values_are_left_out_and_named(
    tmp_path: Path, table: str, row: dict[str, object]
) -> None:
    log = training(tmp_path, ranks=1)
    (path,) = (log.directory / RUN / "node17").glob("*.jsonl")
    lines = len(path.read_text().splitlines())
    log.process(0, pid=4711).add(table, **row)
    (note,) = open_log(tmp_path).notes
    assert (note.kind, note.what) == ("garbled", f"line {lines + 2} cannot be read")
