"""The files of one process: their creation, the order of writes, and errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commtrace.errors import warn
from commtrace.recording import log_writer
from commtrace.recording.log_writer import LogWriter
from commtrace.recording.segment_writer import EMPTY, unlinked
from commtrace.schema import RECORD, Records
from commtrace.settings import Settings

LINES = [b'{"table": "process"}\n', b'{"table": "kinds", "id": 1}\n']


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "run" / "host", "rank00000-7", Settings(str(tmp_path)))


def make_records(count: int) -> Records:
    return np.ones(count, RECORD)


def test_nothing_is_made_before_it_is_written(writer: LogWriter, tmp_path: Path) -> None:
    assert list(tmp_path.iterdir()) == []
    assert writer.write(LINES, make_records(3)) == 3
    assert sorted(path.name for path in writer.directory.iterdir()) == [
        "rank00000-7.00000.npy.open",
        "rank00000-7.jsonl",
    ]
    assert writer.unwritten([*LINES, b"more\n"]) == 1
    writer.finish([*LINES, b"more\n"])
    assert (writer.directory / "rank00000-7.jsonl").read_bytes() == b"".join(LINES) + b"more\n"
    assert len(np.load(writer.directory / "rank00000-7.00000.npy")) == 3


def test_a_row_is_on_disk_before_the_records_that_refer_to_it(
    writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_writer, "write_all", no_room)
    assert writer.write(LINES, make_records(3)) == 0
    assert sorted(path.name for path in writer.directory.iterdir()) == ["rank00000-7.jsonl"]


def test_after_an_error_the_store_is_left_in_peace_for_a_while(
    writer: LogWriter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        assert writer.write(LINES, make_records(3)) == 0
        assert not writer.ready
        assert writer.write(LINES, make_records(3)) == 0
        assert writer.errors == 1, "it was tried again at once"
        writer.retry()
        assert writer.write(LINES, make_records(3)) == 0
        assert writer.errors == 2
    assert capfd.readouterr().err.count("cannot write the log: Permission denied (/somewhere)") == 1
    assert writer.write(LINES, make_records(3)) == 0
    writer.retry()
    assert writer.write(LINES, make_records(3)) == 3
    assert writer.last_error == "Permission denied (/somewhere)"


def test_files_are_looked_after_from_time_to_time_only(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """On shared storage, each check is a request to a server."""
    checks: list[int] = []
    original = unlinked
    monkeypatch.setattr(log_writer, "unlinked", lambda fd: checks.append(fd) or original(fd))  # type: ignore[func-returns-value]
    for count in range(1, 50):
        assert writer.write(LINES * count, make_records(1)) == 1
    assert len(checks) <= 2


def test_a_handle_that_its_server_has_forgotten(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "CHECK_SECONDS", 0.0)
    writer.write(LINES, make_records(3))
    for path in writer.directory.iterdir():
        path.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale_once())
        assert writer.write(LINES, EMPTY) == 0
    writer.retry()
    assert writer.write(LINES, make_records(2)) == 2
    assert writer.lost == 3
    writer.finish(LINES)
    assert (writer.directory / "rank00000-7.jsonl").read_bytes() == b"".join(LINES)


def stale_once() -> Callable[[int], os.stat_result]:
    calls: list[int] = []
    original = os.fstat

    def fstat(fd: int) -> os.stat_result:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return original(fd)

    return fstat


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    new_names: list[str] = []
    for _ in range(3):
        writer = LogWriter(tmp_path, "rank00000-7", Settings(str(tmp_path)), on_rename=new_names.append)
        writer.write(LINES, make_records(1))
        writer.finish(LINES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank00000-2-7.00000.npy",
        "rank00000-2-7.jsonl",
        "rank00000-3-7.00000.npy",
        "rank00000-3-7.jsonl",
        "rank00000-7.00000.npy",
        "rank00000-7.jsonl",
    ]
    assert new_names == ["rank00000-2-7", "rank00000-2-7", "rank00000-3-7"]


def test_a_line_is_said_to_whoever_listens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class Own:
        def write(self, text: str) -> None:
            raise RuntimeError("a stream of the program")

    warn("hello")
    assert capfd.readouterr() == ("", "commtrace: hello\n")
    for stream in (None, Own()):
        monkeypatch.setattr("sys.stderr", stream)
        warn("nobody")
