"""A log that grows while it is read: each record is read once, and at any time the totals are those of a report."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import damaged_logs
import numpy as np
import pandas as pd
import pytest
from factory import LogFactory, record
from pandas.testing import assert_frame_equal
from simulated_steps import Simulation, evaluated, sharded

from commtrace.analyses import record_blocks
from commtrace.analyses.live import followed_run
from commtrace.analyses.live.followed_run import FollowedRun, _may_wait
from commtrace.cli import main
from commtrace.errors import LogError
from commtrace.reading.log import Log, open_log
from commtrace.reading.segment_reader import MemorySegment, inspect_segment
from commtrace.run import open_run
from commtrace.schema import RECORD, State

DEFAULT = {("pipeline", 0), ("zero3", 0)}
"""Schemes and seeds that are not exhaustive."""
TOTALS = ("volume_by_purpose", "ranks", "volume_by_step", "steady_step")
OF_LAST_STEPS = ("step_times", "step_time_parts", "delays", "stuck_calls", "stuck_ranks", "stalled_threads", "endings")


def copy_in_part(source: Path, target: Path, parts: dict[Path, float]) -> None:
    """Write the first part of each file of a log, as a running process would have written it; 1 is the whole file."""
    for path, part in parts.items():
        copy, content = target / path.relative_to(source), path.read_bytes()
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            lines = content.splitlines(keepends=True)
            copy.write_bytes(b"".join(lines[: max(1, round(part * len(lines)))]))
        elif part == 1:
            copy.with_name(copy.name + ".open").unlink(missing_ok=True)
            copy.write_bytes(content)
        else:
            segment, _ = inspect_segment(path)
            assert segment is not None
            length = segment.offset + int(part * segment.count * RECORD.itemsize)  # may end within a record
            copy.with_name(copy.name + ".open").write_bytes(content[:length])


def assert_equal_tables(found: dict[str, pd.DataFrame], log: Path, names: tuple[str, ...]) -> None:
    expected = open_run(log)
    for name in names:
        assert_frame_equal(found[name], expected.table(name), check_dtype=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("scheme", "seed"),
    [
        pytest.param(scheme, seed, marks=() if (scheme, seed) in DEFAULT else pytest.mark.exhaustive)
        for scheme in damaged_logs.SCHEMES
        for seed in range(20)
    ],
)
def test_totals_are_those_of_a_report_at_any_time(
    scheme: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged_logs.unpack(tmp_path / "whole")
    source, log, chance = tmp_path / "whole" / scheme, tmp_path / "log", random.Random(f"{scheme} {seed}")
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    parts = dict.fromkeys(files, 0.05)
    followed = FollowedRun(log)
    read: list[int] = []

    def counting(*arguments: Any, **options: Any) -> Any:
        for block in original(*arguments, **options):
            read.append(len(block))
            yield block

    original = record_blocks.read_blocks
    for _ in range(6):
        copy_in_part(source, log, parts)
        assert_equal_tables(followed.read().tables, log, TOTALS)
        parts = {path: min(1.0, part + chance.choice((0, 0.1, 0.3))) for path, part in parts.items()}
    copy_in_part(source, log, dict.fromkeys(files, 1.0))
    live = followed.read()
    assert_equal_tables(live.tables, log, (*TOTALS, *OF_LAST_STEPS))
    assert live.is_over
    assert live.step == open_run(log).events()["step"].max()
    monkeypatch.setattr("commtrace.analyses.fold_engine.read_blocks", counting)
    followed.read()
    assert sum(read) == 0, "nothing is new"
    FollowedRun(log).read()
    assert sum(read) == len(open_run(log).events())


def test_a_long_log_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals are of the calls that a reading says, and only steps are typical of which all calls are among them."""
    monkeypatch.setattr("commtrace.analyses.live.followed_run._AT_FIRST", 300)
    monkeypatch.setattr("commtrace.analyses.live.followed_run._AT_ONCE", 100)
    sharded(Simulation(2), 120).write(tmp_path / "whole")
    source, log = tmp_path / "whole", tmp_path / "log"
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    followed, counts, at_first = FollowedRun(log, in_parts=True), [0], 0
    typical = open_run(source).table("steady_step")
    for part in (0.6, 0.6, 0.6, 0.9, 0.9, *[1.0] * 24):
        tables = part if part == 1 else 0.95  # without their last line, the end of the process
        copy_in_part(source, log, {path: tables if path.suffix == ".jsonl" else part for path in files})
        live = followed.read()
        assert sum(live.tables["volume_by_purpose"]["calls"]) == sum(live.tables["ranks"]["calls"]) == live.totalled
        assert live.totalled > counts[-1] or live.totalled == live.records
        at_first = live.records if len(counts) == 1 else at_first
        assert live.begins == (live.totalled < at_first)
        counts.append(live.totalled)
        bytes_of_a_step = ["op", "payload_bytes_min", "payload_bytes_max"]
        assert_frame_equal(live.tables["steady_step"][bytes_of_a_step], typical[bytes_of_a_step], check_dtype=False)
    assert len({*counts}) > 5
    assert_equal_tables(live.tables, log, (*TOTALS, *OF_LAST_STEPS))


def test_times_of_steps_that_left_the_last_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_RECENT", "MOST_RECENT"):
        monkeypatch.setattr(f"commtrace.analyses.live.followed_run.{name}", 2 * 512)  # the fewest that are read
    sharded(Simulation(2), 120).write(tmp_path / "whole")
    source, log = tmp_path / "whole", tmp_path / "log"
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    followed = FollowedRun(log)
    for percent in range(10, 110, 10):
        copy_in_part(source, log, {path: 1.0 if path.suffix == ".jsonl" else percent / 100 for path in files})
        live = followed.read()
    assert live.tables["step_times"]["step"].tolist() == [*range(1, 119)]
    assert_frame_equal(live.tables["step_times"], open_run(log).table("step_times"), check_dtype=False)


@pytest.mark.parametrize("readings", [1, 4])
def test_steps_between_evaluations_are_kept(readings: int, tmp_path: Path) -> None:
    """Several evaluations between two readings: a report has the last steps alone, the live view those before, too."""
    every, steps = 5, 60
    evaluated(Simulation(2), steps, every).write(tmp_path / "whole")
    source, log = tmp_path / "whole", tmp_path / "log"
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    followed = FollowedRun(log)
    for number in range(readings):
        part = (number + 1) / readings
        copy_in_part(source, log, {path: 1.0 if path.suffix == ".jsonl" else part for path in files})
        live = followed.read()
    # A step with an evaluation and the one after it are irregular, and the end of the last one is not known.
    measured = [step for step in range(1, steps - 1) if step % every > 1]
    assert live.tables["step_times"]["step"].tolist() == measured
    of_report = open_run(log).table("step_times")
    assert 0 < len(of_report) < len(measured)
    last = live.tables["step_times"].tail(len(of_report)).reset_index(drop=True)
    assert_frame_equal(last, of_report, check_dtype=False)


def test_another_run_or_log_begins_anew(tmp_path: Path) -> None:
    damaged_logs.unpack(tmp_path / "whole")
    log = tmp_path / "log"
    followed = FollowedRun(log)
    with pytest.raises(LogError, match="no such directory"):
        followed.read()
    for scheme in ("ddp", "zero1"):  # a later run in the same directory
        shutil.copytree(tmp_path / "whole" / scheme, log, dirs_exist_ok=True)
        live = followed.read()
        assert live.run.id == open_run(log).id
        assert_equal_tables(live.tables, log, TOTALS)
    shutil.rmtree(log)
    with pytest.raises(LogError):
        followed.read()
    source = tmp_path / "whole" / "zero1"  # of the same name, and shorter
    copy_in_part(source, log, {path: 0.5 for path in source.rglob("*") if path.is_file()})
    assert_equal_tables(followed.read().tables, log, TOTALS)


def test_a_packed_log_does_not_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    damaged_logs.unpack(tmp_path)
    assert main(["pack", str(tmp_path / "ddp"), "--out", str(tmp_path / "packed")]) == 0
    assert main(["top", "--once", str(tmp_path / "packed")]) == 2
    assert "a packed log does not grow; commtrace report shows it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "begin_s", "live_s", "waits"),
    [
        (State.BEGUN, 10, 12, True),
        (State.RETURNED, 10, 12, True),
        (State.BEGUN, 11.5, 12, False),
        (State.COMPLETE, 1, 12, False),
        (State.COMPLETE, 1, 0, True),  # on another host, or not alive
    ],
)
def test_a_process_that_may_wait(state: State, begin_s: float, live_s: int, waits: bool, tmp_path: Path) -> None:
    LogFactory(tmp_path).process(0, pid=100).write([record()])
    records = np.zeros(1, RECORD)
    records["state"], records["t_begin"] = state, int(begin_s * 1e9)
    (process,) = open_run(tmp_path).processes
    in_memory = MemorySegment(process.path, 0, 1, records=records)
    assert _may_wait(replace(process, segments=(in_memory,), live_at_ns=live_s * 10**9)) == waits


def test_records_in_memory_are_read_when_those_of_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, only the newest of a process, which are not added to the totals: those before them lack."""
    LogFactory(tmp_path).process(0, pid=100).write([record(seq=number) for number in range(30)])
    asked: list[int | None] = []

    def open_growing(path: Path, *, most_in_memory: int | None = None) -> Log:
        asked.append(most_in_memory)
        log = open_log(path)
        count, (process,) = 8 if most_in_memory is None else 3, log.processes
        records = np.concatenate([record(seq=number) for number in range(30, 30 + count)])
        segments = (*process.segments, MemorySegment(process.path, 0, count, records=records))
        return replace(log, processes=(replace(process, segments=segments, left_in_memory=8 - count),))

    monkeypatch.setattr(followed_run, "open_log", open_growing)
    monkeypatch.setattr(followed_run, "_AT_FIRST", 20)
    followed = FollowedRun(tmp_path, in_parts=True)
    readings = [followed.read() for _ in range(4)]
    assert [live.totalled for live in readings] == [20, 30, 30, 30]
    assert [int(live.tables["ranks"]["calls"].sum()) for live in readings] == [20, 30, 38, 38]
    assert [live.step for live in readings] == [0] * 4
    kept = [segment for live in readings for process in live.run.processes for segment in process.segments]
    assert not any(isinstance(segment, MemorySegment) for segment in kept), "the last reading is kept during the next"
    assert asked == [followed_run.LEAST_RECENT, followed_run.LEAST_RECENT, None, None]
