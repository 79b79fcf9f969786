"""Logs of simulated jobs that hang: many ranks, written by the recorder's own writers, with a fault that is known.

Hosts have 8 ranks, a group of tensor parallelism. A step is two all_reduces of each such group, one of each group of
data parallelism (the ranks of a place on all hosts), and one of all ranks. In the last step, one rank is at fault. The
job was killed later, and its records were recovered on each host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from factory import KINDS as KIND_ROWS
from factory import RUN, SITES, UNIX_NS, Records, record, records

from commtrace.rank_ranges import format_rank_list
from commtrace.recording.log_writer import LogWriter
from commtrace.recording.table_lines import TableLines
from commtrace.schema import FORMAT, VERSION, Clock, State
from commtrace.settings import Settings

RANKS_OF_HOST: Final = 8
STEPS: Final = 30
STEP_NS: Final = 100_000_000
SECOND: Final = 10**9
END: Final = 60 * SECOND
"""When the job was killed, on the clock of every host."""
WORLD, TENSOR, DATA, SECOND_WORLD = 1, 2, 3, 4
ALL_REDUCE, SEND, RECV, BARRIER = 1, 3, 4, 5
DOUBLES, BROADCAST = 20, 21
_PLACE: Final = [["/usr/lib/python3.11/threading.py", 331, "wait"], ["/home/user/project/train.py", 77, "load"]]
LINE: Final = "project/train.py:77 load"
"""The program's line in every sample."""

SAMPLES: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "lock": ({"system_call": "futex"}, "waiting for a lock or thread"),
    "sleep": ({"system_call": "clock_nanosleep"}, "sleeping"),
    "data": ({"system_call": "recvfrom"}, "waiting for data"),
    "child": ({"system_call": "wait4"}, "waiting for a process"),
    "computation": ({"state": "R", "cpu_ns": SECOND // 10}, "computing"),
    "storage": ({"state": "D", "system_call": "read"}, "waiting for storage"),
    "driver": ({"system_call": "ioctl"}, "waiting"),
}
"""What a rank does instead of its next call -> the kernel's facts about its main thread, and the activity."""


@dataclass
class Job:
    """The ranks of a job, and what each recorded last."""

    ranks: int
    bad: int
    last: dict[int, list[Records]] = field(default_factory=dict)
    """Calls of the last step of each rank; it hangs in the last one, unless that is complete."""
    samples: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: dict[int, tuple[str, int]] = field(default_factory=dict)
    """How ranks ended, and when, that were not killed at the end."""
    clock_errors: dict[int, int] = field(default_factory=dict)
    """By how many seconds the wall clock was ahead when these ranks started."""

    def host(self, rank: int) -> range:
        """Return the ranks of the host of a rank."""
        first = rank - rank % RANKS_OF_HOST
        return range(first, first + RANKS_OF_HOST)

    def stop(self, rank: int, kind: str) -> None:
        """Let a rank do something else than its next call."""
        self.last.setdefault(rank, [])
        if kind:
            self.samples[rank] = SAMPLES[kind][0]

    def wait(self, absent: Iterable[int] = ()) -> None:
        """Let all other ranks go on with the last step, as far as they get without the absent ones."""
        absent = {*absent}
        hosts = {rank // RANKS_OF_HOST for rank in absent}
        in_data = {rank % RANKS_OF_HOST for host in hosts for rank in range(RANKS_OF_HOST)}
        for rank in range(self.ranks):
            if rank in self.last or rank in absent:
                continue
            if rank // RANKS_OF_HOST in hosts:
                self.last[rank] = [begun(group=TENSOR, seq=2 * STEPS)]
            elif rank % RANKS_OF_HOST in in_data:
                self.last[rank] = [*tensor_calls(STEPS), begun(group=DATA, seq=STEPS)]
            else:
                self.last[rank] = [*tensor_calls(STEPS), *data_calls(STEPS), begun(group=WORLD, seq=STEPS)]

    def reach_world(self, *, but: Iterable[int] = (), **fields: int) -> None:
        """Let all ranks but some enter the call of all ranks, with other fields if given."""
        for rank in {*range(self.ranks)} - {*but} - {*self.last}:
            self.last[rank] = in_world(**fields)

    def write(self, folder: Path) -> None:
        """Write the log."""
        done = records(
            call for step in range(STEPS) for call in (*tensor_calls(step), *data_calls(step), *all_calls(step))
        )
        for rank in range(self.ranks):
            host = f"node{rank // RANKS_OF_HOST:04d}"
            tables = TableLines()
            tables.add(
                "process",
                format=FORMAT,
                version=VERSION,
                run=RUN,
                rank=rank,
                world_size=self.ranks,
                host=host,
                pid=1000 + rank,
                boot_id=host,
                recorder="python",
                blind_spots=[],
                mono_ns=1,
                unix_ns=UNIX_NS,
            )
            for row in (*KIND_ROWS, *_MORE_KINDS):
                tables.add("kinds", **row)
            for row in SITES:
                tables.add("sites", **row)
            groups = {WORLD: range(self.ranks), TENSOR: self.host(rank), SECOND_WORLD: range(self.ranks),
                      DATA: range(rank % RANKS_OF_HOST, self.ranks, RANKS_OF_HOST)}  # fmt: skip
            for number, members in groups.items():
                tables.add("groups", id=number, ranks=format_rank_list(members), name=str(number), desc="", index=0)
            own = records([done, *self.last[rank]])
            if rank in self.samples:
                thread = {"name": "MainThread", "main": True, "state": "S", "system_call": "", "cpu_ns": 0,
                          "frames": _PLACE, **self.samples[rank]}  # fmt: skip
                tables.add("stacks", mono_ns=END - SECOND, calls=len(own), pause_ns=END - SECOND - STEPS * STEP_NS,
                           in_call=False, window_ns=SECOND // 10, threads=[thread])  # fmt: skip
            end, at = self.ended.get(rank, ("died", END))
            tables.add("stats", calls=len(own), dropped=0, removed=0, lost=0, unrecorded=0, hook_errors=0,
                       first_error=None, write_errors=0, mono_ns=at)  # fmt: skip
            if end == "exit":
                tables.add("end", mono_ns=at, unix_ns=UNIX_NS + at, reason="exit", status=0)
            else:
                tables.add("salvage", records=0, host=host, unix_ns=UNIX_NS + at)
            directory = folder / RUN / host
            writer = LogWriter(directory, f"rank{rank:05d}-{1000 + rank}", Settings(str(folder)))
            assert writer.write(tables.lines, own) == len(own)
            writer.finish(tables.lines)


_MORE_KINDS: Final = (
    {
        "id": DOUBLES,
        "op": "all_reduce",
        "variant": "allreduce_",
        "api": "torch",
        "dtype": "float64",
        "reduce_op": "sum",
    },
    {
        "id": BROADCAST,
        "op": "broadcast",
        "variant": "broadcast_",
        "api": "torch",
        "dtype": "float32",
        "reduce_op": None,
    },
)


def complete(at: int, **fields: int) -> Records:
    """Return a call that took a millisecond."""
    times = {"t_begin": at + 1, "t_return": at + 1_000_000, "t_wait": 0, "t_end": at + 1_000_000}
    return record(**{**times, "clock": Clock.RETURN, "site": 2, "step": at // STEP_NS, **fields})


def begun(at: int = STEPS * STEP_NS + STEP_NS // 2, **fields: int) -> Records:
    """Return a call that did not end."""
    times = {"t_begin": at + 1, "t_return": 0, "t_wait": 0, "t_end": 0, "clock": 0, "state": State.BEGUN}
    return record(**{**times, "site": 2, "step": STEPS, **fields})


def tensor_calls(step: int) -> list[Records]:
    """Return the calls of a step in the group of tensor parallelism."""
    return [complete(step * STEP_NS + part * 5_000_000, group=TENSOR, seq=2 * step + part) for part in range(2)]


def data_calls(step: int) -> list[Records]:
    """Return the call of a step in the group of data parallelism."""
    return [complete(step * STEP_NS + 20_000_000, group=DATA, seq=step)]


def all_calls(step: int) -> list[Records]:
    """Return the call of a step of all ranks."""
    return [complete(step * STEP_NS + 40_000_000, group=WORLD, seq=step)]


def in_world(**fields: int) -> list[Records]:
    """Return the calls of a rank that hangs in the call of all ranks."""
    return [*tensor_calls(STEPS), *data_calls(STEPS), begun(**{"group": WORLD, "seq": STEPS, **fields})]


def _stops(kind: str) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        job.stop(job.bad, kind)
        job.wait([job.bad])

    return apply


def _differs(**fields: int) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        job.last[job.bad] = in_world(**fields)
        job.reach_world()

    return apply


def _root(job: Job) -> None:
    job.last[job.bad] = in_world(kind=BROADCAST, peer=job.bad)
    job.reach_world(kind=BROADCAST, peer=0)


def _order(job: Job) -> None:
    job.last[job.bad] = in_world(group=SECOND_WORLD, seq=0)
    job.reach_world()


def _ends(how: str) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        job.stop(job.bad, "")
        job.ended[job.bad] = how, STEPS * STEP_NS + SECOND
        job.wait([job.bad])

    return apply


def _receives(tag: int) -> Callable[[Job], None]:
    """Let the next rank wait for a message; if `tag` is not 0, the bad rank sent one with another tag."""

    def apply(job: Job) -> None:
        other = (job.bad + 1) % job.ranks
        before = [*tensor_calls(STEPS), *data_calls(STEPS)]
        job.last[other] = [*before, begun(kind=RECV, peer=job.bad, tag=5, seq=0)]
        if tag:
            sent = complete(STEPS * STEP_NS + 30_000_000, kind=SEND, peer=other, tag=tag, seq=0)
            job.last[job.bad] = [*before, sent, begun(group=WORLD, seq=STEPS)]
        else:
            job.last[job.bad] = before
            job.stop(job.bad, "data")
        job.reach_world()

    return apply


def _host(job: Job) -> None:
    for rank in job.host(job.bad):
        job.stop(rank, "storage")
    job.wait(job.host(job.bad))


def _two(job: Job) -> None:
    """Let a second rank, of another host, stop for another reason: neither waits for the other."""
    other = (job.bad + RANKS_OF_HOST) % job.ranks
    job.stop(job.bad, "lock")
    job.stop(other, "sleep")
    job.wait([job.bad, other])


def _failed(job: Job) -> None:
    """Let the calls of the ranks that wait for the bad one fail by a time-out."""
    job.stop(job.bad, "child")
    job.wait([job.bad])
    for rank in job.host(job.bad):
        if rank != job.bad:
            job.last[rank] = [begun(group=TENSOR, seq=2 * STEPS, state=State.FAILED)]


def _all(job: Job) -> None:
    for rank in range(job.ranks):
        job.last[rank] = [*tensor_calls(STEPS), *data_calls(STEPS), *all_calls(STEPS)]
        job.stop(rank, "sleep")


FAULTS: Final[dict[str, tuple[Callable[[Job], None], str]]] = {
    **{kind: (_stops(kind), activity) for kind, (_, activity) in SAMPLES.items()},
    "not sampled": (_stops(""), "not known why"),
    "died": (_ends("died"), "ended without closing the log"),
    "left": (_ends("exit"), "closed the log"),
    "whole host": (_host, "waiting for storage"),
    "message": (_receives(0), "waiting for data"),
    "two hangs": (_two, "waiting for a lock or thread"),
    "time-out": (_failed, "waiting for a process"),
    "outside": (_all, "sleeping"),
    "operation": (_differs(kind=BARRIER, payload=0), "operation"),
    "size": (_differs(payload=64), "size"),
    "type": (_differs(kind=DOUBLES), "dtype"),
    "root": (_root, "root"),
    "tag": (_receives(7), "tag"),
    "order": (_order, "order"),
}
"""Faults -> how they change a job, and the activity of the culprit, or what the ranks disagree about."""


def write_hang(folder: Path, fault: str, ranks: int, bad: int, clock_errors: Mapping[int, int] | None = None) -> Job:
    """Write the log of a job with a fault, and return the job."""
    job = Job(ranks, bad, clock_errors={**(clock_errors or {})})
    FAULTS[fault][0](job)
    job.write(folder)
    return job
