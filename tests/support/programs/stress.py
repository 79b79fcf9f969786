"""stress.py ENDING SEED COUNTS: many threads, many groups, Works that are never waited for, and an abnormal end.

One rank of two. Each thread has its own groups and makes calls on them in an order that the seed decides, the same on
both ranks; each rank decides for itself whether it waits for a call or drops it. The program keeps its own counts, per
thread, group and operation, in a mapped file that outlives the process:

    COUNTS/rank0.npy        int64, (thread, group, operation, (begun, came back, payload in bytes))
    COUNTS/rank0.json       names of the groups
    COUNTS/rank0.MOMENT.npy a copy of the counts at a certain moment ("leaving", "stop0", "start0", ...)

A call counts as begun before it is made, and as come back when it returned or was refused.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
import torch.distributed
import torch.distributed._functional_collectives
from torch.utils.data import DataLoader, Dataset

import commtrace
from commtrace.network.process_exit import wait_for_threads
from commtrace.recording.session import session

dist: Any = torch.distributed  # its stubs are incomplete
functional: Any = torch.distributed._functional_collectives

OPERATIONS: Final = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send", "recv",
)  # fmt: skip
THREADS: Final = 4
GROUPS_OF_A_THREAD: Final = 2
CALLS: Final = 80
RESTARTS: Final = 3
LIMIT: Final = datetime.timedelta(seconds=40)


class Accounts:
    """Counts of this rank's calls, in memory that outlives it. Each thread writes to its own part."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank{rank}.npy"
        self._names = folder / f"rank{rank}.json"
        shape = (THREADS + 1, 1 + THREADS * GROUPS_OF_A_THREAD + 1, len(OPERATIONS), 3)
        self._cells: Any = np.lib.format.open_memmap(self._path, "w+", np.int64, shape)

    def name(self, groups: list[Any]) -> None:
        """Write the names of the groups; a group's number is its index in this list."""
        names = [group.group_name for group in groups]
        assert len(set(names)) == len(names)
        self._names.write_text(json.dumps(names))

    def of_thread(self, thread: int) -> Any:
        """Return the counts of a thread: (group, operation, (begun, came back, payload))."""
        return self._cells[thread]

    def note(self, moment: str) -> None:
        """Save a copy under the name of a moment."""
        np.save(self._path.with_suffix(f".{moment}.npy"), np.array(self._cells))


class Caller:
    """The calls of one thread, which are counted."""

    def __init__(self, accounts: Accounts, thread: int, groups: dict[int, Any], seed: int) -> None:
        self.rank = dist.get_rank()
        self.groups = groups
        self._cells = accounts.of_thread(thread)
        self._tag = thread
        self.same = random.Random(f"{seed} {thread}")  # on both ranks
        self.own = random.Random(f"{seed} {thread} {self.rank}")
        self.kept: list[Any] = []

    def count(self, operation: str, group: int, payload: int, call: Callable[[Any], Any]) -> Any:
        """Make a call; return None if it was refused, or if the other rank has ended."""
        cell = self._cells[group, OPERATIONS.index(operation)]
        cell[0] += 1
        cell[2] += payload
        try:
            result = call(self.groups[group])
        except RuntimeError:
            result = None
        cell[1] += 1
        return result

    def call(self, group: int) -> None:
        """Make a call of a random kind, and treat its Work."""
        kind = self.same.choice(list(KINDS))
        size = self.same.choice([1, 7, 100, 5000])
        work = KINDS[kind](self, group, size)
        if work is not None:
            self.treat(work)

    def treat(self, work: Any) -> None:
        """Wait for a Work, poll it, keep it, or drop it."""
        treatment = self.own.randrange(4)
        if treatment == 0:
            self.wait(work)
        elif treatment == 1:
            work.is_completed()
        elif treatment == 2:
            self.kept.append(work)

    @staticmethod
    def wait(work: Any) -> None:
        """Wait for a Work, which may fail, because the other rank may have ended."""
        with suppress(RuntimeError):
            work.wait()

    def wait_for_kept(self) -> None:
        """Wait for kept Works in a random order."""
        self.own.shuffle(self.kept)
        while self.kept:
            self.wait(self.kept.pop())

    def agree(self, group: int, answer: bool) -> bool:
        """Return whether this rank's or the other one's answer is yes; also yes if the other one has ended."""
        yes = torch.tensor([float(answer)])
        came_back = False

        def ask(pg: Any) -> None:
            nonlocal came_back
            dist.all_reduce(yes, group=pg)
            came_back = True

        self.count("all_reduce", group, 4, ask)
        return not came_back or bool(yes.item())

    # ---- kinds of calls: each returns the Work of an asynchronous call -----------------------------------------------

    def all_reduce(self, group: int, size: int) -> Any:
        asynchronous = self.same.random() < 0.7
        return self.count(
            "all_reduce", group, 4 * size, lambda pg: dist.all_reduce(torch.ones(size), group=pg, async_op=asynchronous)
        )

    def broadcast(self, group: int, size: int) -> Any:
        asynchronous = self.same.random() < 0.5
        return self.count(
            "broadcast", group, 4 * size, lambda pg: dist.broadcast(torch.ones(size), 0, pg, async_op=asynchronous)
        )

    def all_gather(self, group: int, size: int) -> Any:
        shares = [torch.zeros(size), torch.zeros(size)]
        return self.count(
            "all_gather", group, 8 * size, lambda pg: dist.all_gather(shares, torch.ones(size), pg, async_op=True)
        )

    def all_gather_into_tensor(self, group: int, size: int) -> None:
        self.count(
            "all_gather",
            group,
            8 * size,
            lambda pg: dist.all_gather_into_tensor(torch.zeros(2 * size), torch.ones(size), pg),
        )

    def reduce_scatter(self, group: int, size: int) -> Any:
        return self.count(
            "reduce_scatter",
            group,
            8 * size,
            lambda pg: dist.reduce_scatter_tensor(torch.zeros(size), torch.ones(2 * size), group=pg, async_op=True),
        )

    def all_to_all(self, group: int, size: int) -> None:
        self.count(
            "all_to_all",
            group,
            8 * size,
            lambda pg: dist.all_to_all_single(torch.zeros(2 * size), torch.ones(2 * size), group=pg),
        )

    def barrier(self, group: int, size: int) -> None:
        self.count("barrier", group, 0, lambda pg: dist.barrier(group=pg))

    def message(self, group: int, size: int) -> None:
        if self.rank == 0:
            work = self.count(
                "send", group, 4 * size, lambda pg: dist.isend(torch.ones(size), 1, group=pg, tag=self._tag)
            )
        else:
            work = self.count(
                "recv", group, 4 * size, lambda pg: dist.irecv(torch.ones(size), 0, group=pg, tag=self._tag)
            )
        if work is not None:
            self.wait(work)

    def refused(self, group: int, size: int) -> None:
        # Below the dispatcher, before anything is sent.
        self.count(
            "all_gather",
            group,
            4 * size,
            lambda pg: dist.all_gather([torch.ones(size)], torch.ones(size + 1), group=pg),
        )

    def functional(self, group: int, size: int) -> None:
        ones = torch.ones(size)
        sum_ = self.count("all_reduce", group, 4 * size, lambda pg: functional.all_reduce(ones, "sum", pg))
        if sum_ is not None and self.own.random() < 0.7:
            with suppress(RuntimeError):
                functional.wait_tensor(sum_)


KINDS: Final[dict[str, Callable[[Caller, int, int], Any]]] = {
    "all_reduce": Caller.all_reduce,
    "broadcast": Caller.broadcast,
    "all_gather": Caller.all_gather,
    "all_gather_into_tensor": Caller.all_gather_into_tensor,
    "reduce_scatter": Caller.reduce_scatter,
    "all_to_all": Caller.all_to_all,
    "barrier": Caller.barrier,
    "message": Caller.message,
    "refused": Caller.refused,
    "functional": Caller.functional,
}

enough = threading.Event()  # if cleared, threads continue until it is set, on either rank
enough.set()


def work(caller: Caller, end: Callable[[Caller], None]) -> None:
    """Make a thread's calls on its groups in turn, then call `end`."""
    groups = list(caller.groups)
    while True:
        for made in range(CALLS):
            caller.call(groups[made % len(groups)])
            if made % 25 == 24:
                caller.wait_for_kept()
        if caller.agree(groups[0], enough.is_set()):
            break
    end(caller)


# ---- how threads end -------------------------------------------------------------------------------------------------


def destroy_some(caller: Caller) -> None:
    """Destroy at most one of the thread's groups, with Works in flight."""
    for number in list(caller.groups)[: caller.same.randrange(2)]:
        for _ in range(3):
            caller.all_reduce(number, 20_000)
        with suppress(RuntimeError):
            dist.destroy_process_group(caller.groups.pop(number))


def leave(caller: Caller) -> None:
    """End the thread by an exception or by sys.exit."""
    if caller.same.random() < 0.5:
        sys.exit(3)
    raise KeyError("a thread's own affair")


# ---- how programs end ------------------------------------------------------------------------------------------------


class Program:
    """The program that an ending runs and ends."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rank = dist.get_rank()
        self.folder = folder
        self.accounts = Accounts(folder, self.rank)
        self.choose = random.Random(f"{seed} program")
        own = [dist.new_group([rank]) for rank in (0, 1)][self.rank]
        groups = [dist.new_group([0, 1]) for _ in range(THREADS * GROUPS_OF_A_THREAD)]
        every = [dist.group.WORLD, *groups, own]
        self.accounts.name(every)
        self.alone = len(every) - 1
        self.main = Caller(self.accounts, THREADS, {0: every[0], self.alone: own}, seed)
        self.callers = []
        for thread in range(THREADS):
            first = 1 + thread * GROUPS_OF_A_THREAD
            groups_of_thread = {number: every[number] for number in range(first, first + GROUPS_OF_A_THREAD)}
            self.callers.append(Caller(self.accounts, thread, groups_of_thread, seed))
        self.threads: list[threading.Thread] = []

    def start(self, end: Callable[[Caller], None] = destroy_some, *, daemon: bool = False) -> None:
        """Start the threads."""
        for caller in self.callers:
            self.threads.append(threading.Thread(target=work, args=(caller, end), daemon=daemon))
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        """Wait until the threads have ended."""
        for thread in self.threads:
            thread.join()

    def meanwhile(self) -> None:
        """Make some calls in the main thread."""
        for _ in range(self.choose.randrange(1, 40)):
            self.main.call(0)

    def leave_in_flight(self) -> list[Any]:
        """Return Works, some of them still in flight."""
        return [self.main.all_reduce(0, 100_000) for _ in range(10)]


def plainly(program: Program) -> None:
    """End as every program should."""
    program.start()
    program.meanwhile()
    program.join()
    program.main.wait_for_kept()
    program.main.barrier(0, 0)
    dist.destroy_process_group()


def destroyed_in_flight(program: Program) -> None:
    program.start()
    program.join()
    program.leave_in_flight()
    dist.destroy_process_group()


def not_destroyed(program: Program) -> None:
    program.start()
    program.meanwhile()
    program.join()
    program.main.kept.extend(program.leave_in_flight())


def daemons(program: Program) -> None:
    """End the main thread while others communicate."""
    enough.clear()
    program.start(daemon=True)
    program.meanwhile()


def without_a_word(program: Program) -> None:
    enough.clear()
    program.start(daemon=True)
    program.meanwhile()
    print("leaving", flush=True)
    os._exit(0)


def raising(program: Program) -> None:
    """Raise: the interpreter waits for the other threads, and then ends with a traceback."""
    program.start()
    program.meanwhile()
    program.accounts.note("raising")
    raise KeyError("of the program")


def threads_leave(program: Program) -> None:
    program.start(leave)
    program.meanwhile()
    program.join()
    program.main.barrier(0, 0)
    dist.destroy_process_group()


class Numbers(Dataset[int]):
    """Sixteen numbers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return int(torch.full((3,), index).sum())


def forked(program: Program) -> None:
    """Fork workers of a DataLoader, and a child that drops operations of its parent."""
    program.start()
    for _ in range(2):
        program.meanwhile()
        total = sum(int(batch.sum()) for batch in DataLoader(Numbers(), num_workers=2, batch_size=4))
        assert total == 3 * sum(range(16))
        pid = os.fork()
        if pid == 0:
            program.main.kept.clear()
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    program.join()
    program.main.barrier(0, 0)
    dist.destroy_process_group()


def restarted(program: Program) -> None:
    """Stop recording and start it in another directory, while threads communicate."""
    traced = session.settings is not None
    enough.clear()
    program.start()
    for number in range(RESTARTS):
        program.meanwhile()
        program.accounts.note(f"stop{number}")
        commtrace.stop()
        if traced:
            commtrace.start(program.folder / f"log{number}")
        program.accounts.note(f"start{number}")
    program.meanwhile()
    enough.set()
    program.join()
    program.main.barrier(0, 0)
    dist.destroy_process_group()


class AlarmError(Exception):
    """Raised by a signal handler."""


def interrupted(program: Program) -> None:
    """Raise in a signal handler during calls, on a group of this rank only, so that the other rank is not affected."""
    armed = False

    def raise_alarm(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise AlarmError

    program.start()
    signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0017)
    caught, deadline = 0, time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            armed = True
            program.main.all_reduce(program.alone, 10)
            armed = False
        except AlarmError:
            caught += 1
    armed = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert caught
    program.join()
    program.main.barrier(0, 0)
    dist.destroy_process_group()


def compiled(program: Program) -> None:
    """Call functional collectives in a compiled function, while threads communicate."""

    def sums(x: torch.Tensor, y: torch.Tensor) -> Any:
        first = functional.all_reduce(x * 2, "sum", "0")
        return first + functional.all_reduce(y + 1, "sum", "0")

    fast = torch.compile(sums, backend="aot_eager")
    program.start()
    cell = program.main._cells[0, OPERATIONS.index("all_reduce")]
    for _ in range(20):
        cell[0] += 2
        cell[2] += 2 * 4 * 50
        fast(torch.ones(50), torch.ones(50))
        cell[1] += 2
    program.join()
    program.main.barrier(0, 0)
    dist.destroy_process_group()


ENDINGS: Final[dict[str, Callable[[Program], None]]] = {
    function.__name__: function
    for function in (
        plainly,
        destroyed_in_flight,
        not_destroyed,
        daemons,
        without_a_word,
        raising,
        threads_leave,
        forked,
        restarted,
        interrupted,
        compiled,
    )
}


def main() -> None:
    ending, seed, folder = sys.argv[1:]
    atexit.unregister(wait_for_threads)  # calls are in flight when it ends
    dist.init_process_group("gloo", timeout=LIMIT)
    program = Program(int(seed), Path(folder))
    ENDINGS[ending](program)
    program.accounts.note("leaving")
    print("leaving", flush=True)


if __name__ == "__main__":
    main()
