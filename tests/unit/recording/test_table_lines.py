"""Tables: rows that records refer to by id."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from commtrace.recording import ring
from commtrace.recording.ring import Ring
from commtrace.recording.table_lines import TableLines


@pytest.fixture
def memory(tmp_path: Path) -> Ring:
    return ring.make_ring(16, str(tmp_path), "1-2-3", {"stem": "x"})


def rows(tables: TableLines) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tables.lines]


def test_rows_are_numbered_from_one_in_each_table(memory: Ring) -> None:
    tables = TableLines(memory)
    assert [tables.new("groups", {"name": name}) for name in "ab"] == [1, 2]
    assert tables.row_id("sites", "key", lambda: {"file": "f"}) == 1
    tables.add("clock", mono_ns=5)
    assert rows(tables) == [
        {"table": "groups", "id": 1, "name": "a"},
        {"table": "groups", "id": 2, "name": "b"},
        {"table": "sites", "id": 1, "file": "f"},
        {"table": "clock", "mono_ns": 5},
    ]


def test_the_same_key_is_the_same_row(memory: Ring) -> None:
    tables = TableLines(memory)
    created: list[int] = []
    for key in ("a", "b", "a", ("a", 1), "b"):
        tables.row_id("kinds", key, lambda: created.append(1) or {})  # type: ignore[func-returns-value]
    assert len(created) == len(tables.lines) == 3
    assert tables.row_id("sites", "a", dict) == 1, "keys are of one table"


def test_a_copy_lies_beside_the_ring(memory: Ring) -> None:
    tables = TableLines(memory)
    for number in range(5):
        tables.add("sites", id=number, file="ü\n")
    assert memory.path is not None
    assert memory.path.with_suffix(".jsonl").read_bytes() == b"".join(tables.lines)
    assert all(line.count(b"\n") == 1 for line in tables.lines)


def test_what_json_does_not_know_is_written_as_text(memory: Ring) -> None:
    tables = TableLines(memory)
    tables.add("job", path=Path("/a"), kinds={1})
    assert rows(tables) == [{"table": "job", "path": "/a", "kinds": "{1}"}]


def test_threads_get_one_number_for_one_key(memory: Ring) -> None:
    tables = TableLines(memory)
    numbers: list[list[int]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def add(thread_numbers: list[int]) -> None:
        start.wait()
        thread_numbers.extend(tables.row_id("sites", key, dict) for key in range(300))

    threads = [threading.Thread(target=add, args=(thread_numbers,)) for thread_numbers in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(thread_numbers == numbers[0] for thread_numbers in numbers)
    assert sorted(numbers[0]) == list(range(1, 301))
    assert sorted(row["id"] for row in rows(tables)) == list(range(1, 301))


def test_a_row_that_adds_rows(memory: Ring) -> None:
    """A signal handler that communicates may add a row while another row is being made."""
    tables = TableLines(memory)
    assert tables.row_id("sites", "outer", lambda: {"inner": tables.row_id("sites", "inner", dict)}) == 2
    assert rows(tables) == [{"table": "sites", "id": 1}, {"table": "sites", "id": 2, "inner": 1}]
