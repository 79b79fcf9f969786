"""The processes of simulated ranks: a few at a time, each run again until it has the messages that it waits for."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from commtrace.launchers import VARIABLE_PREFIXES

from .rank_messages import WAITING

_POLL_SECONDS: Final = 0.02
_STACK_TRACE_SECONDS: Final = 2.0
"""Time for a rank to write its stacks before it is killed."""


@dataclass(frozen=True)
class SimulatedJob:
    """What the processes run."""

    command: Sequence[str]  # the program, by its path, and its arguments
    environment: Mapping[str, str]  # variables of the program
    world_size: int  # number of ranks of the job
    ranks_per_node: int  # number of ranks on each host
    run: str  # the id of the run
    folder: Path  # an empty directory for all that the ranks write: logs, output, messages
    timeout_s: float  # seconds after which a rank is ended
    shown_rank: int = -1  # the rank whose output goes to this process's stdout and stderr; -1: none

    @property
    def mail(self) -> Path:
        """The directory of the ranks' messages to each other."""
        return self.folder / "mail"

    def environment_of(self, rank: int, log: Path) -> dict[str, str]:
        """Return the variables of a rank as torchrun sets them; the ranks fill one host after the other."""
        kept = {name: value for name, value in self.environment.items() if not name.startswith(VARIABLE_PREFIXES)}
        local_size = min(self.ranks_per_node, self.world_size)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % local_size,
            "LOCAL_WORLD_SIZE": local_size,
            "NODE_RANK": rank // local_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,  # nothing connects to it
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": 1,  # compiled code would compute
            "COMMTRACE": log,
            "COMMTRACE_SIMULATED": f"0:{self.run}:{self.mail}",
        }
        defaults = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        return {**defaults, **kept, **{name: str(value) for name, value in variables.items()}}


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended: its exit status (negative: a signal), seconds, and peak of resident memory."""

    rank: int
    status: int
    seconds: float
    peak_bytes: int
    log: Path
    output: Path
    timed_out: bool = False


def run_ranks(job: SimulatedJob, ranks: Iterable[int], jobs: int, outcomes: dict[int, RankOutcome]) -> None:
    """Run ranks, and others whose messages they need, until all are done or one has failed.

    Args:
        job: What to run.
        ranks: The ranks; those with an outcome are not run again.
        jobs: Number of ranks to run at once.
        outcomes: Outcomes of earlier calls; those of this call are added.
    """
    _Scheduler(job, outcomes).run([*ranks], jobs)


class _Wait(NamedTuple):
    """The rank whose messages a rank waits for, and the bytes that it had sent by then."""

    source: int
    sent: int


class _Scheduler:
    def __init__(self, job: SimulatedJob, outcomes: dict[int, RankOutcome]) -> None:
        self._job, self._outcomes = job, outcomes
        self._attempts = len(outcomes)
        self._ready: list[int] = []
        self._waiting: dict[int, _Wait] = {}
        self._running: dict[Future[RankOutcome], int] = {}
        job.mail.mkdir(parents=True, exist_ok=True)

    def run(self, ranks: Sequence[int], jobs: int) -> None:
        self._ready = [rank for rank in ranks if rank not in self._outcomes]
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while self._ready or self._running or self._waiting:
                    self._start(pool, jobs)
                    if not self._collect():
                        break
            finally:
                for process in list(_alive):
                    _kill(process)

    def _start(self, pool: ThreadPoolExecutor, jobs: int) -> None:
        if not self._ready and not self._running:
            # All wait for each other: one continues without the message.
            rank, waits_for = next(iter(self._waiting.items()))
            (self._job.mail / f"done-{waits_for.source:05d}").touch()
            del self._waiting[rank]
            self._ready.append(rank)
        # The first rank runs alone: most others wait for messages of it.
        jobs = jobs if self._outcomes else 1
        while self._ready and len(self._running) < jobs:
            rank = self._ready.pop(0)
            self._attempts += 1
            self._running[pool.submit(_attempt, self._job, rank, self._attempts)] = rank

    def _collect(self) -> bool:
        """Handle the ranks that have ended. Returns False if one has failed."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            rank = self._running.pop(future)
            outcome = future.result()
            if outcome.status == WAITING:
                self._wait(rank)
            else:
                self._outcomes[rank] = outcome
                (self._job.mail / f"done-{rank:05d}").touch()
                if outcome.status:
                    return False
            self._wake(rank)
        return True

    def _wait(self, rank: int) -> None:
        source = int((self._job.mail / f"wants-{rank:05d}").read_text())
        self._waiting[rank] = _Wait(source, self._sent_bytes(source))
        if source in self._outcomes:
            self._wake(source)
        elif source not in {*self._ready, *self._waiting, *self._running.values()}:
            self._ready.insert(0, source)

    def _wake(self, source: int) -> None:
        """Run the ranks again that waited for a message of `source`, which has ended, if it has sent more."""
        for rank, waits_for in list(self._waiting.items()):
            more = source in self._outcomes or self._sent_bytes(source) > waits_for.sent
            if waits_for.source == source and more:
                del self._waiting[rank]
                self._ready.insert(0, rank)

    def _sent_bytes(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return (self._job.mail / f"rank-{rank:05d}.bin").stat().st_size
        return 0


# ---- one process -----------------------------------------------------------------------------------------------------

_alive: set[subprocess.Popen[bytes]] = set()


def _attempt(job: SimulatedJob, rank: int, number: int) -> RankOutcome:
    log, output = (job.folder / f"{kind}-{rank:05d}-{number}" for kind in ("log", "output"))
    start = time.monotonic()
    with open(output, "wb") as file:
        stream = None if rank == job.shown_rank else file
        process = subprocess.Popen(
            job.command,
            env=job.environment_of(rank, log),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
        _alive.add(process)
        try:
            status, peak_bytes, timed_out = _wait_for_end(process, start + job.timeout_s)
        finally:
            _alive.discard(process)
            _kill(process)
    return RankOutcome(rank, status, time.monotonic() - start, peak_bytes, log, output, timed_out)


def _wait_for_end(process: subprocess.Popen[bytes], deadline: float) -> tuple[int, int, bool]:
    """Return the exit status, the peak of memory in bytes, and whether the process was ended at its deadline."""
    timed_out = False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_maxrss << 10, timed_out
        if time.monotonic() > deadline and timed_out:
            _kill(process)
        elif time.monotonic() > deadline:
            timed_out, deadline = True, deadline + _STACK_TRACE_SECONDS
            # On SIGABRT a simulated rank writes the stacks of its threads, and ends. It shall leave no core file.
            with contextlib.suppress(OSError):
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
                os.killpg(process.pid, signal.SIGABRT)
        time.sleep(_POLL_SECONDS)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
