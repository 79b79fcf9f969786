"""Records of killed processes are recovered exactly once, and only those of dead processes of this log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from factory import training
from packed_logs import assert_equal, pack

import commtrace
import commtrace.reading.log as log_directory
import commtrace.reading.pack
from commtrace import identity
from commtrace.analyses import volume_tables
from commtrace.analyses.fold_engine import fold
from commtrace.errors import LogError
from commtrace.recording import recovery, ring
from commtrace.recording import segment_writer as segments
from commtrace.recording import table_lines as tables
from commtrace.recording.ring import identity_of


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Yield a log directory, and remove what its processes leave in shared memory afterwards."""
    yield tmp_path / "log"
    processes.clean_shm(tmp_path / "log")


def die(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGKILL)


def leave(log: Path, calls: int = 100, rank: int = 0, **settings: object) -> None:
    """Kill a process that has these calls in its ring."""

    def record() -> None:
        recorder = processes.recorder(log, rank, drain_ms=60_000, **settings)
        for number in range(calls):
            recorder.returned(processes.call(recorder, number), 1, observable=False)
        die()

    assert processes.in_child(record) == -signal.SIGKILL


def assert_all(log: Path, calls: int = 100) -> None:
    left = processes.read_one(log)
    assert sorted(left.records["seq"].tolist()) == list(range(calls))
    processes.assert_whole(left.records)
    assert [row["records"] for row in left.tables["salvage"]] == [calls]
    assert left.stats["calls"] == calls
    assert not processes.rings(log)


def test_records_tables_and_counters_come_home(log: Path) -> None:
    leave(log)
    (note,) = recovery.recover_records(log)
    assert (note.records, note.error) == (100, "")
    assert note.stem.startswith("rank00000-")
    assert_all(log)
    assert recovery.recover_records(log) == []


def test_dropped_calls_are_counted_to_the_moment_of_the_kill(log: Path) -> None:
    leave(log, 100, ring_records=16)
    recovery.recover_records(log)
    left = processes.read_one(log)
    assert len(left.records) == 16
    assert left.stats["dropped"] == 84
    assert left.stats["calls"] == 100


def test_a_process_killed_while_it_began_leaves_nothing(log: Path) -> None:
    def record() -> None:
        tables.TableLines.add = die  # type: ignore[method-assign]  # only this child is affected
        processes.recorder(log)

    assert processes.in_child(record) == -signal.SIGKILL
    assert len(processes.rings(log)) == 1
    assert recovery.recover_records(log) == []
    assert not processes.rings(log)
    assert not log.exists()


RECOVERY_STEPS: dict[str, tuple[object, str]] = {
    "before the segment": (segments.WrittenSegment, "__init__"),
    "before its records": (segments.WrittenSegment, "append"),
    "before it is closed": (segments.WrittenSegment, "close"),
    "before the tables": (recovery, "_complete_tables"),
    "before the tables are in place": (os, "replace"),
    "before the ring is removed": (ring, "remove_files"),
}


@pytest.mark.parametrize("step", RECOVERY_STEPS)
def test_a_recovery_that_is_killed_is_repeated(step: str, log: Path) -> None:
    leave(log)
    owner, name = RECOVERY_STEPS[step]

    def interrupted() -> None:
        setattr(owner, name, die)
        recovery.recover_records(log)

    assert processes.in_child(interrupted) == -signal.SIGKILL
    recovery.recover_records(log)
    assert_all(log)


def test_a_full_disk_leaves_everything_where_it_is(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(log)

    def no_room(fd: int, data: bytes) -> None:
        os.write(fd, data[:1500])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(segments, "write_all", no_room)
        (note,) = recovery.recover_records(log)
    assert "No space left on device" in note.error
    assert len(processes.rings(log)) == 1
    recovery.recover_records(log)
    assert_all(log)


def test_the_ring_of_a_living_process_is_left_alone(log: Path) -> None:
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        recorder = processes.recorder(log, drain_ms=60_000)
        processes.call(recorder)
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        recorder.close("exit")
        os._exit(0)
    os.read(ready[0], 1)
    assert recovery.recover_records(log) == []
    assert len(processes.rings(log)) == 1
    os.write(go_on[1], b"x")
    assert processes.wait_pid(pid) == 0
    assert len(processes.read_one(log).records) == 1


def test_a_process_may_recover_while_it_records(log: Path) -> None:
    """A lock does not exclude its own process, and closing any descriptor of the file would release it."""
    recorder = processes.recorder(log, drain_ms=60_000)
    processes.call(recorder, 0)
    assert recovery.recover_records(log) == []
    assert processes.in_child(lambda: os._exit(len(recovery.recover_records(log)))) == 0, "the lock was released"
    assert len(processes.rings(log)) == 1
    recorder.close("stop")
    left = processes.read_one(log)
    assert len(left.records) == 1
    assert "salvage" not in left.tables


def test_only_the_directory_that_was_asked_for(log: Path, tmp_path: Path) -> None:
    leave(log)
    (tmp_path / "log2").mkdir()
    assert recovery.recover_records(tmp_path / "log2") == []
    assert recovery.recover_records(tmp_path) == []
    ring_identity = _identity(log)
    assert len(recovery.recover_records(log / ring_identity["run"] / ring_identity["host"])) == 1
    assert_all(log)


def test_a_run_in_a_directory(log: Path) -> None:
    leave(log)
    assert len(recovery.recover_records(log / _identity(log)["run"])) == 1
    assert_all(log)


def _identity(log: Path) -> dict[str, str]:
    (path,) = processes.rings(log)
    return identity_of(path)


def test_another_recovery_is_waited_for(log: Path) -> None:
    leave(log)
    (path,) = processes.rings(log)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    assert len(recovery.recover_records(log)) == 1
    assert other.wait(timeout=20) == 0
    assert_all(log)


HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "r+b") as ring:
    fcntl.lockf(ring, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(0.5)
"""


def test_rings_of_other_logs_are_not_locked(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(log)
    locked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(ring, "_lock", locked.append)
        assert recovery.recover_records(tmp_path / "other") == []
    assert locked == []
    assert len(recovery.recover_records(log)) == 1


@pytest.mark.parametrize("name", ["run", "host", "stem"])
@pytest.mark.parametrize("value", ["../elsewhere", "..", "", "a/b"])
def test_names_that_lead_elsewhere_are_refused(name: str, value: str, log: Path, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    ring_identity = {"directory": str(log), "run": "run", "host": "host", "stem": "rank0-1", "pid": 1, name: value}
    new_ring = ring.make_ring(16, str(shm), "x-1-00000000", ring_identity)
    assert new_ring.path is not None
    ring._own_rings.clear()
    os.close(new_ring._fd)
    assert recovery.recover_records(log, shm=str(shm)) == []
    assert not log.exists()


def test_what_is_no_ring_is_left_alone(log: Path, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    for number, content in enumerate((b"", b"hello", bytes(20000), b"00000000 {}".ljust(20000), b"x" * 20000)):
        (shm / f"commtrace-{number}.ring").write_bytes(content)
    (shm / "commtrace-link.ring").symlink_to(shm / "commtrace-1.ring")
    os.mkfifo(shm / "commtrace-pipe.ring")
    log.mkdir()
    assert recovery.recover_records(log, shm=str(shm)) == []
    assert recovery.recover_records(log, shm=str(tmp_path / "nowhere")) == []
    assert len(list(shm.iterdir())) == 7


def test_a_name_that_is_another_processs_by_now(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed before it made its files, and another process of that name has made them since."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(identity, "_recordings", 0)
    leave(log, 30)
    other = processes.recorder(log)
    for number in range(5):
        processes.call(other, number)
    other.close("exit")  # this also recovers the records of the dead process

    logs = processes.read_all(log)
    assert sorted(len(left.records) for left in logs) == [5, 30]
    assert sorted("salvage" in left.tables for left in logs) == [False, True]
    assert all(left.tables["process"][0]["run"] == "slurm-77.0" for left in logs)


def test_the_tables_in_memory_were_cut(log: Path) -> None:
    leave(log)
    (path,) = processes.rings(log)
    tables = path.with_suffix(".jsonl")
    tables.write_bytes(tables.read_bytes() + b'{"table": "sites", "id": 1, "fi')
    recovery.recover_records(log)
    assert_all(log)
    assert "sites" not in processes.read_one(log).tables


def test_opening_a_log_may_recover_records_first(log: Path) -> None:
    leave(log)
    run = commtrace.open(log, recover=True)
    assert len(run.events()) == 100
    (note,) = run.notes  # none says that the process has no other segment
    assert "100 records" in str(note)


@pytest.mark.long
def test_packing_a_log_recovers_records_first(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(log)
    packed = pack(log)
    assert "100 records of a process that ended early were recovered" in capsys.readouterr().err
    assert not processes.rings(log)
    assert len(commtrace.open(packed).events()) == 100
    training(log.parent / "other", ranks=3)
    assert_equal(log, packed, log.parent / "other", capsys)


def test_a_log_of_a_living_process_is_not_packed(log: Path) -> None:
    go_on = os.pipe()
    pid = os.fork()
    if pid == 0:
        recorder = processes.recorder(log, drain_ms=5)
        recorder.returned(processes.call(recorder), 1, observable=False)
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        processes.wait_for(lambda: [*log.rglob("*.npy.open")])
        with pytest.raises(LogError, match="is recording; pack the log when it has ended"):
            commtrace.reading.pack.pack(log, log.parent / "packed")
    finally:
        os.write(go_on[1], b"x")
        assert processes.wait_pid(pid) == 0
    assert [path.name for path in log.parent.iterdir()] == ["log"]


@pytest.mark.parametrize("first", ["killed", "recovered"])
def test_a_process_that_is_killed_while_its_log_is_opened(
    first: str, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's ring is either copied or recovered, and no call is counted twice."""
    ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        recorder = processes.recorder(log, drain_ms=5)
        processes.wait_for(lambda: [*log.rglob("*.jsonl")])
        for number in range(10):
            processes.call(recorder, number)
        os.write(ready[1], b"x")
        signal.pause()
    os.read(ready[0], 1)

    def kill(*arguments: object, **named: object) -> list[recovery.Recovery]:
        if first == "recovered":
            assert recovery.recover_records(log) == [], "the process is alive"
        os.kill(pid, signal.SIGKILL)
        processes.wait_pid(pid)
        return recovery.recover_records(log) if first == "killed" else []

    monkeypatch.setattr(log_directory, "recover_records", kill)
    events = commtrace.open(log, recover=True).events()
    assert events["seq"].sort_values().tolist() == list(range(10))
    assert set(events["state"]) == {"begun"}
    assert len(processes.rings(log)) == (first == "recovered")


def contents(log: Path) -> dict[Path, bytes]:
    """Return what is on disk and in shared memory of a log, by path."""
    return {path: path.read_bytes() for path in [*log.rglob("*"), *processes.rings(log)] if path.is_file()}


def shown(run: commtrace.Run) -> tuple[object, ...]:
    """Return what is known of the calls and the end of the only process of a run."""
    (process,) = run.processes
    salvage = [(row["records"], row["host"]) for row in process.tables.salvage]
    stats = {name: value for name, value in (process.tables.stats or {}).items() if name != "table"}
    calls = fold(run, volume_tables.ANALYSES)["volume_by_operation"] if run.is_summary else run.events()
    kinds = sorted(note.kind for note in run.notes)
    return calls.to_csv(), len(calls), stats, salvage, process.tables.process, process.live_at_ns, kinds


@pytest.mark.parametrize("settings", [{}, {"ring_records": 16}, {"steps": "1-2"}, {"mode": "summary"}], ids=str)
@pytest.mark.parametrize("drained", [False, True])
def test_records_of_a_killed_process_are_read_where_they_are(
    drained: bool, settings: dict[str, Any], log: Path
) -> None:
    """Opening the log writes nothing, and shows what it shows after a recovery, also before there is any file."""

    def record() -> None:
        recorder = processes.recorder(log, drain_ms=5 if drained else 60_000, **settings)
        for number in range(50):
            recorder.returned(processes.call(recorder, number, step=number // 10), 1, observable=False)
        if drained:
            processes.wait_for(lambda: [*log.rglob("*.jsonl")])
        for number in range(50, 100):
            recorder.returned(processes.call(recorder, number, step=number // 10), 1, observable=False)
        die()

    assert processes.in_child(record) == -signal.SIGKILL
    assert log.exists() or not drained
    before = contents(log)
    run = commtrace.open(log)
    in_memory = shown(run)
    assert "salvage" in {note.kind for note in run.notes}
    assert contents(log) == before
    assert len(processes.rings(log)) == 1
    assert in_memory == shown(commtrace.open(log, recover=True))
    assert not processes.rings(log)


def test_a_ring_that_cannot_be_recovered_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(log)

    def no_room(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments, "write_all", no_room)
    run = commtrace.open(log, recover=True)
    assert len(run.events()) == 100
    assert ["could not be moved to the log" in note.what for note in run.notes] == [True, False]


def test_a_ring_that_was_moved_to_the_log_is_not_read_again(log: Path) -> None:
    """A recovery that is killed before it removes the ring leaves both."""
    leave(log)

    def interrupted() -> None:
        ring.remove_files = die
        recovery.recover_records(log)

    assert processes.in_child(interrupted) == -signal.SIGKILL
    assert len(processes.rings(log)) == 1
    run = commtrace.open(log)
    assert len(run.events()) == 100
    assert run.notes == ()


def test_the_command(log: Path) -> None:
    leave(log, 7)
    first = processes.run([*COMMAND, "recover", log])
    assert first.status == 0
    assert "7 records" in first.out
    assert "no records in" in processes.run([*COMMAND, "recover", log]).out
    assert_all(log, 7)


COMMAND = [sys.executable, "-c", "import sys; from commtrace.cli import main; sys.exit(main())"]


def test_what_was_written_already_is_known_by_its_call(log: Path) -> None:
    """A record may change in memory after it was written, when a call that was in flight returns."""

    def record() -> None:
        recorder = processes.recorder(log, drain_ms=60_000)
        slots = [processes.call(recorder, number) for number in range(3)]

        def come_back_and_die(_: object) -> None:
            for slot in slots:
                recorder.returned(slot, 9, observable=True)
            die()

        recorder.slots.release = come_back_and_die  # type: ignore[assignment,method-assign]
        recorder.close("exit")

    assert processes.in_child(record) == -signal.SIGKILL
    recovery.recover_records(log)
    left = processes.read_one(log)
    assert sorted(left.records["seq"].tolist()) == [0, 1, 2]
    assert left.tables["salvage"][0]["records"] == 0
