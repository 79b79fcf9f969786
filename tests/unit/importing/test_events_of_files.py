"""Files that worker processes read: the log is the same, and errors are as clear."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from kineto_traces import KinetoFactory

from commtrace.errors import CommtraceError, ImportFileError
from commtrace.importing import events_of_files
from commtrace.importing.events import Event
from commtrace.importing.import_run import import_files
from commtrace.reading import executors


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let worker processes read every import. Returns the number of files of each import that they read."""
    started: list[int] = []

    def pool(tasks: int, files: Iterable[Path]) -> AbstractContextManager[futures.ProcessPoolExecutor | None]:
        started.append(tasks)
        return executors.worker_pool(tasks, files)

    monkeypatch.setattr(events_of_files, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr(events_of_files, "worker_pool", pool)
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    monkeypatch.setattr(executors, "_process_context", lambda: multiprocessing.get_context("fork"))
    return started


def traces(folder: Path) -> Path:
    """Write traces of three ranks, one of them in two files, and one cut."""
    folder.mkdir()
    for rank in range(3):
        trace = KinetoFactory(rank, world_size=3).step(0, 0, 900)
        for number in range(10 + rank):
            trace.call(100 + 20 * number, 10)
        trace.write(folder / f"rank{rank}.json")
    KinetoFactory(1, world_size=3).call(2000).write(folder / "rank1-later.json.gz")
    text = (folder / "rank2.json").read_text()
    (folder / "rank2.json").write_text(text[: text.rindex("record_param_comms")])
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_log_is_the_same(tmp_path: Path, workers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = traces(tmp_path / "traces")
    imported = import_files([folder], tmp_path / "parallel")
    assert workers == [4]
    monkeypatch.setattr(events_of_files, "MIN_PARALLEL_BYTES", 1 << 60)
    assert import_files([folder], tmp_path / "alone") == imported
    assert workers == [4, 0]
    assert (imported.calls, len(imported.problems)) == (10 + 11 + 12 + 1, 1)
    assert contents(tmp_path / "parallel") == contents(tmp_path / "alone")


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, workers: list[int]) -> None:
    folder = traces(tmp_path / "traces")
    (folder / "rank1.json").write_text('{"traceEvents": 5}')
    with pytest.raises(ImportFileError, match=r"traces/rank1\.json: "):
        import_files([folder], tmp_path / "log")
    assert [*tmp_path.iterdir()] == [folder]


def end(path: Path) -> Iterator[Event]:
    os._exit(9)


def test_a_worker_that_is_killed_is_an_error(tmp_path: Path, workers: list[int]) -> None:
    folder = traces(tmp_path / "traces")
    files = [(file, end) for file in sorted(folder.iterdir())]
    with pytest.raises(CommtraceError, match=f"{folder}: a worker process was killed, probably because memory"):
        next(events_of_files.events_of_files(files, tmp_path))
    assert [*tmp_path.iterdir()] == [folder]
