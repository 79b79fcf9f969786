"""Traces of `traced_calls.py` under each minor version of torch: the calls that an import finds are those it made.

`tests/support/recorded/torch_traces.zip` has a folder per version, in which that program wrote its files.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pytest

import commtrace
from commtrace.importing.import_run import import_files

RECORDED: Final = zipfile.ZipFile(Path(__file__).parents[2] / "support/recorded/torch_traces.zip")
VERSIONS: Final = [f"2.{minor}" for minor in range(4, 16)]

ONE_SIDE: Final = {("gather", 1), ("scatter", 0)}
"""Operations whose payload the ranks without the list of all parts do not state."""
LISTS: Final = {(op, rank) for op in ("all_reduce", "all_gather", "gather", "scatter") for rank in range(2)}
SOURCES: Final = {
    "execution trace": (".et.json.gz",),
    "trace": (".json.gz",),
    "trace, completed": (".json.gz", ".et.json.gz"),
}


def made(version: str, rank: int) -> list[list[Any]]:
    """Return the calls of a rank: step, operation, ranks of the group, payload, peer."""
    calls: list[list[Any]] = json.loads(RECORDED.read(f"{version}/rank{rank}.calls.json"))
    return calls


def imported(version: str, endings: tuple[str, ...], folder: Path) -> commtrace.Run:
    """Import the files of both ranks with these endings."""
    files = [folder / f"rank{rank}{ending}" for rank in range(2) for ending in endings]
    for file in files:
        file.write_bytes(RECORDED.read(f"{version}/{file.name}"))
    import_files(files, folder / "log")
    return commtrace.open(folder / "log")


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_calls_are_those_of_the_program(version: str, source: str, tmp_path: Path) -> None:
    run = imported(version, SOURCES[source], tmp_path)
    for rank in range(2):
        calls, found = made(version, rank), run.events(ranks=[rank])
        assert found["step"].tolist() == [step for step, *_ in calls]
        assert found["op"].tolist() == [op for _, op, *_ in calls]
        sizes = found["payload_bytes"].tolist()
        known = [payload for (*_, payload, _), size in zip(calls, sizes, strict=True) if not pd.isna(size)]
        assert known == found["payload_bytes"].dropna().tolist()
        missing = {(op, rank) for (_, op, *_), size in zip(calls, sizes, strict=True) if pd.isna(size)}
        assert missing <= (LISTS if source == "trace" else ONE_SIDE)
        # Three groups, of which gloo's calls state none.
        assert {*found["group"]} == {"unknown"}
        has_times = source != "execution trace"
        assert found["t_begin_ns"].gt(0).tolist() == [has_times] * len(calls)
        assert not has_times or found["t_begin_ns"].is_monotonic_increasing
        assert found["t_return_ns"].ge(found["t_begin_ns"]).all()
