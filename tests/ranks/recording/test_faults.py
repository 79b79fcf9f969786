"""Whatever goes wrong with the log, training continues with the same results, and lost calls are counted."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import numpy as np
import processes
import pytest
from processes import Left, NewRecorder
from ranks import Nursery

from commtrace.recording import log_writer
from commtrace.recording import segment_writer as segments
from commtrace.schema import WITHOUT_RECORD, Clock, State

CALLS = 2 * 20 + 1  # calls of training.py with 20 steps


@pytest.fixture(scope="module")
def losses(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what the training prints when it is not traced."""
    statuses, outputs = nursery.run("training", tmp_path_factory.mktemp("untraced") / "log", 20, traced=False)
    assert statuses == [0, 0]
    assert outputs[0].count("loss") == 20
    return outputs


def train(nursery: Nursery, losses: list[str], log: Path, *arguments: object, **settings: object) -> list[Left]:
    """Run a traced training, compare its output with that of the untraced one, and return its logs."""
    statuses, outputs = nursery.run("training", log, 20, *arguments, **settings)
    assert statuses == [0, 0], outputs
    printed = ["".join(line for line in output.splitlines(True) if line.startswith("loss")) for output in outputs]
    assert printed == losses
    assert not processes.rings(log)
    logs = processes.read_all(log)
    assert {left.tables["process"][0]["recorder"] for left in logs} == {nursery.recorder}
    return logs


def assert_accounted(left: Left) -> None:
    """Assert that every call is in the log or in a counter."""
    stats = left.stats
    assert stats["calls"] == len(left.records) + sum(stats[name] for name in WITHOUT_RECORD)


def test_nothing_is_lost_when_nothing_goes_wrong(nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    for left in train(nursery, losses, tmp_path / "log"):
        assert len(left.records) == left.stats["calls"] == CALLS
        assert set(left.records["state"]) == {State.COMPLETE}
        assert [left.stats[name] for name in ("dropped", "removed", "lost", "hook_errors", "write_errors")] == [0] * 5
        assert left.tables["end"][0]["reason"] == "exit"


LINES = 3  # lines of training.py that make calls

# For parts of the Python recorder that the native one has in C++, where nothing can be patched.
python_only = pytest.mark.parametrize("recorder", ["python"], indirect=True, scope="session")


@python_only
@pytest.mark.parametrize(("fault", "records"), [("site", 0), ("begin", 0), ("ended", CALLS)])
def test_an_error_on_the_way_of_a_call_is_counted(
    fault: str, records: int, nursery: Nursery, losses: list[str], tmp_path: Path
) -> None:
    for left in train(nursery, losses, tmp_path / "log", fault):
        assert len(left.records) == records
        assert left.stats["calls"] == left.stats["hook_errors"] == CALLS
        assert left.stats["unrecorded"] == CALLS - records
        assert "ValueError: injected" in left.stats["first_error"]
        assert left.ended


# Rows that the native recorder also gets from Python code. Fault -> recorder -> (records, errors). The Python recorder
# makes no record without its row. Except for groups, the native one makes it without the row. It retries with the next
# call, but tries only once for each line.
ROWS = {
    "group": {"python": (0, CALLS), "native": (0, CALLS)},
    "kind": {"python": (0, CALLS), "native": (CALLS, CALLS)},
    "line": {"python": (0, CALLS), "native": (CALLS, LINES)},
}


@pytest.mark.parametrize("fault", ROWS)
def test_an_error_in_making_a_row_is_counted(fault: str, nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    records, errors = ROWS[fault][nursery.recorder]
    for left in train(nursery, losses, tmp_path / "log", fault):
        assert len(left.records) == records
        assert left.stats["calls"] == records + left.stats["unrecorded"] == CALLS
        assert left.stats["hook_errors"] == errors
        assert "ValueError: injected" in left.stats["first_error"]
        assert left.ended


def test_calls_of_an_operator_without_a_rule_are_counted(nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    for left in train(nursery, losses, tmp_path / "log", "operator"):
        assert len(left.records) == 1  # the barrier
        assert left.stats["calls"] == CALLS
        assert left.stats["unrecorded"] == left.stats["hook_errors"] == CALLS - 1
        assert "does not support c10d::allreduce_" in left.stats["first_error"]
        assert (
            "the operator c10d::allreduce_ is not known to this version of commtrace"
            in left.tables["process"][0]["blind_spots"]
        )


def test_an_error_of_the_drain_thread_is_counted(nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    for left in train(nursery, losses, tmp_path / "log", "drain"):
        assert len(left.records) == left.stats["calls"] == CALLS
        assert left.stats["hook_errors"] >= 1
        assert "ValueError: injected" in left.stats["first_error"]
        assert left.ended


def test_a_full_ring_drops_the_newest_and_counts(nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    for left in train(nursery, losses, tmp_path / "log", "asleep", ring_records=16):
        assert left.stats["dropped"] == CALLS - 16
        assert left.stats["calls"] == CALLS
        assert sorted(left.records["seq"].tolist()) == list(range(16))


def test_the_directory_is_removed_while_it_is_written(nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    for left in train(nursery, losses, log, "removed", log, drain_ms=10):
        assert_accounted(left)
        assert left.stats["calls"] == CALLS + 1
        assert left.stats["lost"] >= 10
        assert left.stats["write_errors"] >= 1
        # The tables are complete again: they have all rows that records refer to.
        assert set(left.records["kind"]) <= {row["id"] for row in left.tables["kinds"]}
        assert "process" in left.tables
        assert left.ended


def test_no_shared_memory(nursery: Nursery, losses: list[str], tmp_path: Path) -> None:
    for left in train(nursery, losses, tmp_path / "log", shm="/nonexistent"):
        assert len(left.records) == CALLS
        assert left.ended


def test_shared_memory_is_full(small_disk: Path, tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path / "log", shm=str(small_disk))
    for number in range(50):
        processes.call(recorder, number)
    recorder.close("stop")
    assert len(processes.read_one(tmp_path / "log").records) == 50
    assert list(small_disk.iterdir()) == []


def test_shared_memory_fills_up_later(small_disk: Path, tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path / "log", shm=str(small_disk), ring_records=512)
    assert recorder.ring.path is not None
    for number in range(2000):  # 100 kB of table lines, and a disk of 128 kB
        recorder.tables.row_id("sites", number, lambda: {"file": "x" * 20, "line": 1, "function": "f"})
    processes.call(recorder, 5)
    recorder.close("stop")
    left = processes.read_one(tmp_path / "log")
    assert len(left.tables["sites"]) == 2000
    assert len(left.records) == 1


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the writer retry at once."""
    monkeypatch.setattr(log_writer, "RETRY_SECONDS", 0.02)


@pytest.mark.usefixtures("hurry")
def test_a_full_disk_and_then_room_again(
    small_disk: Path, capfd: pytest.CaptureFixture[str], new_recorder: NewRecorder
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(90_000))
    recorder = new_recorder(small_disk / "log", drain_ms=2, segment_min_bytes=16384)
    for number in range(800):  # 77 kB
        recorder.returned(processes.call(recorder, number), 1, observable=False)
    processes.wait_for(lambda: recorder.stats()["write_errors"] > 3)
    assert 0 < len(processes.read_one(small_disk / "log").records) < 800
    ballast.unlink()
    recorder.close("stop")
    left = processes.read_one(small_disk / "log")
    assert sorted(left.records["seq"].tolist()) == list(range(800))
    assert left.stats["calls"] == 800
    assert left.stats["lost"] == 0
    assert capfd.readouterr().err.count("cannot write the log: No space left on device") == 1


class ShortDisk:
    """Disk with room for `room` bytes; the write that exceeds it is cut short, as on a real disk."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self.room, self.error = room, error

    def write(self, fd: int, data: bytes) -> None:
        taken = min(len(data), self.room)
        self.room -= taken
        os.write(fd, data[:taken])
        if taken < len(data):
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("room", [0, 500, 2000, 5000, 30_000])
def test_errors_of_the_disk_lose_nothing_that_fits_later(
    room: int, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_recorder: NewRecorder
) -> None:
    disk = ShortDisk(room, error)
    for module in (log_writer, segments):
        monkeypatch.setattr(module, "write_all", disk.write)
    recorder = new_recorder(tmp_path / "log", drain_ms=2, segment_min_bytes=8192)
    for number in range(1000):
        recorder.returned(processes.call(recorder, number), 1, observable=False)
    processes.wait_for(lambda: recorder.stats()["write_errors"])
    disk.room = 1 << 30
    recorder.close("stop")
    left = processes.read_one(tmp_path / "log")
    assert sorted(left.records["seq"].tolist()) == list(range(1000))
    processes.assert_whole(left.records)
    assert left.stats["calls"] == 1000
    assert left.stats["write_errors"] > 0
    assert os.strerror(error) in left.stats["last_write_error"]
    assert left.ended
    assert not processes.rings(tmp_path / "log")


@pytest.mark.usefixtures("hurry")
def test_a_disk_that_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], new_recorder: NewRecorder
) -> None:
    disk = ShortDisk(20_000)
    with monkeypatch.context() as patched:
        for module in (log_writer, segments):
            patched.setattr(module, "write_all", disk.write)
        recorder = new_recorder(tmp_path / "log", drain_ms=2, ring_records=256)
        for number in range(1000):
            processes.call(recorder, number)
        recorder.close("stop")
    printed = capfd.readouterr().err
    assert "cannot write the log" in printed
    assert "calls could not be written" in printed
    assert "commtrace recover" in printed

    ring = processes.rings(tmp_path / "log")
    assert len(ring) == 1
    # Release the ring, as the end of the process would, so that its records can be recovered.
    os.close(recorder.ring._fd)
    from commtrace.recording import ring as rings

    rings._own_rings.clear()
    (left,) = processes.salvaged(tmp_path / "log")
    assert_accounted(left)
    assert left.stats["calls"] == 1000
    assert left.stats["dropped"] == 1000 - 256
    assert len(left.records) == 256


def test_a_limit_on_the_size_of_files(tmp_path: Path, new_recorder: NewRecorder) -> None:
    def record() -> None:
        recorder = new_recorder(tmp_path / "log", drain_ms=2, shm="/nonexistent", segment_min_bytes=1 << 20)
        log_writer.RETRY_SECONDS = 0.01  # type: ignore[misc]
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        for number in range(1000):
            recorder.returned(processes.call(recorder, number), 1, observable=False)
        processes.wait_for(lambda: recorder.stats()["write_errors"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        recorder.close("stop")

    assert processes.in_child(record) == 0
    left = processes.read_one(tmp_path / "log")
    assert sorted(left.records["seq"].tolist()) == list(range(1000))
    assert "File too large" in left.stats["last_write_error"]


# ---- removed and moved -----------------------------------------------------------------------------------------------


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the writer check its files all the time."""
    monkeypatch.setattr(log_writer, "CHECK_SECONDS", 0.0)


@pytest.mark.usefixtures("watchful")
@pytest.mark.parametrize("what", ["everything", "tables", "open segment", "closed segments", "moved"])
def test_files_that_disappear(what: str, tmp_path: Path, new_recorder: NewRecorder) -> None:
    log = tmp_path / "log"
    recorder = new_recorder(log, drain_ms=2, segment_min_bytes=4096)
    _record(recorder, range(200))
    _make_disappear(what, log)
    _record(recorder, range(200, 400))
    recorder.close("stop")

    left = processes.read_one(log)
    processes.assert_whole(left.records)
    assert left.tables["process"][0]["rank"] == 0
    assert left.stats["calls"] == 400
    assert left.ended
    if what != "closed segments":  # not checked while the other files exist
        assert_accounted(left)
    if what == "tables":
        assert left.stats["lost"] == 0
    # A segment that was moved away is still written to until a new one is needed.
    assert len(set(range(200, 400)) & set(left.records["seq"].tolist())) >= (100 if what == "moved" else 200)


def _record(recorder: processes.Recorder, numbers: range) -> None:
    for number in numbers:
        recorder.returned(processes.call(recorder, number), 1, observable=False)
    processes.wait_for(lambda: not recorder.slots.taken)


def _make_disappear(what: str, log: Path) -> None:
    (folder,) = log.glob("*/*")
    if what == "moved":
        log.rename(log.with_name("elsewhere"))
        return
    patterns = {"everything": "*", "tables": "*.jsonl", "open segment": "*.open", "closed segments": "*.npy"}
    for path in folder.glob(patterns[what]):
        path.unlink()
    if what == "everything":
        for empty in (folder, folder.parent, log):
            empty.rmdir()


# ---- calls that never end, or end late -------------------------------------------------------------------------------


def test_calls_that_nobody_waits_for_make_room_for_others(tmp_path: Path, new_recorder: NewRecorder) -> None:
    recorder = new_recorder(tmp_path / "log", ring_records=64, drain_ms=1)
    handles = []
    for number in range(500):
        processes.wait_for(lambda: recorder._free)
        handles.append(recorder.returned(processes.call(recorder, number), 1, observable=True))
    for handle in handles:  # most of them too late: other records are in the slots already
        assert handle is not None
        recorder.ended(handle, 7, 9, Clock.WAIT)
    recorder.close("stop")
    left = processes.read_one(tmp_path / "log")
    assert left.stats["dropped"] == 0
    assert sorted(left.records["seq"].tolist()) == list(range(500))
    processes.assert_whole(left.records)
    complete = left.records["state"] == State.COMPLETE
    assert set(left.records["state"][~complete]) == {State.RETURNED}
    assert (left.records["t_end"] == np.where(complete, 9, 0)).all()
    assert 0 < np.count_nonzero(complete) <= 64
    assert left.records["seq"][complete].min() > left.records["seq"][~complete].max() - 64
