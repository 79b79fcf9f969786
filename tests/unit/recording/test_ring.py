"""The ring: a file in memory that says whose it is, and tells the living from the dead."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import processes
import pytest

from commtrace.recording import ring
from commtrace.recording.ring import Ring, RingContent, lock_dead
from commtrace.schema import RECORD

IDENTITY = {"directory": "/log", "run": "run", "host": "host", "stem": "rank00000-1"}


def dead(made: Ring) -> Path:
    """As if the process of this ring had died."""
    assert made.path is not None
    os.close(made._fd)
    made._fd = -1
    return made.path


def content(made: Ring) -> RingContent:
    """What a dead process left in its ring."""
    with lock_dead(dead(made)) as left:
        assert left is not None
        return left


def test_what_is_left_can_be_read(tmp_path: Path) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    made.count({"calls": 5})
    made.dropped = 3
    made.keep_table_line(b"one\n")
    made.records[7]["t_begin"], made.records[7]["state"] = 11, 3
    left = content(made)
    assert left.identity == {"format": "commtrace-ring", "capacity": 16, **IDENTITY}
    assert left.counters == {"calls": 5, "dropped": 3}
    assert left.tables == b"one\n"
    assert left.records["t_begin"].tolist() == [11]
    ring.remove_files(left.path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("calls", "left"), [(0, 0), (3, 3), (5, 5), (12, 5), (40, 5)])
def test_the_last_records_are_kept(calls: int, left: int, tmp_path: Path) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY, kept=5)
    records = np.zeros(calls, RECORD)
    records["seq"] = np.arange(calls)
    for part in np.array_split(records, 3):
        made.keep(part)
    expected = [*range(calls)][-left:] if left else []
    assert made.kept()["seq"].tolist() == expected
    left_in_ring = content(made)
    assert left_in_ring.kept["seq"].tolist() == expected
    assert left_in_ring.kept_count == calls


def test_what_a_kill_overwrites_is_not_kept(tmp_path: Path) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY, kept=5)
    records = np.zeros(7, RECORD)
    records["seq"] = np.arange(7)
    made.keep(records)
    made.buffer[ring.KEPT_AT : ring.KEPT_AT + 8] = (9).to_bytes(8, "little")  # two more were begun
    assert content(made).kept["seq"].tolist() == [4, 5, 6]


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) == 2


def test_the_later_copy_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    for calls in range(1, 6):
        made.count({"calls": calls})
        made.describe({**IDENTITY, "stem": str(calls)})
    for start in (ring.COUNTERS_AT, ring.IDENTITY_AT):
        newest = start + made._turns[start] % 2 * ring.COPY_BYTES
        made.buffer[newest + 30] = ord("x")
    left = content(made)
    assert left.counters == {"calls": 4, "dropped": 0}
    assert left.identity["stem"] == "4"


def test_counters_that_are_too_long_keep_their_numbers(tmp_path: Path) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    made.count({"calls": 5, "first_error": "ü" * 4000})
    assert content(made).counters == {"calls": 5, "dropped": 0}


@pytest.mark.parametrize("folder", ["/nonexistent", "/proc"])
def test_private_memory_where_the_folder_is_none(folder: str) -> None:
    made = ring.make_ring(16, folder, "1-2-3", IDENTITY)
    assert made.path is None
    made.records[0]["state"] = 1
    made.count({"calls": 1})
    made.keep_table_line(b"line\n")
    made.remove()


def test_private_memory_where_the_description_is_too_long(tmp_path: Path) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", {**IDENTITY, "directory": "/" + "x" * 5000})
    assert made.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_is_not_finished_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    original = ring.Ring.describe

    def describe(self: Ring, identity: dict[str, object]) -> None:
        seen.append([path.suffix for path in tmp_path.iterdir()])
        original(self, identity)

    monkeypatch.setattr(Ring, "describe", describe)
    ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    assert seen == [[".new"]]


def test_no_room_for_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    assert made.path is None
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_space_is_reserved(tmp_path: Path) -> None:
    made = ring.make_ring(1024, str(processes.SHM), f"test-{os.getpid()}", IDENTITY)
    assert made.path is not None
    try:
        assert made.path.stat().st_blocks * 512 >= ring.RECORDS_AT + 1024 * 96
    finally:
        made.remove()
    assert not list(processes.SHM.glob(f"commtrace-test-{os.getpid()}*"))


def test_a_living_process_keeps_its_ring(tmp_path: Path) -> None:
    told, tell = os.pipe()
    owner = os.fork()
    if owner == 0:
        made = ring.make_ring(16, str(tmp_path), "1-2-3", {**IDENTITY, "pid": os.getpid()})
        child = os.fork()  # which has a copy of all that its parent has, and outlives it
        if child == 0:
            time.sleep(10)
            os._exit(0)
        os.write(tell, str(child).encode())
        time.sleep(10)
        made.remove()
        os._exit(0)
    child = int(os.read(told, 20))
    try:
        (path,) = tmp_path.glob("*.ring")
        with lock_dead(path) as left:
            assert left is None
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    try:
        with lock_dead(path) as left:
            assert left is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_ring_that_somebody_else_finished_with_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dead(ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY))
    original = ring._lock

    def lock(fd: int) -> bool:
        path.unlink()
        return original(fd)

    monkeypatch.setattr(ring, "_lock", lock)
    with lock_dead(path) as left:
        assert left is None


def test_a_short_write_of_a_table_line_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    made.keep_table_line(b"one\n")
    with monkeypatch.context() as patched:
        original = os.write
        patched.setattr(os, "write", lambda fd, data: original(fd, data[:2]))
        made.keep_table_line(b"two\n")
    made.keep_table_line(b"three\n")
    assert content(made).tables == b"one\ntw"
