"""The ring: a file in memory that identifies its process and shows whether that process is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import numpy as np
import processes
import pytest

from commtrace.recording import ring
from commtrace.recording.recovery import copy_rings
from commtrace.recording.ring import Ring, RingContent, lock_dead
from commtrace.schema import RECORD

IDENTITY = {"directory": "/log", "run": "run", "host": "host", "stem": "rank00000-1"}


def simulate_death(new_ring: Ring) -> Path:
    """Make the process of a ring appear dead, and return the path of the ring."""
    assert new_ring.path is not None
    os.close(new_ring._fd)
    new_ring._fd = -1
    return new_ring.path


def content_after_death(new_ring: Ring) -> RingContent:
    """Return what a ring has after the death of its process."""
    with lock_dead(simulate_death(new_ring)) as content:
        assert content is not None
        return content


def test_what_is_left_can_be_read(tmp_path: Path) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    new_ring.count({"calls": 5})
    new_ring.dropped = 3
    new_ring.keep_table_line(b"one\n")
    new_ring.records[7]["t_begin"], new_ring.records[7]["state"] = 11, 3
    content = content_after_death(new_ring)
    assert content.identity == {"format": "commtrace-ring", "capacity": 16, **IDENTITY}
    assert content.counters == {"calls": 5, "dropped": 3}
    assert content.tables == b"one\n"
    assert content.records["t_begin"].tolist() == [11]
    ring.remove_files(content.path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("calls", "num_left"), [(0, 0), (3, 3), (5, 5), (12, 5), (40, 5)])
def test_the_last_records_are_kept(calls: int, num_left: int, tmp_path: Path) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY, kept=5)
    records = np.zeros(calls, RECORD)
    records["seq"] = np.arange(calls)
    for part in np.array_split(records, 3):
        new_ring.keep(part)
    expected = [*range(calls)][-num_left:] if num_left else []
    assert new_ring.kept()["seq"].tolist() == expected
    left_in_ring = content_after_death(new_ring)
    assert left_in_ring.kept["seq"].tolist() == expected
    assert left_in_ring.kept_count == calls


def test_what_a_kill_overwrites_is_not_kept(tmp_path: Path) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY, kept=5)
    records = np.zeros(7, RECORD)
    records["seq"] = np.arange(7)
    new_ring.keep(records)
    new_ring.buffer[ring.KEPT_AT : ring.KEPT_AT + 8] = (9).to_bytes(8, "little")  # the writing of two more had begun
    assert content_after_death(new_ring).kept["seq"].tolist() == [4, 5, 6]


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert len(list(tmp_path.iterdir())) == 2


def test_the_later_copy_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    for calls in range(1, 6):
        new_ring.count({"calls": calls})
        new_ring.describe({**IDENTITY, "stem": str(calls)})
    for start in (ring.COUNTERS_AT, ring.IDENTITY_AT):
        newest = start + new_ring._turns[start] % 2 * ring.COPY_BYTES
        new_ring.buffer[newest + 30] = ord("x")
    content = content_after_death(new_ring)
    assert content.counters == {"calls": 4, "dropped": 0}
    assert content.identity["stem"] == "4"


def test_counters_that_are_too_long_keep_their_numbers(tmp_path: Path) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    new_ring.count({"calls": 5, "first_error": "ü" * 4000})
    assert content_after_death(new_ring).counters == {"calls": 5, "dropped": 0}


@pytest.mark.parametrize("folder", ["/nonexistent", "/proc"])
def test_private_memory_where_the_folder_is_none(folder: str) -> None:
    new_ring = ring.make_ring(16, folder, "1-2-3", IDENTITY)
    assert new_ring.path is None
    new_ring.records[0]["state"] = 1
    new_ring.count({"calls": 1})
    new_ring.keep_table_line(b"line\n")
    new_ring.remove()


def test_private_memory_where_the_description_is_too_long(tmp_path: Path) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", {**IDENTITY, "directory": "/" + "x" * 5000})
    assert new_ring.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_is_not_finished_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suffixes: list[list[str]] = []
    original = ring.Ring.describe

    def describe(self: Ring, identity: dict[str, object]) -> None:
        suffixes.append([path.suffix for path in tmp_path.iterdir()])
        original(self, identity)

    monkeypatch.setattr(Ring, "describe", describe)
    ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    assert suffixes == [[".new"]]


def test_no_room_for_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    assert new_ring.path is None
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_space_is_reserved(tmp_path: Path) -> None:
    new_ring = ring.make_ring(1024, str(processes.SHM), f"test-{os.getpid()}", IDENTITY)
    assert new_ring.path is not None
    try:
        assert new_ring.path.stat().st_blocks * 512 >= ring.RECORDS_AT + 1024 * 96
    finally:
        new_ring.remove()
    assert not list(processes.SHM.glob(f"commtrace-test-{os.getpid()}*"))


def test_a_living_process_keeps_its_ring(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    owner = os.fork()
    if owner == 0:
        new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", {**IDENTITY, "pid": os.getpid()})
        child = os.fork()  # inherits the descriptors of its parent, and outlives it
        if child == 0:
            time.sleep(10)
            os._exit(0)
        os.write(write_end, str(child).encode())
        time.sleep(10)
        new_ring.remove()
        os._exit(0)
    child = int(os.read(read_end, 20))
    try:
        (path,) = tmp_path.glob("*.ring")
        with lock_dead(path) as content:
            assert content is None
    finally:
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
    try:
        with lock_dead(path) as content:
            assert content is not None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_ring_that_somebody_else_finished_with_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = simulate_death(ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY))
    original = ring._lock

    def lock(fd: int) -> bool:
        path.unlink()
        return original(fd)

    monkeypatch.setattr(ring, "_lock", lock)
    with lock_dead(path) as content:
        assert content is None


def test_a_short_write_of_a_table_line_ends_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_ring = ring.make_ring(16, str(tmp_path), "1-2-3", IDENTITY)
    new_ring.keep_table_line(b"one\n")
    with monkeypatch.context() as patched:
        original = os.write
        patched.setattr(os, "write", lambda fd, data: original(fd, data[:2]))
        new_ring.keep_table_line(b"two\n")
    new_ring.keep_table_line(b"three\n")
    assert content_after_death(new_ring).tables == b"one\ntw"


@pytest.mark.parametrize(("most", "expected"), [(None, [0, 1, 2, 3, 4, 5]), (6, [0, 1, 2, 3, 4, 5]), (2, [1, 4, 5])])
def test_the_newest_records_and_those_of_calls_in_flight(
    most: int | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMTRACE_SHM", str(tmp_path))
    identity = {**IDENTITY, "directory": str(tmp_path / "log")}
    program = f"""
import os, sys
from commtrace.recording import ring
from commtrace.schema import State
new_ring = ring.make_ring(16, {str(tmp_path)!r}, "1-2-3", {{**{identity!r}, "pid": os.getpid()}})
for number, at in enumerate((3, 0, 5, 1, 4, 2)):
    new_ring.records[at]["t_begin"] = number + 1
    new_ring.records[at]["seq"] = number
    new_ring.records[at]["state"] = State.BEGUN if number == 1 else State.COMPLETE
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (copy,) = copy_rings(tmp_path / "log", most).values()
        process.communicate()
    assert sorted(copy.records["seq"].tolist()) == expected
    assert copy.left_out == 6 - len(expected)
