"""Start real programs with a time limit, and read what they left without commtrace's own reader.

Everything that a test starts is in its own session, and is killed when the test ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import recorders

from commtrace.identity import RankIdentity as RankIdentity
from commtrace.recording.recorder import Recorder as Recorder
from commtrace.recording.recovery import recover_records
from commtrace.recording.ring import Ring
from commtrace.recording.slots import Slots
from commtrace.schema import RECORD
from commtrace.settings import Settings as Settings

LIMIT_SECONDS = 60
PROGRAMS = Path(__file__).with_name("programs")
NATIVE_PROGRAMS = Path(__file__).with_name("native_programs")
ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")

Records = npt.NDArray[np.void]

# Prefixes of variables by which the tests' own launcher would make their programs its ranks.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "COMMTRACE")


def environment(**changes: object) -> dict[str, str]:
    """Return a program's environment: no launcher's variables, one thread, no accelerator, the Python recorder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    quiet = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        "COMMTRACE_RECORDER": "python",
        "PYTHONPATH": str(ROOT),  # for `examples`, which no installation contains
    }
    return {**kept, **quiet, **{name: str(value) for name, value in changes.items()}}


class Result(NamedTuple):
    """How a program ended (a negative status is a signal) and what it wrote."""

    status: int
    out: str
    err: str


def run(
    arguments: Sequence[str | Path], *, limit: float = LIMIT_SECONDS, cwd: Path | None = None, **variables: Any
) -> Result:
    """Run a program and everything that it starts to the end. Fail the test after `limit` seconds."""
    with subprocess.Popen(
        [str(argument) for argument in arguments],
        env=environment(**variables),
        cwd=cwd or tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)
            out, err = process.communicate()
            raise AssertionError(f"no end after {limit} s\n{out}\n{err}") from None
        finally:
            kill_group(process.pid)
    return Result(process.returncode, out, err)


def python(code: str, *, limit: float = LIMIT_SECONDS, cwd: Path | None = None, **variables: Any) -> Result:
    """Run Python code."""
    return run([sys.executable, "-c", code], limit=limit, cwd=cwd, **variables)


def members(session: int, known: Iterable[int] = ()) -> set[int]:
    """Return the processes of a session, the `known` ones, and their descendants, unless they have ended.

    MPI launchers start ranks in their own sessions.
    """
    parents: dict[int, int] = {}
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, _, its_session, *fields = stat.read_text().rpartition(")")[2].split()
            threads = int(fields[13])  # a zombie's other threads may still run, and keep its files open
            if state != "Z" or threads > 1:
                number = int(stat.parent.name)
                parents[number] = int(parent)
                if int(its_session) == session or number in known:
                    pids.add(number)
    while more := {number for number, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


def kill_group(session: int) -> None:
    """Kill what is left of a session. All processes are stopped first, so that none observes the end of another."""
    left: set[int] = set()
    while left := members(session, left):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, number)
        time.sleep(0.002)


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Wait until the condition is true. Fail the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.005)


# ---- recording without a library -------------------------------------------------------------------------------------


def recorder(directory: Path, rank: int = 0, **settings: object) -> Recorder:
    """Return a Python recorder with its own ring and log."""
    return recorder_of("python", directory, rank, **settings)


def recorder_of(kind: str, directory: Path, rank: int = 0, **settings: object) -> Recorder:
    """Return a recorder as `recorder` does; if `kind` is "native", with the slots of the native recorder."""
    make_slots = Slots if kind == "python" else native_slots
    rank_identity = RankIdentity(rank, 1)
    return Recorder(Settings(str(directory), **settings), rank_identity, blind_spots=[], make_slots=make_slots)


NewRecorder = Callable[..., Recorder]
"""A function like `recorder`, for one kind of recorder."""


def native_slots(ring: Ring) -> Slots:
    """Return the native recorder's slots, for use from Python, as by the hooks that are not in C++."""
    from commtrace.hooks.native.native_slots import NativeSlots

    return NativeSlots(ring, recorders.library(), sites=True, device_times=False)


def call(recorder: Recorder, number: int = 0, **fields: int) -> int:
    """Begin a call whose fields follow from its number, so that a mixed-up record is detected."""
    known = {
        "kind": 1, "group": 1, "seq": number, "payload": 8 * number, "local": number, "peer": -1, "tag": -1,
        "site": number % 1000, "step": -1, "micro_batch": -1, "batch": 0, "phase": 0, "flags": 0,
    }  # fmt: skip
    return recorder.begin(**{**known, **fields})


def assert_whole(records: Records) -> None:
    """Assert that `call` made every record."""
    assert (records["payload"] == 8 * records["seq"].astype(np.int64)).all()
    assert (records["local"] == records["seq"]).all()
    assert (records["site"] == records["seq"] % 1000).all()
    assert (records["t_begin"] > 0).all()


def in_child(work: Callable[[], object], limit: float = 20) -> int:
    """Call `work` in a forked child, which ends by os._exit. Return its status, or a signal's negative number."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            work()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            os._exit(status)
    return wait_pid(pid, limit)


def wait_pid(pid: int, limit: float = 20) -> int:
    """Return the status of a child. Kill it and fail the test after `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"no end after {limit} s")
        time.sleep(0.002)


# ---- what processes left ---------------------------------------------------------------------------------------------


class Left(NamedTuple):
    """What a process left: its tables by name, and all its records."""

    stem: str
    tables: dict[str, list[dict[str, Any]]]
    records: Records

    @property
    def stats(self) -> dict[str, Any]:
        """The last counters."""
        return self.tables["stats"][-1]

    @property
    def ended(self) -> bool:
        """Whether the process finished its log."""
        return "end" in self.tables


def rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of a tables file, whose last line may be incomplete."""
    for line in data.split(b"\n")[:-1]:
        yield json.loads(line)


def segment(path: Path) -> Records:
    """Return the records of a segment, read as docs/reference/log-format.md describes it."""
    body = path.read_bytes()[1024:]
    return np.frombuffer(body[: len(body) // RECORD.itemsize * RECORD.itemsize], RECORD)


def read(path: Path) -> Left:
    """Return what the process with this tables file left."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows(path.read_bytes()):
        tables.setdefault(row.pop("table"), []).append(row)
    segments = [segment(file) for file in sorted(path.parent.glob(path.stem + ".*.npy*"))]
    return Left(path.stem, tables, np.concatenate([np.zeros(0, RECORD), *segments]))


def read_all(directory: Path) -> list[Left]:
    """Return what every process in a log directory left, by rank and pid."""
    return [read(path) for path in sorted(directory.glob("*/*/*.jsonl"), key=lambda path: path.stem)]


def read_one(directory: Path) -> Left:
    """Return what the only process in a log directory left."""
    (left,) = read_all(directory)
    return left


def salvaged(directory: Path) -> list[Left]:
    """Recover the records of killed processes, and read as `read_all` does."""
    recover_records(directory)
    return read_all(directory)


def rings(directory: Path) -> list[Path]:
    """Return the rings in shared memory that belong to this log directory or to one below it."""
    prefix = json.dumps(str(directory)).encode()[:-1]
    return [path for path in SHM.glob("commtrace-*.ring") if re.search(re.escape(prefix) + b'["/]', _head(path))]


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(8192)
    except FileNotFoundError:
        return b""


def clean_shm(directory: Path) -> None:
    """Remove what a test's processes left in shared memory on purpose."""
    for path in rings(directory):
        path.unlink(missing_ok=True)
        path.with_suffix(".jsonl").unlink(missing_ok=True)
