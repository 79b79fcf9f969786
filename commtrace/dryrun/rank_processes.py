"""Runs simulated ranks, a few at a time, each in a process of its own, until each has had the mail it waits for."""

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
from typing import Final

from commtrace.launchers import VARIABLE_PREFIXES

from .rank_messages import WAITING

_POLL_SECONDS: Final = 0.02
_LAST_WORDS_SECONDS: Final = 2.0


@dataclass(frozen=True)
class SimulatedJob:
    """What is run: a command, as a rank of so many."""

    command: Sequence[str]
    environment: Mapping[str, str]
    world_size: int
    ranks_per_node: int
    run: str
    folder: Path
    """Of everything that the ranks leave: logs, output, mail. An empty one."""
    limit_seconds: float
    shown: int = -1
    """The rank whose output goes where ours does."""

    @property
    def mail(self) -> Path:
        """Where ranks leave messages for each other."""
        return self.folder / "mail"

    def environment_of(self, rank: int, log: Path) -> dict[str, str]:
        """As torchrun would set it, of one host after the other."""
        kept = {name: value for name, value in self.environment.items() if not name.startswith(VARIABLE_PREFIXES)}
        local = min(self.ranks_per_node, self.world_size)
        told = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": rank % local,
            "LOCAL_WORLD_SIZE": local,
            "NODE_RANK": rank // local,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,  # nobody listens there
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": 1,  # compiled code would compute
            "COMMTRACE": log,
            "COMMTRACE_SIMULATED": f"0:{self.run}:{self.mail}",
        }
        defaults = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        return {**defaults, **kept, **{name: str(value) for name, value in told.items()}}


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended: a status as the shell has it, negative for a signal."""

    rank: int
    status: int
    seconds: float
    peak_bytes: int
    """Of memory that was in use at once."""
    log: Path
    output: Path
    timed_out: bool = False


def run_ranks(
    job: SimulatedJob, ranks: Iterable[int], at_once: int, kept: dict[int, RankOutcome]
) -> dict[int, RankOutcome]:
    """Outcomes of these ranks, and of others that they needed something of; `kept` are those of earlier calls.

    A rank that fails ends everything: the outcomes are then those so far.
    """
    return _Simulation(job, kept).run([*ranks], at_once)


@dataclass(frozen=True)
class _Wait:
    """A rank waits for more mail of another, which had sent this much."""

    source: int
    size: int


class _Simulation:
    def __init__(self, job: SimulatedJob, kept: dict[int, RankOutcome]) -> None:
        self._job, self._outcomes = job, kept
        self._attempts = len(kept)
        self._ready: list[int] = []
        self._waiting: dict[int, _Wait] = {}
        self._running: dict[Future[RankOutcome], int] = {}
        job.mail.mkdir(parents=True, exist_ok=True)

    def run(self, ranks: Sequence[int], at_once: int) -> dict[int, RankOutcome]:
        self._ready = [rank for rank in ranks if rank not in self._outcomes]
        with ThreadPoolExecutor(at_once) as pool:
            try:
                while self._ready or self._running or self._waiting:
                    self._start(pool, at_once)
                    if not self._collect():
                        break
            finally:
                for process in list(_alive):
                    _kill(process)
        return self._outcomes

    def _start(self, pool: ThreadPoolExecutor, at_once: int) -> None:
        if not self._ready and not self._running:
            self._give_up_waiting()
        # The first one alone: most others wait for something of it.
        at_once = at_once if self._outcomes else 1
        while self._ready and len(self._running) < at_once:
            rank = self._ready.pop(0)
            self._attempts += 1
            self._running[pool.submit(_attempt, self._job, rank, self._attempts)] = rank

    def _collect(self) -> bool:
        """Take in those that have ended. False where one has failed."""
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
        self._waiting[rank] = _Wait(source, self._sent(source))
        known = {*self._outcomes, *self._ready, *self._waiting, *self._running.values()}
        if source not in known:
            self._ready.insert(0, source)
        elif source in self._outcomes:
            self._wake(source)

    def _wake(self, source: int) -> None:
        """A rank has ended, and may have sent what others wait for."""
        for rank, wanted in list(self._waiting.items()):
            more = source in self._outcomes or self._sent(source) > wanted.size
            if wanted.source == source and more:
                del self._waiting[rank]
                self._ready.insert(0, rank)

    def _give_up_waiting(self) -> None:
        """All wait for each other: one has to do without."""
        rank, wanted = next(iter(self._waiting.items()))
        (self._job.mail / f"done-{wanted.source:05d}").touch()
        del self._waiting[rank]
        self._ready.append(rank)

    def _sent(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return (self._job.mail / f"rank-{rank:05d}.bin").stat().st_size
        return 0


# ---- one process -----------------------------------------------------------------------------------------------------

_alive: set[subprocess.Popen[bytes]] = set()


def _attempt(job: SimulatedJob, rank: int, number: int) -> RankOutcome:
    log, output = (job.folder / f"{kind}-{rank:05d}-{number}" for kind in ("log", "output"))
    begun = time.monotonic()
    with open(output, "wb") as file:
        show = rank == job.shown
        process = subprocess.Popen(
            job.command,
            env=job.environment_of(rank, log),
            stdin=subprocess.DEVNULL,
            stdout=None if show else file,
            stderr=None if show else file,
            start_new_session=True,
        )
        _alive.add(process)
        try:
            status, peak, timed_out = _ended(process, begun + job.limit_seconds)
        finally:
            _alive.discard(process)
            _kill(process)
    return RankOutcome(rank, status, time.monotonic() - begun, peak, log, output, timed_out)


def _ended(process: subprocess.Popen[bytes], deadline: float) -> tuple[int, int, bool]:
    """(status, peak of memory in bytes, whether it was killed as its time was over)."""
    timed_out = False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_maxrss << 10, timed_out
        if time.monotonic() > deadline:
            if timed_out:
                _kill(process)
            else:
                timed_out, deadline = True, deadline + _LAST_WORDS_SECONDS
                _ask_where_it_is(process)
        time.sleep(_POLL_SECONDS)


def _ask_where_it_is(process: subprocess.Popen[bytes]) -> None:
    """On SIGABRT a simulated rank writes the stacks of its threads, and ends."""
    with contextlib.suppress(OSError):
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        os.killpg(process.pid, signal.SIGABRT)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """And whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
