"""Exposed communication and overlap with computation, in imported traces with known kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factory import LogFactory, overlapping_training, record
from hypothesis import given
from hypothesis import strategies as st
from kineto_traces import KinetoFactory

import commtrace
from commtrace.analyses.overlap import intersection, length
from commtrace.importing.enclosing import union


def test_exposed_communication_is_a_union_of_spans(tmp_path: Path) -> None:
    trace = KinetoFactory().step(0, 0, 100).step(1, 100, 100)
    # Step 0: two kernels communicate at the same time from 210 to 250; kernels compute from 200 to 220 and 240 to 300.
    trace.call(10, 20, kernels=((210, 30),)).call(40, 20, kernels=((220, 30),))
    trace.kernel(200, 20, "gemm", launched=5).kernel(240, 60, "gemm", launched=70)
    # Step 1: nothing hides the communication.
    trace.call(110, 20, kernels=((400, 50),)).kernel(300, 10, "gemm", launched=105)
    run = commtrace.open(trace.write(tmp_path / "a.json"))
    table = run.table("exposed_communication").set_index("step")
    columns = ["duration_ns", "computation_ns", "communication_ns", "hidden_ns", "exposed_ns", "idle_ns"]
    assert [*table.loc["0", columns]] == [100_000, 80_000, 40_000, 20_000, 20_000, 0]
    assert [*table.loc["all", columns]] == [250_000, 90_000, 90_000, 20_000, 70_000, 90_000]
    assert table.loc["0", "exposed_share"] == pytest.approx(0.2)
    operation = run.table("overlap_by_operation").iloc[0]
    assert (operation["op"], operation["calls"], operation["communication_ns"]) == ("all_reduce", 3, 90_000)
    assert operation["overlap"] == pytest.approx(20 / 90)


def test_a_recorded_log_has_the_steps_of_its_host(tmp_path: Path) -> None:
    overlapping_training(tmp_path, steps=6, waits_after=300)
    run = commtrace.open(tmp_path)
    table = run.table("exposed_communication").set_index("step")
    assert [*table.index] == ["1", "2", "3", "4", "all"]
    columns = ["duration_ns", "computation_ns", "communication_ns", "hidden_ns", "exposed_ns", "idle_ns"]
    of_step = [2_000_000, 2 * 890_000, 800_000, 2 * 290_000, 2 * 110_000, 0]  # of two ranks
    assert [*table.loc["2", columns]] == of_step
    assert [*table.loc["all", columns]] == [4 * ns for ns in of_step]
    row = run.table("overlap_by_operation").iloc[0]
    assert (row["op"], row["calls"], row["overlap"]) == ("all_reduce", 8, 0.725)
    assert run.table("overlap_by_purpose")["communication_ns"].tolist() == [4 * 800_000]


def test_a_recorded_log_without_steps_has_no_rows(tmp_path: Path) -> None:
    LogFactory(tmp_path).process(rank=0).known().write([record()]).stats()
    run = commtrace.open(tmp_path)
    for name in ("exposed_communication", "overlap_by_operation", "overlap_by_role", "overlap_by_purpose"):
        assert len(run.table(name)) == 0


def test_without_communication_the_overlap_is_missing(tmp_path: Path) -> None:
    trace = KinetoFactory().call(10, 20).kernel(200, 20, "gemm", launched=5)
    table = commtrace.open(trace.write(tmp_path / "a.json")).table("exposed_communication")
    assert table["exposed_ns"].tolist() == [0]
    assert pd.isna(table["overlap"].iloc[0])


@given(*[st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12)] * 2)
def test_unions_and_intersections_equal_those_of_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    spans = [np.array(pairs, np.int64).reshape(-1, 2) for pairs in (a, b)]
    unions = [union(pairs[:, 0], pairs.sum(axis=1)) for pairs in spans]
    sets = [{moment for begin, duration in pairs for moment in range(begin, begin + duration)} for pairs in (a, b)]
    assert [length(pairs) for pairs in unions] == [len(moments) for moments in sets]
    assert length(intersection(*unions)) == len(sets[0] & sets[1])
