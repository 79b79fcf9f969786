"""Processes of simulated ranks: a few run at a time, not counting those that wait for messages of others."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from commtrace.launchers import VARIABLE_PREFIXES

from .isolation.file_changes import FileChange, file_changes
from .isolation.network_writers import switched_off
from .isolation.policy import Isolation, Writes

CUDA_REQUIRED: Final = "cuda-required"
"""File in `SimulatedJob.messages`, written by a rank that failed because it requires CUDA."""

_POLL_SECONDS: Final = 0.02
_STACK_TRACE_SECONDS: Final = 2.0
"""Time for a rank to write its stacks before it is killed."""
_PROGRESS_SECONDS: Final = 10.0
_FULL_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class DryRunRequest:
    """Arguments of a dry run."""

    command: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str]  # variables of the program, which switch on tracing into `out`
    world_size: int  # number of ranks of the job
    ranks: str  # the ranks to run: "0,60-63", "all", or "all-distinct"
    out: Path  # absolute path of the directory for the log
    ranks_per_node: int  # number of ranks of the job on each host
    device: str | None  # "cpu", "cuda" for simulated devices; None: CUDA if the program requires it
    jobs: int  # number of ranks to run at once, not counting those that wait for messages
    timeout_s: float  # seconds after which a rank is stopped
    writes: Writes  # what happens to files that the program changes
    shows_output: bool = True  # whether the output of the first rank goes to this process's stdout and stderr


@dataclass(frozen=True)
class SimulatedJob:
    """A job whose ranks are simulated."""

    request: DryRunRequest  # what to run; its command begins with the path of the program
    device: str  # "cuda" for simulated devices, "cpu", or "any": the CPU, but a rank that requires CUDA reports it
    run: str  # the id of the run
    folder: Path  # an empty directory for everything that the ranks write: logs, output, messages, changed files
    shm: Path  # the same in shared memory, for their rings
    shown_rank: int | None  # the rank whose output goes to this process's stdout and stderr

    @property
    def messages(self) -> Path:
        """The directory of the ranks' messages to each other."""
        return self.folder / "messages"

    @property
    def rings(self) -> Path:
        """The directory of the recorders' rings."""
        return self.shm / "rings"

    def isolation_of(self, rank: int, log: Path) -> Isolation:
        """Return how a rank is isolated from the user's files and from other ranks."""
        name = f"layer-{rank:05d}"
        hidden, shared = [self.folder, self.shm], [self.messages, self.rings, log]
        return Isolation(self.request.writes, self.folder / name, self.shm / name, hidden, shared)

    def environment_of(self, rank: int, log: Path) -> dict[str, str]:
        """Return the environment of a rank, as torchrun sets it. The ranks fill one host after the other."""
        request = self.request
        kept = {name: value for name, value in request.environment.items() if not name.startswith(VARIABLE_PREFIXES)}
        local_size = min(request.ranks_per_node, request.world_size)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": request.world_size,
            "LOCAL_RANK": rank % local_size,
            "LOCAL_WORLD_SIZE": local_size,
            "NODE_RANK": rank // local_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,  # nothing connects to it
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": 1,  # compiled code would compute
            "COMMTRACE": log,
            "COMMTRACE_SHM": self.rings,
            "COMMTRACE_SIMULATED": f"0:{self.run}:{self.device}:{request.writes.value}:{self.messages}",
        }
        if request.writes is not Writes.ALLOW:
            kept = switched_off(kept)
        defaults = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cuda" if self.device == "cuda" else "cpu"}
        return {**defaults, **kept, **{name: str(value) for name, value in variables.items()}}


@dataclass(frozen=True)
class RankOutcome:
    """Outcome of a rank: exit status (negative: a signal), seconds without waiting, peak resident memory."""

    rank: int
    status: int
    seconds: float
    peak_bytes: int
    log: Path
    output: Path
    timed_out: bool
    changes: Sequence[FileChange]  # files that it changed in its private layer
    full_disk: str  # the directory whose disk had no room for these files, or ""

    @property
    def failure(self) -> str:
        """How the rank failed, or ""."""
        if not self.status:
            return ""
        if self.timed_out:
            return f"did not finish within {self.seconds:.0f} s (increase --timeout)"
        if self.status < 0:
            return f"was killed by signal {-self.status}"
        return f"exited with status {self.status}"


def run_ranks(job: SimulatedJob, ranks: Iterable[int], outcomes: dict[int, RankOutcome]) -> None:
    """Run ranks, and others whose messages they need, until all are done or one has failed.

    Ranks with an outcome are not run again; new outcomes are added.
    """
    job.messages.mkdir(parents=True, exist_ok=True)
    ready = [rank for rank in ranks if rank not in outcomes]
    running: dict[int, _Process] = {}
    reported = time.monotonic()
    try:
        while ready or running:
            waits = {rank: wait for rank, process in running.items() if (wait := process.awaited_message())}
            for source, _ in waits.values():
                if source not in running and source not in outcomes:
                    ready = [source, *(rank for rank in ready if rank != source)]
            # The first rank runs alone, because most others wait for its messages.
            while ready and len(running) - len(waits) < (job.request.jobs if outcomes else 1):
                rank = ready.pop(0)
                running[rank] = _Process(job, rank)
            if len(waits) == len(running):
                _break_deadlock(job, running, waits)
            time.sleep(_POLL_SECONDS)
            for rank, process in [*running.items()]:
                outcome = process.poll(waits=rank in waits)
                if outcome is not None:
                    del running[rank]
                    outcomes[rank] = outcome
                    (job.messages / f"done-{rank:05d}").touch()
                    if outcome.status:
                        return
                    if ready or running:
                        _print_progress(f"rank {rank}: done, {outcome.seconds:.0f} s")
            if time.monotonic() > reported + _PROGRESS_SECONDS:
                reported = time.monotonic()
                for process in running.values():
                    _print_progress(process.progress())
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()


def _break_deadlock(job: SimulatedJob, running: Mapping[int, _Process], waits: Mapping[int, tuple[int, int]]) -> None:
    """Let one rank continue without the message that it waits for, if all ranks wait and none has one to read.

    Ranks are checked one after the other, and the unchecked ones may still send. A rank that still waits as in `waits`
    has not run since `waits` was read. If this is true of all, none has run since, and none can send any more.
    """
    for rank, process in running.items():
        is_skipping = (job.messages / f"skip-{rank:05d}").exists()
        if is_skipping or process.awaited_message() != waits[rank] or process.may_continue():
            return
    (job.messages / f"skip-{min(running):05d}").touch()


def _print_progress(line: str) -> None:
    print(f"commtrace: dry run: {line}", file=sys.stderr, flush=True)


class _Process:
    """Process of a running rank."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        self._job, self._rank = job, rank
        self._log, self._output = (job.folder / f"{kind}-{rank:05d}" for kind in ("log", "output"))
        self._isolation = job.isolation_of(rank, self._log)
        self._isolation.make_folders()
        with open(self._output, "wb") as file:
            stream = None if rank == job.shown_rank else file
            self._process = subprocess.Popen(
                self._isolation.command(job.request.command),
                env={**job.environment_of(rank, self._log), **self._isolation.environment()},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._seconds, self._polled, self._timed_out = 0.0, time.monotonic(), False

    def poll(self, *, waits: bool) -> RankOutcome | None:
        """Return the outcome if the rank has ended. Stop it if it has run too long, not counting waits."""
        pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
        now = time.monotonic()
        self._seconds += 0.0 if waits else now - self._polled
        self._polled = now
        if pid:
            self._process.returncode = status = os.waitstatus_to_exitcode(status)
            self.kill()  # the processes that it started
            return RankOutcome(
                self._rank,
                status,
                self._seconds,
                usage.ru_maxrss << 10,
                self._log,
                self._output,
                self._timed_out,
                *self._changes(),
            )
        if self._seconds > self._job.request.timeout_s + _STACK_TRACE_SECONDS:
            self.kill()
        elif self._seconds > self._job.request.timeout_s and not self._timed_out:
            self._timed_out = True
            # On SIGABRT, a simulated rank writes the stacks of its threads and ends. It must not leave a core file.
            with contextlib.suppress(OSError):
                resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))
                os.killpg(self._process.pid, signal.SIGABRT)
        return None

    def _changes(self) -> tuple[list[FileChange], str]:
        """Return what the rank changed in its layer, and the directory if its disk is full. Remove the layer."""
        changes, full_disk = [], ""
        if self._isolation.writes is Writes.PRIVATE:
            changes = file_changes(self._isolation.folder)
            if shutil.disk_usage(self._job.folder).free < _FULL_BYTES:
                full_disk = str(self._job.folder.parent)
        self._isolation.remove_folders()  # now: those of all ranks could fill the disk
        return changes, full_disk

    def awaited_message(self) -> tuple[int, int] | None:
        """Return the sender that this rank waits for, and the bytes read from the sender's file; None: no wait."""
        text = self._read_file("waits").split()
        return (int(text[0]), int(text[1])) if text else None

    def may_continue(self) -> bool:
        """Return whether this rank does not wait, or the sender that it waits for has sent more or has ended."""
        wait = self.awaited_message()
        if wait is None:
            return True
        source, read_bytes = wait
        with contextlib.suppress(OSError):
            if (self._job.messages / f"rank-{source:05d}.bin").stat().st_size > read_bytes:
                return True
        return (self._job.messages / f"done-{source:05d}").exists()

    def _read_file(self, name: str) -> str:
        """Return the text of a file that the rank writes."""
        with contextlib.suppress(OSError):
            return (self._job.messages / f"{name}-{self._rank:05d}").read_text()
        return ""

    def progress(self) -> str:
        """Return a progress line."""
        wait = self.awaited_message()
        waits = f", waiting for rank {wait[0]}" if wait else ""
        return f"rank {self._rank}: {self._seconds:.0f} s, {int(self._read_file('calls') or 0):,} calls{waits}"

    def kill(self) -> None:
        """Kill the rank and the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the rank has ended."""
        self._process.wait()
