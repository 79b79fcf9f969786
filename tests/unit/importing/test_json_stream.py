"""Streaming of JSON: every cut of the file into pieces gives the same items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commtrace.importing import json_stream
from commtrace.importing.json_stream import JsonArray

ITEMS: list[Any] = [
    {"a": 1, "nested": [{"x": 1}, {"y": "}, {"}]},
    {"b": '"traceEvents": [', "c": {"d": [1, 2, {"e": "]"}]}},
    {"f": '\\" }, {'},
    {"g": float("nan"), "h": "\t"},
]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 50, 1 << 20])
@pytest.mark.parametrize("after", ["", ', "after": {"k": [{"l": 1}, {"m": 2}]}'])
def test_pieces_of_any_size_give_the_same_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, after: str
) -> None:
    monkeypatch.setattr(json_stream, "_PIECE", piece)
    path = tmp_path / "a.json"
    text = f'{{"before": [{{"traceEvents": [1]}}, {{}}], "traceEvents" : {json.dumps(ITEMS)}{after}}}'
    path.write_text(text)
    array = JsonArray(path, "traceEvents")
    items = [item for batch in array.batches() for item in batch]
    assert json.dumps(items) == json.dumps(ITEMS)
    assert array.problem == ""
    assert array.members["before"] == [{"traceEvents": [1]}, {}]
    assert ("after" in array.members) == bool(after)


@pytest.mark.parametrize("cut", range(30, 150, 7))
def test_a_cut_file_gives_the_items_before_the_cut(tmp_path: Path, cut: int) -> None:
    items = [{"n": number, "x": [{}]} for number in range(10)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"traceEvents": items})[:cut])
    array = JsonArray(path, "traceEvents")
    read = [item for batch in array.batches() for item in batch]
    assert read == items[: len(read)]
    assert len(read) >= (cut - 17) // 24 - 1
    assert "byte" in array.problem
