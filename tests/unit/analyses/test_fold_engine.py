"""Every analysis is a fold: its tables do not depend on how records are cut into blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from factory import ALONE, KINDS, PAIR, SITES, WORLD, LogFactory, Records, record, training
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from record_blocks import block_of

from commtrace.analyses import timeline
from commtrace.analyses.analysis_catalog import ANALYSES, DETAILS
from commtrace.analyses.compare import rules_analysis
from commtrace.analyses.fold_engine import Analysis, fold
from commtrace.analyses.grouping import group_rows, positions_by_value, sum_groups
from commtrace.analyses.record_blocks import EMPTY_BLOCK, RecordBlock
from commtrace.run import Run, open_run

ALL = [*ANALYSES, rules_analysis.ANALYSIS, *DETAILS.values()]
FOLDS = [analysis for analysis in ALL if isinstance(analysis, Analysis)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run with one process, rank 1 of 4."""
    folder = tmp_path_factory.mktemp("log")
    LogFactory(folder).process(1, world_size=4).known(
        {WORLD: [0, 1, 2, 3], PAIR: [1, 2], ALONE: [1]}, {PAIR: "pipeline"}
    )
    return open_run(folder)


def random_records(seed: int, count: int) -> Records:
    """Return records with random values, including unknown ids."""
    draw = np.random.default_rng(seed)
    rows = np.repeat(record(), count)
    for name, highest in (
        ("kind", 9),
        ("group", 5),
        ("site", 6),
        ("phase", 6),
        ("clock", 7),
        ("state", 6),
        ("flags", 128),
        ("payload", 1 << 41),
    ):
        rows[name] = draw.integers(0, highest, count)
    rows["step"] = draw.integers(-1, 4, count)
    rows["peer"] = draw.integers(-1, 3, count)
    rows["local"] = rows["payload"] // 4
    for name in ("t_begin", "t_return", "t_wait", "t_start", "t_end"):
        rows[name] = draw.integers(0, 10**9, count) * draw.integers(0, 2, count)
    return rows


def merged_partials(analysis: Analysis, *blocks: RecordBlock) -> pd.DataFrame:
    return analysis.merge([analysis.partial(block) for block in blocks or [EMPTY_BLOCK]])


def test_the_timeline_s_step_does_not_depend_on_where_blocks_are_cut(run: Run) -> None:
    """Steps 1 and 2 are candidates, and a block of step 3 alone proves that step 2 is over."""
    rows = np.concatenate([record(step=step, t_begin=1 + step, t_return=2 + step) for step in (1, 2, 3)])
    analysis = timeline.ANALYSIS
    blocks = [rows, rows[:2], rows[2:]]
    uncut, first, second = (analysis.partial(block_of(run, block)) for block in blocks)
    assert_frame_equal(analysis.merge([first, second]), analysis.merge([uncut]))
    assert uncut["last_step"].tolist() == [3, 3]


@pytest.mark.long
@pytest.mark.parametrize("analysis", FOLDS, ids=lambda analysis: analysis.name)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(0, 200), data=st.data())
def test_parts_merge_to_the_whole(analysis: Analysis, run: Run, seed: int, count: int, data: st.DataObject) -> None:
    rows = random_records(seed, count)
    cut = data.draw(st.integers(0, count))
    uncut = merged_partials(analysis, block_of(run, rows))
    merged = merged_partials(analysis, block_of(run, rows[:cut]), block_of(run, rows[cut:]))
    nested = analysis.merge(
        [
            analysis.merge([analysis.partial(block_of(run, rows[:cut]))]),
            analysis.partial(block_of(run, rows[cut:])),
        ]
    )
    assert_frame_equal(uncut, merged, rtol=1e-12)
    assert_frame_equal(uncut, nested, rtol=1e-12)


@pytest.mark.parametrize("analysis", FOLDS, ids=lambda analysis: analysis.name)
def test_nothing_gives_the_columns(analysis: Analysis, run: Run) -> None:
    filled = merged_partials(analysis, block_of(run, random_records(1, 50)))
    assert list(merged_partials(analysis).columns) == list(filled.columns)
    assert len(analysis.partial(EMPTY_BLOCK)) == 0


def test_an_executor_gives_the_same_tables(tmp_path: Path) -> None:
    training(tmp_path, ranks=4)
    run = open_run(tmp_path)
    with ThreadPoolExecutor(2) as executor:
        tables = run.tables(executor)
    for name, table in run.tables().items():
        assert_frame_equal(tables[name], table)


RECORDS = 18


def differently_numbered(folder: Path) -> Run:
    """Return a run of three processes that number their operations, groups and call sites in different orders."""
    log = LogFactory(folder)
    for rank in range(3):
        process = log.process(rank, pid=4711 + rank, world_size=3)
        groups = [[0, 1, 2], [0, 1], [rank]]
        for number, row in enumerate(np.roll(np.array(KINDS, object), rank), 1):
            process.add("kinds", **{**row, "id": number})
        for number, row in enumerate(np.roll(np.array(SITES, object), rank), 1):
            process.add("sites", **{**row, "id": 2 * number})
        for number, ranks in enumerate(np.roll(np.array(groups, object), rank), 1):
            process.add("groups", id=1000 * number, ranks=ranks, name="", desc="", index=0, backend="gloo")
        rows = random_records(rank, RECORDS)
        rows["group"] *= 1000
        process.write(rows[:10]).write(rows[10:]).end()
    return open_run(folder)


def test_blocks_that_span_processes_have_the_labels_of_each(tmp_path: Path) -> None:
    run = differently_numbered(tmp_path)
    events = run.events()
    assert {"unknown", ""} < set(events["site"])
    for name, keys in (
        ("volume_by_operation", ("op",)),
        ("volume_by_role", ("role",)),
        ("volume_by_role_and_operation", ("role", "op")),
        ("volume_by_phase", ("phase",)),
        ("volume_by_site", ("site", "op")),
        ("states", ("state",)),
        ("ranks", ("rank",)),
        ("message_sizes", ("op", "payload_bytes")),
    ):
        expected = events.groupby([*keys], observed=True)["payload_bytes"].agg(["size", "sum"])
        table = run.table(name).set_index([*keys]).sort_index()
        assert table["calls"].to_dict() == expected["size"].to_dict()
        if "payload_bytes" in table:
            assert table["payload_bytes"].to_dict() == expected["sum"].to_dict()


@pytest.mark.long
def test_tables_do_not_depend_on_the_size_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = differently_numbered(tmp_path)
    expected = fold(run, ALL)
    for rows in (1, 7, RECORDS):
        monkeypatch.setattr("commtrace.analyses.record_blocks.ROWS_OF_BLOCK", rows)
        for name, table in fold(run, ALL).items():
            assert_frame_equal(expected[name], table, rtol=1e-12)


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0, 7, 1 << 40]), st.integers(0, 1 << 62)), max_size=50),
)
def test_grouping_is_exact(rows: list[tuple[int, int, int]]) -> None:
    first_column, second, values = (np.array([row[column] for row in rows], np.int64) for column in range(3))
    first, groups = group_rows([first_column, second])
    assert len({(row[0], row[1]) for row in rows}) == len(first)
    for row, group in zip(rows, groups, strict=True):
        assert rows[first[group]][:2] == row[:2]
    sums = sum_groups(values >> 6, groups, len(first))
    for group, index in enumerate(first):
        assert sums[group] == sum(row[2] >> 6 for row in rows if row[:2] == rows[index][:2])


@given(values=st.lists(st.integers(-3, 3)))
def test_positions_are_those_of_each_value(values: list[int]) -> None:
    positions = {value: indexes.tolist() for value, indexes in positions_by_value(np.array(values, np.int64)).items()}
    assert positions == {value: [i for i, other in enumerate(values) if other == value] for value in set(values)}
    assert [*positions] == sorted(positions)
