"""Summaries: exact counts and sizes, histograms within their error, and a bounded number of bytes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import damaged_logs
import factory
import numpy as np
import pandas as pd
import pytest
from factory import ALL_GATHER, ALL_REDUCE, ALONE, REDUCE_SCATTER, WORLD, LogFactory
from recorded_schemes import SCHEMES
from summary_tables import assert_equal, assert_times_are_equal, summarized

from commtrace.analyses import coverage, host_times, message_sizes, volume_tables
from commtrace.analyses.fold_engine import fold
from commtrace.analyses.grouping import rows_of
from commtrace.reading.summary_reader import MIXED, SummaryTables
from commtrace.recording import log_writer, summary_writer
from commtrace.recording.log_writer import LogWriter
from commtrace.recording.ring import Ring
from commtrace.recording.summary import Summary
from commtrace.recording.summary_files import append_rows, table_path
from commtrace.run import Run, open_run
from commtrace.schema import RECORD, Clock, Records, State
from commtrace.settings import Settings
from commtrace.summary_format import RELATIVE_ERROR, TABLES

BYTES = 10_000_000
DAY = 86_400


def step_records(step: int, sizes: np.ndarray, rng: np.random.Generator) -> Records:
    """Return the calls of a step, with random durations."""
    count = len(sizes)
    records = np.zeros(count, RECORD)
    number = np.arange(count)
    records["kind"] = np.array([ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER])[number % 3]
    records["group"] = np.where(number % 7, WORLD, ALONE)
    records["site"], records["phase"], records["thread"] = 1 + number % 3, 2 + number % 3, 1
    records["payload"], records["local"] = sizes, np.where(number % 3, sizes // 2, 0)
    records["step"], records["peer"], records["tag"], records["micro_batch"] = step, -1, -1, -1
    records["clock"], records["state"] = Clock.WAIT, State.COMPLETE
    records["seq"] = number
    begin = (step + 2) * 1_000_000_000 + number * 1_000_000
    records["t_begin"] = begin
    records["t_return"] = begin + rng.lognormal(9, 1, count).astype(np.int64)
    records["t_wait"] = records["t_return"]
    records["t_end"] = records["t_wait"] + rng.lognormal(11, 2, count).astype(np.int64)
    return records


class Folding:
    """A summary made as the writer makes it: a fold after each step of a second, and a flush after ten steps."""

    def __init__(self, bytes_per_day: int = BYTES) -> None:
        self.summary = Summary(0, bytes_per_day, 0.0)
        self.rows: dict[str, list[bytes]] = defaultdict(list)
        self.bytes_by_second: dict[int, int] = defaultdict(int)

    def add(self, step: int, records: Records) -> None:
        self.summary.add(records)
        self.summary.close_steps(step)
        if step % 10 == 9:
            self.summary.flush(float(step))
            self.take(step)

    def take(self, second: int) -> None:
        for name, rows in self.summary.rows.items():
            self.bytes_by_second[second] += sum(map(len, rows))
            self.rows[name] += rows
        self.summary.rows = {name: [] for name in TABLES}

    def finish(self, second: int) -> None:
        self.summary.finish()
        self.take(second)

    def write(self, folder: Path, stem: str) -> SummaryTables:
        folder.mkdir(parents=True, exist_ok=True)
        for name, dtype in TABLES.items():
            append_rows(table_path(folder, stem, name), dtype, 0, b"".join(self.rows[name]))
        return SummaryTables(folder, stem)


def full_and_summary(folder: Path, steps: list[Records], bytes_per_day: int = BYTES) -> tuple[Run, Run, SummaryTables]:
    """Write the same calls as a full log and as a summary, and return both runs and the summary's tables."""
    folding, runs = Folding(bytes_per_day), []
    for records in steps:
        folding.add(int(records["step"][0]), records)
    folding.finish(len(steps))
    for mode in ("events", "summary"):
        process = LogFactory(folder / mode).process(0, world_size=2).known()
        if mode == "events":
            process.write(factory.records(steps))
        else:
            tables = folding.write(process.folder, process.stem)
            process.stats(calls=sum(map(len, steps)), summarized=sum(map(len, steps)))
        runs.append(open_run(folder / mode))
    return runs[0], runs[1], tables


def varied(steps: int, calls: int, rng: np.random.Generator) -> Iterator[Records]:
    for step in range(steps):
        yield step_records(step, rng.integers(0, 1 << 24, calls), rng)


TOTALS = ("volume_by_operation", "volume_by_role", "volume_by_phase", "message_size_bins", "states", "ranks")


@pytest.mark.parametrize("seed", range(6))
def test_counts_sizes_and_quantiles(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    calls, steps, bytes_ = (int(rng.integers(*bounds)) for bounds in ((1, 60), (1, 30), (17, 25)))
    runs = full_and_summary(tmp_path, [*varied(steps, calls, rng)], 1 << bytes_)[:2]
    analyses = (*volume_tables.ANALYSES, volume_tables.BY_RANK, message_sizes.ANALYSIS, coverage.ANALYSIS)
    full, summary = (fold(run, (*analyses, host_times.ANALYSIS, host_times.BANDWIDTH)) for run in runs)
    for name in TOTALS:
        expected, actual = full[name], summary[name]
        columns = [str(column) for column in expected if column not in ("wire_bytes", "payload_of_median")]
        order = [column for column in columns if expected[column].dtype == object or column == "from_bytes"]
        expected_rows, actual_rows = (
            table[columns].sort_values(order or columns, ignore_index=True) for table in (expected, actual)
        )
        assert expected_rows.astype(str).equals(actual_rows.astype(str)), (name, expected_rows, actual_rows)
        if "wire_bytes" in expected:
            np.testing.assert_allclose(expected["wire_bytes"].sum(), actual["wire_bytes"].sum(), rtol=1e-12)
    pd.testing.assert_frame_equal(full["bandwidth"], summary["bandwidth"])
    events = runs[0].events()
    for row, same_row in zip(rows_of(full["host_time"]), rows_of(summary["host_time"]), strict=True):
        same = ("op", "measure", "calls_known", "calls_unknown", "max_ns", "sum_ns")
        assert [getattr(row, name) for name in same] == [getattr(same_row, name) for name in same]
        for share, actual_ns in ((0.5, same_row.p50_ns), (0.99, same_row.p99_ns)):
            true = quantile(events.loc[events["op"] == row.op], str(row.measure), share)
            assert abs(actual_ns - true) <= RELATIVE_ERROR * true


@pytest.mark.parametrize("scheme", SCHEMES)
def test_recorded_logs_as_summaries(scheme: str, tmp_path: Path) -> None:
    damaged_logs.unpack(tmp_path / "full")
    full = open_run(tmp_path / "full" / scheme)
    summary = summarized(full.log.path, tmp_path / "summary", random.Random(1))
    assert_equal(full, summary)
    assert_times_are_equal(full, summary)


def quantile(events: pd.DataFrame, measure: str, share: float) -> int:
    """Return the exact quantile: the smallest duration that a share of the calls does not exceed."""
    begin, end = {"in_call": ("t_begin", "t_return"), "waiting": ("t_wait", "t_end")}.get(measure, ("t_begin", "t_end"))
    times = np.sort(events[f"{end}_ns"] - events[f"{begin}_ns"])
    return int(times[int(np.ceil(share * len(times))) - 1])


def test_steps_that_repeat_are_known_one_by_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    regular, special = np.full(20, 4096), np.arange(33)
    steps = [step_records(step, special if step % 10 == 5 else regular, rng) for step in range(95)]
    full, summary, tables = full_and_summary(tmp_path, steps)
    assert full.table("volume_by_step").equals(summary.table("volume_by_step"))
    assert full.table("message_sizes").equals(summary.table("message_sizes"))
    assert len(tables.table("cells")) < 80
    assert not len(tables.summed_steps)


def test_steps_for_which_there_are_no_bytes_are_known_together(tmp_path: Path) -> None:
    steps = [*varied(40, 300, np.random.default_rng(1))]
    full, summary, tables = full_and_summary(tmp_path, steps, 200_000)
    by_step = summary.table("volume_by_step").set_index("step")
    assert by_step["calls"].sum() == full.table("volume_by_step")["calls"].sum()
    assert MIXED in by_step.index
    assert len(tables.summed_steps)
    assert sum(tables.table(name).nbytes for name in TABLES) < 200_000


def test_steps_whose_sizes_are_known_as_sums_are_not_compared(tmp_path: Path) -> None:
    """Only a step with more different calls than there are cells is kept as sums."""
    rng = np.random.default_rng(1)
    steps = [step_records(step, np.full(30, 4096), rng) for step in range(20)]
    steps[7] = step_records(7, np.arange(1, 301), rng)
    _, summary, tables = full_and_summary(tmp_path, steps, 200_000)
    assert tables.summed_steps.tolist() == [[7, 7]]
    assert "steps 7 to 7 " in summary.processes[0].summary_problem


def test_a_call_that_ends_after_its_step_was_closed(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    steps = [step_records(step, np.full(4, 64), rng) for step in range(30)]
    late = steps[3][2:].copy()
    steps[3] = steps[3][:2]
    summary = Folding()
    for step, records in enumerate(steps):
        summary.add(step, records)
    summary.summary.add(late)
    summary.finish(30)
    (process,) = (LogFactory(tmp_path).process(0, world_size=2).known(),)
    summary.write(process.folder, process.stem)
    table = open_run(tmp_path).table("volume_by_step").set_index("step")
    assert table["calls"].tolist() == [4] * 30


class SimulatedTime:
    """Replacement for the module `time` in the modules that write a summary."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


CALLS = 600
WEEK = ("repeated", "varied", "special", "varied", "repeated", "special", "repeated")
"""Sizes of the calls of each day: equal in all steps, different in each step, or different in one step of 50."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "stride", [pytest.param(400, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_a_week_takes_a_bounded_number_of_bytes(stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary of 600 calls every `stride` seconds stays below its daily limit, and no call is lost."""
    clock, rng = SimulatedTime(), np.random.default_rng(1)
    for module in (summary_writer, log_writer):
        monkeypatch.setattr(module, "time", clock)
    settings = Settings(str(tmp_path), mode="summary")
    ring = Ring(settings.ring_records, None, {}, settings.kept_records)
    process = LogFactory(tmp_path).process(0, world_size=2).known()
    writer = summary_writer.SummaryWriter(settings, 0, ring, LogWriter(process.folder, process.stem, settings))
    base = step_records(0, rng.choice([4096, 65536, 1 << 20], CALLS), rng)
    variants = [step_records(0, base["payload"], rng) for _ in range(5)]
    payload, sizes_of_days = 0, []
    for day, sizes in enumerate(WEEK):
        for second in range(0, DAY, stride):
            clock.now = float(day * DAY + second)
            step = int(clock.now) // stride
            records = variants[step % 5].copy()
            records["step"] = step
            if sizes == "varied" or (sizes == "special" and step % 50 == 7):
                records["payload"] = rng.integers(1 << 20, 1 << 30, CALLS)
            payload += int(records["payload"].sum())
            ring.keep(records)
            writer.add(records)
            writer.turn()
        sizes_of_days.append(sum(path.stat().st_size for path in process.folder.glob("*.npy")))
    assert writer.finish()
    sizes_of_days[-1] = sum(path.stat().st_size for path in process.folder.glob("*.npy"))
    by_day = np.diff(sizes_of_days, prepend=0)
    print(by_day)
    assert by_day.max() <= BYTES, by_day
    assert by_day.min() > BYTES / 100, "each day is described"
    calls = [*SummaryTables(process.folder, process.stem).calls(0)]
    assert sum(int(block["calls"].sum()) for block in calls) == CALLS * 7 * DAY // stride
    assert sum(int((block["calls"] * block["payload"]).sum()) for block in calls) == payload
