"""What a run measured: timed iterations on every rank, gathered on rank 0."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import commtrace
from commtrace.launchers import usable_cores

from .errors import ExampleError
from .stopwatch import EXCLUSIVE
from .transports import Traffic, Transport


@dataclass
class RankOutcome:
    """One rank's share."""

    host: str
    cores: int
    """That the process may run on."""
    seconds: float
    """Of an iteration, mean."""
    parts: dict[str, float]
    """Seconds of an iteration by part; those of `stopwatch.EXCLUSIVE` and "compute" add up to `seconds`."""
    traffic: list[tuple[str, int, int]]
    """Of an iteration: operation, payload (bytes), calls."""
    cpu: float
    """CPU seconds per second of iterations. MPI polls while it waits, so less than 1 means that the core was taken."""
    losses: list[str]
    """Of every iteration, warm-up included, as hexadecimal floats, which say every bit; this rank's own."""
    digest: str
    """Of the last iteration's results."""
    error: float | None = None
    """Largest difference from one process, relative to the largest number of the tensor; None: not checked."""


@dataclass
class Outcome:
    """All ranks' shares, and what was run."""

    workload: str
    mode: str
    settings: dict[str, Any]
    tokens: int
    """In one iteration, of all ranks."""
    ranks: list[RankOutcome] = field(default_factory=list)

    @property
    def slowest(self) -> RankOutcome:
        """The rank whose iterations took longest: the time of the run is its time."""
        return max(self.ranks, key=lambda rank: rank.seconds)

    def mean(self, part: str) -> float:
        """Seconds of an iteration that a rank spends on a part, mean over the ranks: one waits where another works."""
        return sum(rank.parts.get(part, 0.0) for rank in self.ranks) / len(self.ranks)

    @property
    def had_cores(self) -> float:
        """The share of the time in which the ranks had their cores, mean: less than 1 where others took them."""
        # Where torch.distributed waits, it sleeps: then CPU time says nothing.
        polls = str(self.settings["transport"]).startswith("mpi")
        return min(1.0, sum(rank.cpu for rank in self.ranks) / len(self.ranks)) if polls else 1.0

    @property
    def oversubscribed(self) -> tuple[int, int] | None:
        """Ranks and cores of a host where several ranks share a core, if there is one."""
        hosts = Counter(rank.host for rank in self.ranks)
        cores = {rank.host: rank.cores for rank in self.ranks}
        threads = int(self.settings.get("threads", 1))
        return next(((n, cores[host]) for host, n in hosts.items() if n * threads > cores[host]), None)

    def write(self, path: str) -> None:
        """As JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> Outcome:
        """What `write` wrote. Raises ExampleError where it did not."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            content["ranks"] = [RankOutcome(**rank) for rank in content["ranks"]]
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExampleError(f"{path} is not what a run writes with --json ({error})") from error


def measure(
    iterate: Callable[[int], torch.Tensor], transport: Transport, others: Sequence[Transport], warmup: int, timed: int
) -> RankOutcome:
    """Run `iterate(step)`, which gives this rank's loss, so many times. Calls of the timed ones are counted.

    Every iteration is a step of the trace, those of the warm-up too. `others`: transports that `iterate` uses beside.
    """
    watch = transport.watch
    losses = []
    cpu = 0.0
    for step in range(warmup + timed):
        if step == warmup:
            transport.barrier()  # no rank is timed while others still warm up; and not within what is timed
            watch.seconds.clear()
            cpu = time.process_time()
            for one in (transport, *others):
                one.traffic.clear()
        commtrace.step()
        with watch("iteration"):
            loss = iterate(step)
        losses.append(float(loss).hex())
    cpu = time.process_time() - cpu
    parts = {name: seconds / timed for name, seconds in watch.seconds.items()}
    seconds = parts.pop("iteration")
    parts["compute"] = seconds - sum(parts.get(name, 0.0) for name in EXCLUSIVE)
    return RankOutcome(
        host=socket.gethostname(),
        cores=usable_cores(),
        seconds=seconds,
        parts=parts,
        traffic=_per_iteration([one.traffic for one in (transport, *others)], timed),
        cpu=cpu / (seconds * timed),
        losses=losses,
        digest="",
    )


def _per_iteration(traffics: Iterable[Traffic], timed: int) -> list[tuple[str, int, int]]:
    total: Traffic = Counter()
    for one in traffics:
        total.update(one)
    assert all(calls % timed == 0 for calls in total.values()), "iterations differ"
    return [(op, payload, calls // timed) for (op, payload), calls in sorted(total.items())]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of every bit of these tensors."""
    value = hashlib.sha256()
    for tensor in tensors:
        value.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return value.hexdigest()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number that was expected."""
    scale = expected.abs().max().item() or 1.0
    return (found - expected).abs().max().item() / scale
