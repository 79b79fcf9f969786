"""Commands on the workers of a Dask cluster give the same results as in this process, byte for byte."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import damaged_logs
import numpy as np
import processes
import pytest
from factory import LogFactory, record, records, training
from packed_logs import pack, results
from pandas.testing import assert_frame_equal
from ports import free_port

import commtrace.reading.pack
from commtrace.cli import main
from commtrace.errors import LogError, OutputError
from commtrace.reading.run_parts import Executor
from commtrace.run import open_run

pytestmark = pytest.mark.long

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

Captured = pytest.CaptureFixture[str]
SECONDS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Yield a client of a cluster of two worker processes."""
    yield from started(2)


@pytest.fixture(scope="module")
def killed_cluster() -> Iterator[Any]:
    """Yield a client of another cluster, for tests that kill a worker."""
    yield from started(2)


def started(workers: int) -> Iterator[Any]:
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


def address(client: Any) -> str:
    return str(client.scheduler.address)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each segment its own task, and the tree of merges several levels deep."""
    monkeypatch.setattr("commtrace.reading.recorded_run.RECORDS_PER_TASK", 1)
    monkeypatch.setattr("commtrace.reading.run_parts.MERGED_AT_ONCE", 2)


def scheme(name: str, folder: Path) -> Path:
    damaged_logs.unpack(folder)
    return folder / name


def damaged(seed: int, folder: Path) -> Path:
    damaged_logs.unpack(folder)
    chance = random.Random(seed)
    log = folder / chance.choice(damaged_logs.SCHEMES)
    damaged_logs.damage(log, folder / "other", chance)
    return log


def times_at(number: int) -> dict[str, int]:
    """Return the times of a call that begins `number` ms after 0."""
    begin = 1_000_000 * number
    return {"t_begin": begin, "t_return": begin + 2_000, "t_wait": begin + 5_000, "t_end": begin + 50_000}


def killed(folder: Path) -> Path:
    """Write a log of three ranks with several segments: one was killed and recovered, one has a damaged record."""
    rng = np.random.default_rng(7)
    for rank in range(3):
        process = LogFactory(folder / "killed").process(rank, pid=4711 + rank, world_size=3)
        process.known({1: [0, 1, 2], 2: [0, 1], 3: [rank]}, {1: "data"})
        for part in range(4):
            rows = records(
                record(step=step, seq=step, payload=int(rng.integers(1, 1 << 20)), **times_at(step + 1))
                for step in range(part * 10, part * 10 + 10)
            )
            rows["phase"][rank == 2 and part == 3] = 77
            process.write(rows, number="salvaged" if rank == 1 and part == 3 else None)
        if rank != 1:
            process.end()
        else:
            process.stats().add("salvage", records=10, mono_ns=1_000, reason="killed")
    return folder / "killed"


def mpi(folder: Path) -> Path:
    """Write a log of MPI ranks, with collectives and messages."""
    log = LogFactory(folder / "mpi")
    for rank in range(3):
        process = log.process(rank, pid=4711 + rank, world_size=3).known({1: [0, 1, 2]}, {1: "world"})
        for number, op in enumerate(("allreduce", "send", "recv"), 1):
            name = {"allreduce": "all_reduce"}.get(op, op)
            process.add("kinds", id=number, op=name, variant=op, api="mpi", dtype="float64", reduce_op=None)
        rows = [record(kind=1, seq=seq, payload=80, step=seq // 7, **times_at(seq)) for seq in range(50)]
        others = [record(kind=2 if rank == 0 else 3, peer=1 - rank, tag=5, seq=0)] if rank < 2 else []
        process.write(rows).write(others).end()
    return folder / "mpi"


LOGS: Mapping[str, Callable[[Path], Path]] = {
    **{name: functools.partial(scheme, name) for name in damaged_logs.SCHEMES},
    "killed": killed,
    "mpi": mpi,
    "packed": lambda folder: pack(scheme("zero1", folder)),
    "packed killed": lambda folder: pack(killed(folder)),
}
DEFAULT = ("pipeline", "packed killed")


def assert_equal(log: Path, other: Path, client: Any, capsys: Captured) -> None:
    """Assert that commands give equal results in this process and on the cluster."""
    for command in (
        ("report", log, "--json"), ("check", log, "--width", "9999"),
        ("check", log, "--against", other, "--width", "9999"), ("diff", log, other, "--json"),
        ("scaling", log, other, "--json"),
    ):  # fmt: skip
        expected = results(command, capsys, log)
        assert results([*command, "--dask", address(client)], capsys, log) == expected, command


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.exhaustive) for name in LOGS]
)
def test_commands_give_equal_results(name: str, tmp_path: Path, cluster: Any, capsys: Captured) -> None:
    training(tmp_path / "other", ranks=4, steps=6)
    assert_equal(LOGS[name](tmp_path), tmp_path / "other", cluster, capsys)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["zero3", "killed"])
def test_packed_logs_have_equal_bytes(
    name: str, tmp_path: Path, cluster: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commtrace.reading.pack.PART_ROWS", 50)
    log = LOGS[name](tmp_path)
    expected = contents(pack(log))
    assert len(expected) > 2
    assert contents(pack(log, "--force", "--dask", address(cluster))) == expected


def test_an_output_that_workers_do_not_see(tmp_path: Path) -> None:
    training(tmp_path / "log")

    class Elsewhere(Executor):
        def map(self, name: str, function: Any, parts: Any) -> Iterator[Any]:
            shutil.rmtree(function.folder)
            return super().map(name, function, parts)

    with pytest.raises(OutputError, match=r"host \S+ has no such folder; workers and this process need"):
        commtrace.reading.pack.pack(tmp_path / "log", tmp_path / "packed", executor=Elsewhere())
    assert not (tmp_path / "packed").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(30))
def test_damaged_logs_give_equal_results(seed: int, tmp_path: Path, cluster: Any, capsys: Captured) -> None:
    training(tmp_path / "other", ranks=3, steps=6)
    assert_equal(damaged(seed, tmp_path), tmp_path / "other", cluster, capsys)


def many_segments(folder: Path, segments: int = 24) -> Path:
    """Write a log that takes a while to read: two ranks with many segments."""
    for rank in range(2):
        process = LogFactory(folder / "log").process(rank, pid=4711 + rank).known()
        for part in range(segments):
            steps = range(part * 3, part * 3 + 3)
            process.write(record(step=step, seq=step, payload=step << 8, **times_at(step + 1)) for step in steps)
        process.end()
    return folder / "log"


def slow_down(client: Any, seconds: float) -> None:
    """Make the workers wait before they read a segment."""

    def wait() -> None:
        import time

        from commtrace.reading.segment_reader import Segment

        slots = Segment.slots

        def slow(self: Any, *arguments: Any) -> Any:
            time.sleep(seconds)
            return slots(self, *arguments)

        setattr(Segment, "slots", slow)  # noqa: B010

    client.run(wait)


def kill_one(client: Any) -> None:
    """Kill a worker that has results in memory and work to do."""
    pids = client.run(os.getpid)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        busy, has = client.processing(), client.has_what()
        for worker, pid in pids.items():
            if busy.get(worker) and len(has.get(worker, ())) > 1:
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.01)
    raise AssertionError("no worker was busy")


def with_a_kill(client: Any, command: Sequence[object], capsys: Captured, log: Path) -> tuple[object, ...]:
    """Return the results of a command during which a worker is killed."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(kill_one, client)
        killed_results = results([*map(str, command), "--dask", address(client)], capsys, log)
        done.result(SECONDS)
    return killed_results


def test_a_worker_that_is_killed_changes_nothing(tmp_path: Path, killed_cluster: Any, capsys: Captured) -> None:
    log = many_segments(tmp_path)
    command = ("report", log, "--json")
    expected = results(command, capsys, log)
    assert expected[0] == 0
    slow_down(killed_cluster, 0.05)
    before = {*killed_cluster.run(os.getpid).values()}
    assert with_a_kill(killed_cluster, command, capsys, log) == expected
    assert before - {*killed_cluster.run(os.getpid).values()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["check", "diff", "scaling", "pack"])
def test_a_worker_that_is_killed_changes_no_command(
    command: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commtrace.reading.pack.PART_ROWS", 3)
    log, other = many_ranks(tmp_path / "log", 24), many_ranks(tmp_path / "other", 12)
    out = tmp_path / "packed"
    arguments = {
        "check": ("check", log, "--against", other),
        "pack": ("pack", log, "--out", out, "--force"),
    }.get(command, (command, log, other, "--json"))
    expected = results(arguments, capsys, log), contents(out)
    for client in started(4):
        slow_down(client, 0.05)
        before = {*client.run(os.getpid).values()}
        assert (with_a_kill(client, arguments, capsys, log), contents(out)) == expected
        assert before - {*client.run(os.getpid).values()}


def many_ranks(folder: Path, ranks: int) -> Path:
    """Write a log of many ranks, which `diff` and `scaling` read rank by rank."""
    training(folder, ranks=ranks, steps=6)
    return folder


@pytest.mark.exhaustive
def test_workers_that_die_again_and_again_are_an_error(tmp_path: Path, killed_cluster: Any, capsys: Captured) -> None:
    log = many_segments(tmp_path)

    def allow_failures(number: int, dask_scheduler: Any) -> int:
        before, dask_scheduler.allowed_failures = dask_scheduler.allowed_failures, number
        return int(before)

    killed_cluster.wait_for_workers(2, SECONDS)
    slow_down(killed_cluster, 0.05)
    allowed = killed_cluster.run_on_scheduler(allow_failures, 0)
    status, _, error = with_a_kill(killed_cluster, ("report", log), capsys, log)
    killed_cluster.run_on_scheduler(allow_failures, allowed)
    assert status == 2
    assert re.fullmatch(
        r"commtrace: commtrace-(?:fold|match)-\w+: 1 worker died while reading it, the last on tcp://[\d.:]+, "
        r"probably because memory ran out; give workers more memory\n", str(error),
    )  # fmt: skip


@pytest.fixture
def scheduler_file(tmp_path: Path) -> Iterator[Path]:
    """Yield the scheduler file of a cluster whose scheduler and two workers are processes."""
    file = tmp_path / "scheduler.json"
    options = {
        "scheduler": ["--port", "0", "--no-dashboard"],
        "worker": ["--nthreads", "1", "--no-dashboard", "--no-nanny"],
    }
    with contextlib.ExitStack() as stack:
        for kind in ("scheduler", "worker", "worker"):
            command = [sys.executable, "-m", "dask", kind, "--scheduler-file", file, "--no-dashboard", *options[kind]]
            process = subprocess.Popen(
                command, cwd=tmp_path, env=processes.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait, SECONDS)
            stack.callback(process.terminate)
            end = time.monotonic() + SECONDS
            while not file.exists() and time.monotonic() < end:
                time.sleep(0.05)
        yield file


def test_a_scheduler_file_and_run_tables(scheduler_file: Path, tmp_path: Path, capsys: Captured) -> None:
    log = many_segments(tmp_path, segments=3)
    for command in (("report", log, "--json"), ("diff", log, log, "--json")):
        expected = results(command, capsys, log)
        assert results([*command, "--dask", scheduler_file], capsys, log) == expected
    run = open_run(log)
    with distributed.Client(scheduler_file=str(scheduler_file), set_as_default=False) as client:
        tables = run.tables(client)
    for name, table in run.tables().items():
        assert_frame_equal(tables[name], table, check_exact=True)


def error_of(arguments: Sequence[object], capsys: Captured) -> str:
    """Return the only line on stderr of a command that fails."""
    assert main([*map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("commtrace: ")


def test_another_version_on_workers(
    tmp_path: Path, cluster: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path)
    monkeypatch.setattr(commtrace, "__version__", "9.0")
    line = error_of(["report", tmp_path, "--dask", address(cluster)], capsys)
    assert re.fullmatch(
        r"worker tcp://\S+: has commtrace 0.1.0, but this process has 9.0; "
        r"install the same version of commtrace for this process, the scheduler and all workers", line,
    )  # fmt: skip


def test_workers_that_do_not_see_the_log(tmp_path: Path, cluster: Any) -> None:
    training(tmp_path / "log")
    run = open_run(tmp_path / "log")
    (tmp_path / "log").rename(tmp_path / "moved")
    with pytest.raises(LogError, match=r"log/\S+: worker tcp://\S+ has no such folder; mount it there under the same"):
        run.tables(cluster)


def test_a_segment_that_workers_cannot_read_is_a_note(tmp_path: Path, cluster: Any) -> None:
    training(tmp_path)
    notes = []
    for executor in (None, cluster):
        run = open_run(tmp_path)
        path = run.processes[1].segments[0].path
        content = path.read_bytes()
        path.unlink()
        path.mkdir()
        tables = run.tables(executor)
        path.rmdir()
        path.write_bytes(content)
        assert tables["coverage"]["records"].tolist() == [7]
        notes.append(tables["notes"])
    assert_frame_equal(notes[0], notes[1])
    (note,) = notes[0].itertuples(index=False)
    assert tuple(note) == ("unreadable", str(path), "is a directory", "its records are left out")


def test_schedulers_that_are_not_there(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path)
    line = error_of(["check", tmp_path, "--dask", tmp_path / "none.json"], capsys)
    assert line.startswith(f"--dask {tmp_path / 'none.json'}: no such scheduler file; give an address such as")
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        line = error_of(["check", tmp_path, "--dask", f"127.0.0.1:{free_port()}"], capsys)
    assert re.fullmatch(r"--dask 127.0.0.1:\d+: no scheduler answers \(.+\); start one \(dask scheduler\), .+", line)
    for wrong in ("http://127.0.0.1:1", "tls://127.0.0.1:1"):  # a client that fails so keeps the process alive
        assert "no scheduler answers" in error_of(["check", tmp_path, "--dask", wrong], capsys)
    file = tmp_path / "scheduler.json"
    for text in ("", "{}", "[]"):
        file.write_text(text)
        assert f"--dask {file}: not a scheduler file; " in error_of(["check", tmp_path, "--dask", file], capsys)
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = error_of(["check", tmp_path, "--dask", "local:2"], capsys)
    assert line == "--dask: needs distributed; pip install 'commtrace[dask]'"


def test_a_cluster_without_workers(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    training(tmp_path)
    monkeypatch.setattr("commtrace.reading.dask_executor.WORKERS_TIMEOUT_SECONDS", 0.5)
    for client in started(0):
        status, _, errors = results(["report", tmp_path, "--dask", address(client)], capsys, tmp_path)
    waits, failed = str(errors).splitlines()
    assert status == 2
    assert re.fullmatch(r"commtrace: scheduler tcp://\S+ has no workers; waiting for one", waits)
    assert re.fullmatch(
        r"commtrace: scheduler tcp://\S+: had no workers for 0.5 s; start some: dask worker tcp.+", failed
    )


def test_progress_is_shown_on_a_terminal(
    tmp_path: Path, cluster: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = many_segments(tmp_path, segments=3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["report", str(log), "--json", "--dask", address(cluster)]) == 0
    shown = capsys.readouterr().err
    assert "fold" in shown
    assert "100%" in shown
