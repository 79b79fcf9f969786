"""Damaged files of every format: an import ends with a log that can be reported, or with an error that names the file.

Bytes of a good file are changed, removed, repeated or moved at random, and values of its JSON or pickle are replaced by
others: of another type, huge, nested deeply, objects with code. The default seed is fixed.

    MUTATIONS=125000 pytest -m "" tests/unit/importing/test_mutations.py -k damaged
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from execution_traces import FLAT, ExecutionTraceFactory
from inspector_files import InspectorFile
from kineto_traces import KinetoFactory
from mpip_reports import mpip_report

import commtrace
from commtrace.errors import ImportFileError
from commtrace.importing.formats import FORMATS, format_named
from commtrace.importing.import_run import import_files

SEED = int(os.environ.get("MUTATION_SEED", "7"))
MUTATIONS = int(os.environ.get("MUTATIONS", "1000"))
VALUES = (b"-1", b"1e999", b"null", b"[]", b"{}", b'"x"', b"9" * 30, b"NaN", b"\n")
_SECONDS = 120.0
_LARGEST_GROWTH = 500 << 20


def _flight_recorder() -> dict[str, Any]:
    entry = {
        "record_id": 1, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 1_700_000_000_000_000_000, "state": "completed",
        "time_discovered_completed_ns": 1_700_000_000_000_500_000, "input_sizes": [[10, 10]], "frames": [],
        "input_dtypes": ["Float"], "output_sizes": [[10, 10]], "output_dtypes": ["Float"],
    }  # fmt: skip
    return {"version": "2.10", "pg_config": {"0": {"name": "0", "ranks": "[0, 1]"}}, "entries": [entry] * 5}


def _inspector(*, version: str, verbose: bool) -> bytes:
    file = InspectorFile(0, version=version, verbose=verbose)
    for at in range(5):
        file.call(at=at * 1000).call("AllGather", at=at * 1000 + 300).message("Send", 1, at=at * 1000 + 600)
    return file.stats(3).text().encode()


_HEADS = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg")
_CELLS = ("", "2.0 KB", "146", "11.12", "0.08", "0.43", "0.41")
_TABLE = "\n".join(
    ["".join(f"{text: <20}" for text in _HEADS), "broadcast", "".join(f"{text: <20}" for text in _CELLS)]
)
_LATENCIES = [1.0, 2.5, 4.0, 7.5, 8.0, 9.5, 11.0, 12.0]
_RAW = {"all_reduce": {"4096": [8, _LATENCIES, [1 / ms for ms in _LATENCIES], []], "64": [1, [0.5], [1.0], []]}}

GOOD = {
    "kineto": {"trace.json": KinetoFactory().step(0, 0, 900).call(100, kernels=((200, 30),)).call(300).text().encode()},
    "execution-trace": {
        "rank1.json": ExecutionTraceFactory(rank=1).all_reduce(10).all_gather_of_lists(3).text().encode(),
        "flat.json": ExecutionTraceFactory(FLAT).all_reduce(4).text().encode(),
    },
    "flight-recorder": {
        "dump_0.json": json.dumps(_flight_recorder()).encode(),
        "dump_0": pickle.dumps(_flight_recorder()),
    },
    "nccl-inspector": {
        "plain.log": _inspector(version="v4.2", verbose=False),
        "verbose.log": _inspector(version="v4.3", verbose=True),
    },
    "mpip": {"a.mpiP": mpip_report([("Allreduce", 1, 0, 10, (8, 8, 80)), ("Isend", 2, 1, 3, (9, 1, 12))]).encode()},
    "deepspeed-comms": {"out.txt": f"{_TABLE}\n{_TABLE}\n".encode(), "raw.json": json.dumps(_RAW).encode()},
}
FILES = [(format_name, name) for format_name, files in GOOD.items() for name in files]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return a damaged copy: one to four changes of bytes, numbers or pieces."""
    content = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content)) if content else 0
        end = min(len(content), at + draw.choice((1, 3, 40, 400)))
        match draw.randrange(6):
            case 0:
                content[at:end] = bytes(draw.randrange(256) for _ in range(end - at))
            case 1:
                del content[at:end]
            case 2:
                content[at:at] = content[at:end] * draw.choice((1, 50))
            case 3:
                del content[at:]
            case 4:
                content[at:end] = draw.choice(VALUES)
            case _:
                other = draw.randrange(len(content)) if content else 0
                content[at:at] = content[other : other + 100]
    return bytes(content)


class _Code:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("commtrace-ran-code-of-a-pickle",)


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def _shared(times: int) -> Any:
    """Return lists that a pickle keeps in few bytes, and that have 2**times items as text."""
    value: Any = []
    for _ in range(times):
        value = [value, value]
    return value


_HOSTILE: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: -1, lambda: 1 << 62, lambda: 10**40, lambda: 1e308, lambda: float("nan"),
    lambda: float("-inf"), lambda: "", lambda: "x" * 10_000, lambda: "\0\ud800", list, dict, lambda: [[]] * 1000,
    lambda: [1 << 40] * 100, lambda: {"": ""}, lambda: _nested(200), lambda: "[0, 1" * 50, lambda: "../../x",
)  # fmt: skip


def _replaced(value: Any, draw: random.Random, hostile: tuple[Callable[[], Any], ...]) -> Any:
    """Return a document with one of its values, at any depth, replaced by a hostile one."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.1:
        return draw.choice(hostile)()
    copy = value.copy()
    at = draw.choice([*value]) if isinstance(value, dict) else draw.randrange(len(value))
    copy[at] = _replaced(value[at], draw, hostile)
    return copy


def with_hostile_values(data: bytes, draw: random.Random) -> bytes:
    """Return a copy of a JSON, JSON-lines or pickle file with one to three hostile values; other files as they are."""
    times = draw.randint(1, 3)
    if data[:1] == b"\x80":
        document = pickle.loads(data)
        for _ in range(times):
            document = _replaced(document, draw, (*_HOSTILE, _Code, lambda: _shared(60)))
        return pickle.dumps(document)
    if data[:1] not in b"{[":
        return data
    documents = [json.loads(data)] if data.count(b"\n{") == 0 else [json.loads(line) for line in data.splitlines()]
    for _ in range(times):
        at = draw.randrange(len(documents))
        documents[at] = _replaced(documents[at], draw, _HOSTILE)
    return "\n".join(json.dumps(document) for document in documents).encode()


def refusal(path: Path, out: Path, format_name: str) -> str:
    """Import a file; return the message of the error, or "" if it was imported."""
    try:
        import_files([path], out, format_named(format_name))
    except ImportFileError as error:
        return str(error)
    return ""


def test_every_format_is_mutated() -> None:
    assert GOOD.keys() == {known.name for known in FORMATS}


@pytest.mark.parametrize(("format_name", "name"), FILES)
def test_good_files_are_imported(format_name: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(GOOD[format_name][name])
    assert import_files([path], tmp_path / "log").calls > 0


def test_files_of_two_formats_are_not_counted_twice(tmp_path: Path) -> None:
    """A profiler's trace and a flight recorder's dump in one folder may be of the same calls."""
    folder = tmp_path / "traces"
    folder.mkdir()
    names = {format_name: next(iter(GOOD[format_name])) for format_name in ("kineto", "flight-recorder")}
    for format_name, name in names.items():
        (folder / name).write_bytes(GOOD[format_name][name])
    with pytest.raises(ImportFileError, match=r"several formats.*; import those of one with --format"):
        import_files([folder], tmp_path / "both")
    for format_name, name in names.items():
        alone = import_files([folder / name], tmp_path / f"{format_name} alone").calls
        assert import_files([folder], tmp_path / format_name, format_named(format_name)).calls == alone


def test_an_archive_beside_the_files_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "trace.json").write_bytes(GOOD["kineto"]["trace.json"])
    with tarfile.open(folder / "all.tar.gz", "w:gz") as archive:
        archive.add(folder / "trace.json")
    assert import_files([folder], tmp_path / "log").calls == 2
    with pytest.raises(ImportFileError, match=r"all\.tar\.gz: its format is not known"):
        import_files([folder / "all.tar.gz"], tmp_path / "archive")


@pytest.mark.parametrize(
    ("draws", "reads"),
    [(20, 2), pytest.param(MUTATIONS, 100, marks=[pytest.mark.exhaustive, pytest.mark.timeout(30_000)])],
)
@pytest.mark.parametrize(("format_name", "name"), FILES)
def test_damaged_files_are_refused_or_imported_in_part(
    format_name: str, name: str, draws: int, reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the imported logs, the given number is read: that takes a hundred times as long as the import."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(f"{SEED} {name}")
    path, out = tmp_path / name, tmp_path / "log"
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(draws):
        good = GOOD[format_name][name]
        path.write_bytes(mutated(good, draw) if draw.random() < 0.5 else with_hostile_values(good, draw))
        began = time.monotonic()
        error = refusal(path, out, format_name)
        if error:
            assert name in error, number
            continue
        if number % max(1, draws // reads) == 0:
            assert commtrace.open(out).table("coverage")["records"].iloc[0] > 0, number
        shutil.rmtree(out)
        assert time.monotonic() - began < _SECONDS
    assert {entry.name for entry in tmp_path.iterdir()} <= {name, "log"}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) << 10 < _LARGEST_GROWTH
