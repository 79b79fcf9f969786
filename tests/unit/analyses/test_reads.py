"""A report reads each segment of a log at most twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factory import training
from pandas.testing import assert_frame_equal
from simulated_ranks import random_schedule
from simulated_steps import PROGRAMS, Simulation

from commtrace import cli
from commtrace.analyses import analysed_run
from commtrace.analyses.across_ranks import waits_section
from commtrace.analyses.fold_engine import fold
from commtrace.reading.segment_reader import Segment
from commtrace.run import open_run


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """Return how often `Segment.blocks` was called for each file, including parts of files."""
    counts: Counter[Path] = Counter()
    blocks = Segment.blocks

    def counted(self: Segment, *arguments: Any, **options: Any) -> Iterator[Any]:
        counts[self.path] += 1
        return blocks(self, *arguments, **options)

    monkeypatch.setattr(Segment, "blocks", counted)
    return counts


def write(folder: Path, log: str) -> None:
    if log == "hosts":
        random_schedule(np.random.default_rng(1), hosts=2, ranks=4, operations=200).write(folder)
    elif log == "steps":
        PROGRAMS["sharded"](Simulation(2), 6).write(folder)
    else:
        training(folder)


@pytest.mark.long
@pytest.mark.parametrize("log", ["hosts", "steps", "training"])
@pytest.mark.parametrize(
    "options", [[], ["--sections", "all"], ["--json"], ["--html"], ["--network", "ndr-infiniband"]]
)
def test_segments_are_read_at_most_twice(
    log: str, options: list[str], reads: Counter[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "log", log)
    page = [str(tmp_path / "page.html")] if options == ["--html"] else []
    if page:
        pytest.importorskip("plotly")
        pytest.importorskip("jinja2")
    assert cli.main(["report", str(tmp_path / "log"), *options, *page]) == 0
    assert {*reads} == {*(tmp_path / "log").rglob("*.npy")}
    assert max(reads.values()) <= 2


def test_many_calls_are_matched_in_parts_and_read_once(
    reads: Counter[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "hosts")
    analyses = [waits_section.ANALYSIS, waits_section.SAMPLE]
    run = open_run(tmp_path)
    expected, clocks = fold(run, analyses), run.clocks
    reads.clear()
    monkeypatch.setattr(analysed_run, "CALLS_AT_ONCE", 100)
    again = open_run(tmp_path)
    again.clocks = clocks  # which are aligned with the calls of one part
    tables = fold(again, analyses)
    assert {*reads.values()} == {1}
    for name, table in expected.items():
        key = str(table.columns[0])
        left, right = (frame.sort_values(key, ignore_index=True) for frame in (table, tables[name]))
        assert_frame_equal(left, right, rtol=1e-12)
