"""docs/reference/log-format.md is complete and correct: its code runs unmodified on the log of a real program."""

from __future__ import annotations

import functools
import operator
import re
import sys
from pathlib import Path
from typing import Any

import damaged_logs
import numpy as np
import pytest
from processes import ROOT
from ranks import Nursery

from commtrace import schema
from commtrace.rank_ranges import format_rank_list
from commtrace.schema import RECORD
from commtrace.summary_format import TABLES

PAGE = (ROOT / "docs" / "reference" / "log-format.md").read_text()


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return the names that the page's Python code defines by itself."""
    defined: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "log-format.md", "exec"), defined)
    return defined


@pytest.fixture(scope="module")
def log(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a training on two ranks."""
    directory = tmp_path_factory.mktemp("format") / "log"
    statuses, outputs = nursery.run("training", directory, 30, segment_min_bytes=4096)
    assert statuses == [0, 0], outputs
    return directory


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table whose header begins with `heading`, without the header."""
    match = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[- |]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert match, heading
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in match[1].splitlines()]


def test_the_code_reads_a_log(page: dict[str, Any], log: Path) -> None:
    tables_files = sorted(log.glob("*/*/*.jsonl"))
    assert len(tables_files) == 2
    for path in tables_files:
        tables, records = page["read_process"](path)
        assert tables["process"][0]["format"] == "commtrace"
        assert len(records) == tables["stats"][-1]["calls"] == 61
        assert len({name.name.split(".")[1] for name in path.parent.glob(path.stem + ".*.npy")}) > 1
        assert page["bytes_by_operation"](tables, records) == {"all_reduce": 30 * (32 + 4), "barrier": 0}
        assert tables["process"][0]["version"] == schema.VERSION
        assert [(row["ranks"], page["members"](row)) for row in tables["groups"]] == [("0-1", [0, 1])]


@pytest.mark.parametrize(
    "ranks", [[0, 1], [7], [*range(0, 10_000, 8)], [8, 0, 1, 2, 3, 100, 116, 132, 5], [3, 2, 1, 0]], ids=str
)
def test_the_code_reads_members(page: dict[str, Any], ranks: list[int]) -> None:
    assert page["members"]({"ranks": format_rank_list(ranks)}) == ranks
    assert page["members"]({"ranks": ranks}) == ranks  # version 1


def test_the_code_reads_a_log_of_version_1(page: dict[str, Any], tmp_path: Path) -> None:
    damaged_logs.unpack(tmp_path)
    for path in sorted((tmp_path / "ddp").rglob("*.jsonl")):
        tables, records = page["read_process"](path)
        assert tables["process"][0]["version"] == 1
        assert [0, 1] in [page["members"](row) for row in tables["groups"]]
        assert page["bytes_by_operation"](tables, records)["all_reduce"] > 0


def test_the_code_reads_an_open_segment(page: dict[str, Any], log: Path, tmp_path: Path) -> None:
    from commtrace.recording.segment_writer import WrittenSegment

    segment = WrittenSegment(tmp_path / "x.00000.npy")
    segment.append(np.ones(3, RECORD))
    path = tmp_path / "x.00000.npy.open"
    path.write_bytes(path.read_bytes()[:-1])
    assert page["read_segment"](path).tolist() == np.ones(2, RECORD).tolist()


def test_the_code_survives_a_cut_line(page: dict[str, Any], log: Path, tmp_path: Path) -> None:
    first = next(iter(sorted(log.glob("*/*/*.jsonl"))))
    for path in first.parent.glob(first.stem + "*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    complete, _ = page["read_process"](first)
    cut = tmp_path / first.name
    cut.write_bytes(cut.read_bytes()[:-10])
    tables, _ = page["read_process"](cut)
    assert "end" in complete
    assert {**tables, "end": complete["end"]} == complete


def test_the_fields_of_a_record() -> None:
    fields = [(name.strip("`"), type_) for name, type_, _ in table("field")]
    assert fields == [(name, RECORD[name].str.lstrip("<|")) for name in RECORD.names or ()]
    assert f"a record of {RECORD.itemsize} bytes" in " ".join(PAGE.split())


def test_states_clocks_phases_and_flags() -> None:
    meanings = {name.strip("`"): meaning for name, _, meaning in table("field")}

    def numbers(field: str) -> list[int]:
        return [int(number) for number in re.findall(r"\b(\d+) [a-z]", meanings[field].partition(";")[0])]

    assert re.findall(r"(\d+) (\w+)", meanings["state"]) == [
        (str(int(state)), state.name.lower()) for state in schema.State if state
    ]
    assert re.findall(r"(\d+) (\w+)", meanings["phase"]) == [
        (str(int(phase)), phase.name.lower()) for phase in schema.Phase
    ]
    assert re.findall(r"(\d+) (\w+)", meanings["flags"]) == [
        (str(int(flag)), str(flag.name).lower()) for flag in schema.Flag
    ]
    assert numbers("clock") == [int(clock) for clock in schema.Clock]


def test_the_names_of_files(log: Path) -> None:
    shown = re.findall(r"^ +(rank\d\S+)", PAGE, re.MULTILINE)
    pattern = r"rank\d{5}-\d+\.(jsonl|\d{5}\.npy(\.open)?|salvaged\.npy)"
    kept = r"rank\d{5}-\d+-(kept(-\d)?|device|cells)\.npy"
    assert len(shown) == 8
    assert all(re.fullmatch(f"{pattern}|{kept}", name) for name in shown)
    for path in log.glob("*/*/*"):
        assert re.fullmatch(pattern, path.name)
    (run,) = log.iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", run.name)


def test_the_tables_and_their_keys(page: dict[str, Any], log: Path) -> None:
    """The page describes each table that a program wrote, with exactly the keys that its rows have."""
    described = {name.strip("`"): keys for name, keys in table("`table`")}
    tables = functools.reduce(operator.or_, (page["read_process"](path)[0] for path in log.glob("*/*/*.jsonl")))
    always = {"process", "setup", "kinds", "groups", "sites", "stats", "clock", "leaving", "end"}
    assert set(tables) == always | set(tables) & {"roles"}
    ends = {"thread_exceptions", "peer_ends"}
    dry_run_tables = {"notices", "writes", "flops", "topology", "stands_for"}
    others = {"roles", "message_roles", "dimensions", "job", "passes", "stages", "experts", "routing"}
    others |= {"salvage", "stacks"}
    assert set(tables) | others | ends | dry_run_tables == set(described)
    for name, rows in tables.items():
        keys = set(re.findall(r"`([a-z_0-9]+)`", re.sub(r"\([^)]*\)", "", described[name])))
        assert keys == set(rows[0]) if name != "setup" else keys > set(rows[0]), name


def test_the_fields_of_summaries() -> None:
    """Each field of a row is on the page."""
    described = {name.strip("`-").removesuffix(".npy"): text for name, text in table("file")}
    assert {*described} == {*TABLES}
    for name, dtype in TABLES.items():
        assert {*(dtype.names or ())} <= {*re.findall(r"`([a-z_]+)`", described[name])}, name


def test_a_reader_needs_numpy_and_the_standard_library_only() -> None:
    imported = re.findall(
        r"^(?:import|from) (\w+)", "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), re.M
    )
    assert set(imported) <= {"numpy"} | set(sys.stdlib_module_names)
