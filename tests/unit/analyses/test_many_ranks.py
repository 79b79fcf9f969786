"""Reports of many ranks: equivalent ranks do not make them longer, and ranks that differ are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from factory import WORLD, LogFactory, record
from hypothesis import given, settings
from hypothesis import strategies as st

from commtrace.analyses import analyse
from commtrace.analyses.analysis_catalog import SECTIONS, TABLE_GROUPS, TABLES
from commtrace.analyses.compare.rules_verdict import describe_losses
from commtrace.analyses.compare.verdict import of_ranks
from commtrace.analyses.compare.verdict_text import shows_all_ranks
from commtrace.analyses.figures import delays
from commtrace.analyses.fold_engine import NamedTables
from commtrace.analyses.report import terminal
from commtrace.analyses.report.document import report_to_json
from commtrace.analyses.report.html.page_contents import page_of_run
from commtrace.analyses.table_specs.equivalent_ranks import (
    MAX_CLASSES,
    MAX_OUTLIERS,
    Different,
    Distribution,
    reduce_ranks,
    text_rows,
)
from commtrace.cli import main
from commtrace.rank_ranges import parse_ranks, shorten_names, shorten_rank_list
from commtrace.reading.log import recovery_note
from commtrace.reading.log_notes import Note, merge_notes
from commtrace.recording.recovery import Recovery
from commtrace.run import Run, open_run
from commtrace.statements import Quantity, Statement, shortened
from commtrace.text_tables import rendered_lines

STEPS = 3
ODD = 17


def write_log(folder: Path, ranks: int, odd: int | None = None) -> None:
    """Write the log of a job whose ranks make equal calls; rank `odd` makes one more in each step."""
    log = LogFactory(folder)
    for rank in range(ranks):
        rows = [
            record(seq=step * 2 + number, step=step, t_begin=at, t_return=at + 9_000, t_wait=0, t_end=at + 9_000)
            for step in range(STEPS)
            for number in range(2 if rank == odd else 1)
            for at in [1_000_000 * (step + 1) + 20_000 * number]
        ]
        process = log.process(rank, pid=1000 + rank, world_size=ranks)
        process.known({WORLD: [*range(ranks)]}).write(rows).end()


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, NamedTables]:
    """Return a run with an odd rank, and its tables."""
    folder = tmp_path_factory.mktemp("odd")
    write_log(folder, 40, ODD)
    run = open_run(folder)
    return run, run.tables()


def text_of(run: Run, tables: NamedTables, **options: Any) -> list[str]:
    """Return the lines of the report with all sections."""
    renderables = terminal.render(run, tables, 120, sections=[section.name for section in SECTIONS], **options)
    return [line for renderable in renderables for line in rendered_lines(renderable, 120)]


@pytest.mark.long
def test_the_size_of_a_report_does_not_grow_with_alike_ranks(tmp_path: Path) -> None:
    runs = []
    for ranks in (64, 1000):
        write_log(tmp_path / str(ranks), ranks)
        runs.append(open_run(tmp_path / str(ranks)))
    few, many = ((run, analyse(run, details=True)) for run in runs)
    pages = [len(page_of_run("it", *report)) for report in (few, many)]
    assert abs(pages[1] - pages[0]) < 50_000
    for _, tables in (few, many):
        for spec in TABLE_GROUPS["figures"]:
            del tables[spec.name]
    assert len(text_of(*many)) == len(text_of(*few))
    reports = [json.loads(report_to_json(*report)) for report in (few, many)]
    lengths = [{name: len(rows) for name, rows in report["tables"].items()} for report in reports]
    assert lengths[0] == lengths[1]
    sizes = [len(report_to_json(*report)) for report in (few, many)]
    assert sizes[1] < 1.1 * sizes[0]
    assert sizes[1] < 0.1 * len(report_to_json(*many, per_rank=True))


def test_an_odd_rank_is_named(odd: tuple[Run, NamedTables]) -> None:
    run, tables = odd
    rows = {row["rank"]: row for row in json.loads(report_to_json(run, tables))["tables"]["ranks"]}
    assert {rank: (row["alike"], row["calls"]) for rank, row in rows.items()} == {
        "0-16,18-39": (39, STEPS),
        str(ODD): (1, 2 * STEPS),
    }
    lines = text_of(run, tables)
    begin = lines.index("Load balance across ranks")
    assert [line.split()[0] for line in lines[begin + 2 : begin + 4]] == ["0-16,18-39", str(ODD)]


def test_per_rank_shows_every_rank(odd: tuple[Run, NamedTables], capsys: pytest.CaptureFixture[str]) -> None:
    run = odd[0]
    assert main(["report", str(run.log.path), "--json", "--per-rank"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in document["tables"]["ranks"]] == [*range(40)]
    assert not any("alike" in columns for columns in document["columns"].values())
    assert main(["report", str(run.log.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["tables"]["ranks"]) == 2
    for name, rows in document["tables"].items():
        assert all([*row] == [*document["columns"][name]] for row in rows)


def balance(values: dict[str, Any]) -> pd.DataFrame:
    """Return a table `ranks` with these columns, and 0 in the others."""
    count = len(next(iter(values.values())))
    table = pd.DataFrame(dict.fromkeys(TABLES["ranks"].column_names, 0), index=range(count))
    return table.assign(rank=range(count), **values)


def test_few_ranks_keep_their_rows() -> None:
    table = balance({"calls": np.arange(32) % 2})
    assert reduce_ranks(TABLES["ranks"], table).equals(table)
    assert len(reduce_ranks(TABLES["ranks"], balance({"calls": np.arange(33) % 2}))) == 2


def test_measured_values_become_a_distribution() -> None:
    factors = np.linspace(0.95, 1.05, 101)
    reduced = reduce_ranks(TABLES["ranks"], balance({"payload_of_median": factors}))
    assert reduced[["rank", "alike"]].to_numpy().tolist() == [["0-100", 101]]
    assert reduced["payload_of_median"].tolist() == [Distribution(101, 0.95, "0", factors[50], 1.05, "100")]


def test_outliers_have_rows_of_their_own() -> None:
    factors = np.linspace(0.95, 1.05, 100)
    factors[[3, 60]] = 4, 5
    reduced = reduce_ranks(TABLES["ranks"], balance({"payload_of_median": factors})).set_index("rank")
    assert reduced["alike"].to_dict() == {"0-2,4-59,61-99": 98, "3": 1, "60": 1}
    assert reduced.loc["3", "payload_of_median"] == 4


def test_many_different_values_do_not_make_many_rows() -> None:
    sizes = np.random.default_rng(0).permutation(1000) + 5000
    pids = pd.DataFrame({"pid": range(1000)})
    reduced = reduce_ranks(TABLES["ranks"], balance({"payload_bytes": sizes, "calls": np.arange(1000) // 500}))
    assert [*reduced["alike"]] == [500, 500]
    assert [cell.lowest for cell in reduced["payload_bytes"]] == [sizes[:500].min(), sizes[500:].min()]
    processes = pd.DataFrame(columns=TABLES["processes"].column_names, index=range(1000))
    processes = processes.assign(
        rank=range(1000), host="a", pid=pids["pid"], first_error=pids["pid"].map("error {}".format)
    )
    reduced = reduce_ranks(TABLES["processes"], processes)
    assert reduced["pid"].tolist() == reduced["first_error"].tolist() == [Different(1000)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=33, max_size=120))
def test_reduced_rows_cover_each_rank_once(values: list[tuple[int, int]]) -> None:
    calls, ratios = zip(*values, strict=True)
    table = balance({"calls": calls, "payload_of_median": np.array(ratios, float)})
    reduced = reduce_ranks(TABLES["ranks"], table)
    if "alike" not in reduced:
        return
    assert len(reduced) <= MAX_CLASSES + MAX_OUTLIERS
    assert reduced["alike"].sum() == len(table)
    for row in reduced.to_dict("records"):
        assert len(row["rank"]) < 100
        if "..." in row["rank"]:
            continue
        members = table.loc[table["rank"].isin(parse_ranks(row["rank"]))]
        assert len(members) == row["alike"]
        cell = row["calls"]
        if isinstance(cell, Distribution):
            assert (cell.lowest, cell.highest) == (members["calls"].min(), members["calls"].max())
            assert cell.median == sorted(members["calls"])[(len(members) - 1) // 2]
        else:
            assert set(members["calls"]) == {cell}


def test_text_rows_name_the_statistics() -> None:
    factors = np.linspace(0.95, 1.05, 101)
    spec = TABLES["ranks"]
    table = reduce_ranks(spec, balance({"payload_of_median": factors}))
    columns, rows = text_rows(spec, "terminal", table)
    assert [row[0] for row in rows] == [
        "0-100 (101 ranks)",
        "  lowest",
        "    on rank",
        "  median",
        "  highest",
        "    on rank",
    ]
    assert [row[-1] for row in rows] == ["", "0.95", "0", "1.00", "1.05", "100"]
    assert all(len(row) == len(columns) for row in rows)


def test_messages_of_stuck_groups_are_merged() -> None:
    stuck = pd.DataFrame(
        {
            "op": "all_reduce",
            "group_ranks": [f"{8 * group}-{8 * group + 7}" for group in range(50)],
            "waiting_ranks": [f"{8 * group}-{8 * group + 6}" for group in range(50)],
            "absent_ranks": [f"{8 * group + 7}" for group in range(50)],
        },
    ).reindex(columns=TABLES["stuck_calls"].column_names)
    reduced = reduce_ranks(TABLES["stuck_calls"], stuck)
    assert reduced[["group_ranks", "alike", "absent_ranks"]].to_numpy().tolist() == [["0-399", 400, "7-399:8"]]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(10_000), "0-9999"),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 8], "0,8"),
        (range(0, 1000, 8), "0-992:8"),
        ([0, 1, 2, 10, 20, 30, 31], "0-2,10-30:10,31"),
        ([rank * rank for rank in range(100)], "0-1,4,9,...,9801 (100 in all)"),
        (["a", "b"], "a,b"),
    ],
)
def test_names_are_short(ranks: Any, text: str) -> None:
    assert shorten_names([*ranks]) == text


def test_lists_of_32_ranks_are_not_shortened() -> None:
    text = ",".join(map(str, range(0, 32, 2)))
    assert shorten_rank_list(text) == text
    assert shorten_rank_list(",".join(map(str, range(0, 34, 2)))) == "0-32:2"


@given(st.sets(st.integers(0, 60)))
def test_short_names_are_parsed(ranks: set[int]) -> None:
    assert parse_ranks(shorten_names(sorted(ranks), most=100)) == sorted(ranks)


def test_notes_of_many_ranks_are_one() -> None:
    def cut(rank: int) -> Note:
        path = Path(f"/log/run/node{rank // 8}/rank{rank:05d}-{100 + rank}.00000.npy")
        what = Statement("cut after {:,} of {:,} bytes", 1_000 + rank, 9_000)
        return Note("cut", path, what, "the rest is missing", rank)

    other = Note("foreign", Path("/log/run/other"), "not of this run", "left out")
    salvaged = [
        recovery_note(Path("/log"), Recovery(Path("/dev/shm/ring"), f"rank{rank:05d}-{rank}", "node7", rank))
        for rank in range(1000)
    ]
    assert str(salvaged[7]) == ("/log: rank00007-7 on node7: 7 records of a process that ended early were recovered")
    few = [cut(40), other, *map(cut, range(31))]
    assert merge_notes(few) == few
    many = merge_notes([*map(cut, range(1000)), other, *salvaged])
    assert [*map(str, many)] == [
        "/log/run: 1,000 notes on rank 0-999: cut after N of 9,000 bytes; the rest is missing",
        "/log/run/other: not of this run; left out",
        "/log: 1,000 notes on rank 0-999: N records of a process that ended early were recovered",
    ]


@pytest.mark.long
def test_a_damaged_log_of_many_ranks_has_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, 40)
    for rank, path in enumerate(sorted(tmp_path.rglob("*.jsonl"))):
        path.write_bytes(path.read_bytes()[: -20 - rank])
    assert main(["check", str(tmp_path)]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["check", str(tmp_path), "--per-rank"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 40
    assert main(["report", str(tmp_path), "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert len(tables["notes"]) == 1
    assert tables["coverage"][0]["files_cut"] == 40
    lines = text_of(run := open_run(tmp_path), run.tables())
    assert sum("0-39" in line for line in lines[lines.index("Notes on the log") :]) == 1


def test_losses_of_many_ranks_are_few_sentences() -> None:
    losses = [(rank, Statement("{} of {} were not recorded", rank + 1, Quantity(90, "call"))) for rank in range(40)]
    assert describe_losses(losses) == ["rank 0-39: N of 90 calls were not recorded"]
    assert describe_losses([(rank, "hooks failed 1 time") for rank in range(40)]) == ["rank 0-39: hooks failed 1 time"]
    assert len(describe_losses(losses, per_rank=True)) == len(describe_losses(losses[:32]) + losses[32:]) == 40


def test_long_lists_of_ranks_in_sentences_are_shortened() -> None:
    ranks = [rank * rank for rank in range(2, 40)]
    text = of_ranks(ranks, "equal calls 1,3,5")
    assert text == f"rank {','.join(map(str, ranks))}: equal calls 1,3,5"
    assert shortened(text) == "rank 4,9,16,...,1521 (38 in all): equal calls 1,3,5"
    assert shows_all_ranks(range(32), per_rank=False)
    assert shows_all_ranks(range(33), per_rank=True)
    assert not shows_all_ranks(range(33), per_rank=False)


def test_a_heat_map_of_many_ranks_and_steps_is_bounded_and_names_the_latest() -> None:
    ranks, steps = 1000, 400
    delay = np.zeros((ranks, steps), int)
    delay[ODD, 123] = 7_000_000
    table = pd.DataFrame(
        {
            "rank": np.repeat(np.arange(ranks), steps),
            "step": np.tile(np.arange(steps), ranks),
            "delay_ns": delay.ravel(),
        }
    )
    (heat,) = delays(table).data
    assert heat.z.shape == (48, 160)
    assert np.argwhere(heat.z > 0).tolist() == [[0, 41]]
    assert heat.text[0][41].endswith("up to 7.00 ms longer than the median of the others (rank 17, step 123)")
    (heat,) = delays(table.loc[table["rank"] < 32]).data
    assert heat.z.shape == (32, steps)
    assert not delays(table.head(0)).data[0].z.size
