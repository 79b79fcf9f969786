"""Segments: format, growth and size limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import processes
import pytest

from commtrace.recording import segment_writer as segments
from commtrace.recording.segment_writer import HEADER_BYTES, SegmentSeries, WrittenSegment, read_rows
from commtrace.schema import RECORD, Records


def numbered_records(count: int, first: int = 0) -> Records:
    """Return records whose sequence numbers begin at `first`."""
    records = np.zeros(count, RECORD)
    records["seq"] = np.arange(first, first + count)
    records["state"] = 3
    return records


def series(folder: Path, smallest: int = 4096, largest: int = 16384, max_bytes: int = 1 << 20) -> SegmentSeries:
    return SegmentSeries(folder, "rank00000-1", smallest=smallest, largest=largest, max_bytes=max_bytes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_closed_segment_is_an_ordinary_npy_file(tmp_path: Path) -> None:
    segment = WrittenSegment(tmp_path / "a.npy")
    segment.append(numbered_records(3))
    assert names(tmp_path) == ["a.npy.open"]
    segment.append(numbered_records(2, 3))
    segment.close()
    assert names(tmp_path) == ["a.npy"]
    loaded = np.load(tmp_path / "a.npy")
    assert loaded.dtype == RECORD
    assert loaded.tobytes() == numbered_records(5).tobytes()
    assert (tmp_path / "a.npy").stat().st_size == HEADER_BYTES + 5 * 96


def test_an_open_segment_may_end_anywhere(tmp_path: Path) -> None:
    segment = WrittenSegment(tmp_path / "a.npy")
    segment.append(numbered_records(3))
    segment.abandon()
    os.truncate(tmp_path / "a.npy.open", HEADER_BYTES + 2 * 96 + 50)
    assert read_rows(tmp_path / "a.npy.open")["seq"].tolist() == [0, 1]
    with open(tmp_path / "a.npy.open", "rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == ((0,), False, RECORD)
        assert file.tell() == HEADER_BYTES


def test_an_empty_segment_leaves_no_file(tmp_path: Path) -> None:
    WrittenSegment(tmp_path / "a.npy").close()
    assert names(tmp_path) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.npy.open").write_text("somebody's")
    with pytest.raises(FileExistsError):
        WrittenSegment(tmp_path / "a.npy")
    assert (tmp_path / "a.npy.open").read_text() == "somebody's"


def test_segments_double_up_to_the_largest(tmp_path: Path) -> None:
    segment_series = series(tmp_path)
    for first in range(0, 1000, 7):
        segment_series.append(numbered_records(min(7, 1000 - first), first))
    segment_series.close()
    sizes = [(tmp_path / name).stat().st_size for name in names(tmp_path)]
    assert [-(-size // 4096) for size in sizes] == [1, 2, 4, 4, 4, 4, 4, 3]
    assert max(sizes) <= 16384
    loaded = np.concatenate([np.load(tmp_path / name) for name in names(tmp_path)])
    assert loaded["seq"].tolist() == list(range(1000))
    assert segment_series.written == 1000
    assert segment_series.removed == 0


@pytest.mark.parametrize("max_bytes", [8192, 10_000, 65536, 100_001])
@pytest.mark.parametrize("batch", [1, 5, 700])
def test_the_bound_holds_at_every_moment(
    max_bytes: int, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    original = segments.write_all

    def measured(fd: int, data: bytes) -> None:
        original(fd, data)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))

    monkeypatch.setattr(segments, "write_all", measured)
    segment_series = series(tmp_path, max_bytes=max_bytes)
    for first in range(0, 3500, batch):
        segment_series.append(numbered_records(batch, first))
    segment_series.close()
    assert max(sizes) <= max_bytes
    kept = np.concatenate([np.load(tmp_path / name) for name in names(tmp_path)])
    assert kept["seq"].tolist() == list(range(segment_series.removed, 3500))  # the newest, without a gap
    assert segment_series.removed + len(kept) == segment_series.written == 3500
    assert len(kept) * 96 > max_bytes / 4


def failing(error_at: int) -> Callable[[int, bytes], None]:
    """Return a `write_all` that fails at its call number `error_at`, after half of the data."""
    calls = [0]
    original = segments.write_all

    def write(fd: int, data: bytes) -> None:
        calls[0] += 1
        if calls[0] == error_at:
            original(fd, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        original(fd, data)

    return write


@pytest.mark.parametrize("error_at", range(1, 9))
def test_after_an_error_the_rest_is_written_where_it_belongs(
    error_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "write_all", failing(error_at))
    segment_series = series(tmp_path)
    with pytest.raises(OSError, match="No space"):
        segment_series.append(numbered_records(400))
    assert segment_series.written < 400
    assert all((path.stat().st_size - HEADER_BYTES) % RECORD.itemsize == 0 for path in tmp_path.iterdir())
    segment_series.append(numbered_records(400)[segment_series.written :])
    segment_series.close()
    loaded = np.concatenate([np.load(tmp_path / name) for name in names(tmp_path)])
    assert loaded["seq"].tolist() == list(range(400))
    assert [name[12:17] for name in names(tmp_path)] == [f"{n:05d}" for n in range(len(names(tmp_path)))], "a gap"


def test_what_cannot_be_taken_back_is_cut_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = WrittenSegment(tmp_path / "a.npy")
    segment.append(numbered_records(2))
    with monkeypatch.context() as patched:
        patched.setattr(segments, "write_all", failing(1))
        patched.setattr(os, "ftruncate", _fail)
        with pytest.raises(OSError, match="No space"):
            segment.append(numbered_records(5, 2))
    assert (tmp_path / "a.npy.open").stat().st_size > HEADER_BYTES + 2 * 96
    segment.append(numbered_records(1, 9))
    segment.close()
    assert np.load(tmp_path / "a.npy")["seq"].tolist() == [0, 1, 9]


def _fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_no_descriptor_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment_series = series(tmp_path)
    segment_series.append(numbered_records(500))
    segment_series.close()
    with monkeypatch.context() as patched:
        patched.setattr(segments, "write_all", failing(1))
        with pytest.raises(OSError, match="No space"):
            segment_series.append(numbered_records(1))
    segment_series.append(numbered_records(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", _fail)
        with pytest.raises(OSError, match="Input/output"):
            segment_series.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("total", "bound"), [(300_000, 8 << 20), pytest.param(2_000_000, 48 << 20, marks=pytest.mark.exhaustive)]
)
def test_many_calls(tmp_path: Path, total: int, bound: int) -> None:
    """The recorder's counters are exact, and the log stays within its size limit at all times."""
    recorder = processes.recorder(tmp_path, max_bytes=bound, ring_records=1 << 17, drain_ms=5)
    sizes: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            sizes.append(sum(_size(path) for path in tmp_path.glob("*/*/*.npy*")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, returned = recorder.begin, recorder.returned
    for number in range(total):
        slot = begin(1, 1, number, 8 * number, number, -1, -1, number % 1000, -1, -1, 0, 0, 0)
        returned(slot, 1, observable=False)
        if number % 4096 == 0:
            processes.wait_for(lambda: recorder.slots.taken < 1 << 16)
    recorder.close("stop")
    done.set()
    watcher.join()

    log = processes.read_one(tmp_path)
    assert log.stats["calls"] == total
    assert log.stats["dropped"] == log.stats["lost"] == 0
    assert log.stats["removed"] == total - len(log.records)
    assert max(sizes) <= bound
    assert len(log.records) * 96 > bound / 2
    processes.assert_whole(log.records)
    assert len(np.unique(log.records["seq"])) == len(log.records)
    assert log.records["seq"].max() == total - 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
