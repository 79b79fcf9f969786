"""The processes of a measurement: started here, or by a launcher, of which each is then a rank."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from commtrace.errors import CommtraceError, LaunchError

from . import NetworkError
from .bench_plan import BenchPlan
from .bench_results import BenchResults, write_results
from .bench_text import results_lines
from .library import BenchLibrary, connect
from .measuring import BenchBuffers, BenchGroup, BenchRow, measure
from .operations import BARRIER, POINT_TO_POINT, payload_sizes

# Without the working directory on sys.path: in a checkout its folder `commtrace` is not the whole package.
_PROGRAM: Final = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0)\n"
    "from commtrace.network.bench_ranks import main; sys.exit(main())"
)
_GRACE_S: Final = 5.0


# --- starting ranks on this machine ---------------------------------------------------------------------------------


def start_ranks(plan: BenchPlan, ranks: int) -> None:
    """Measure with so many ranks of this machine, which print and keep the results.

    Raises NetworkError with what the first rank that failed has said; no rank is left behind.
    """
    plan.groups(ranks)
    check_memory(plan, ranks)
    program = [sys.executable, "-c", _PROGRAM, plan.to_json()]
    if plan.through == "mpi4py":
        _start_mpi(program, ranks)
    else:
        _start_torch(program, ranks)


def _start_torch(program: Sequence[str], ranks: int) -> None:
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    errors = [tempfile.TemporaryFile("w+") for _ in range(ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            variables = {"OMP_NUM_THREADS": "1", **os.environ, **_words({**common, "RANK": rank, "LOCAL_RANK": rank})}
            processes.append(subprocess.Popen([*program], env=variables, stderr=errors[rank]))
        failed = _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        raise NetworkError(f"rank {failed} of {ranks} {_ended(processes[failed].returncode)}: {_said(errors[failed])}")


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The rank that failed first, as soon as one has; None when all have ended well."""
    while True:
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            # Peers of a process that dies fail, too, in the same moment: one that was killed is the cause.
            time.sleep(0.2)
            statuses = [process.poll() for process in processes]
            return min(failed, key=lambda rank: (statuses[rank] or 0) > 0)
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.02)


def _start_mpi(program: Sequence[str], ranks: int) -> None:

    from . import mpiexec as launch

    try:
        command, variables = launch.mpiexec_command(ranks, program), launch.mpiexec_variables(ranks)
    except LaunchError as error:
        raise NetworkError(f"--through mpi4py: {error}") from error
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env={"OMP_NUM_THREADS": "1", **os.environ, **variables}, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            raise NetworkError(f"mpiexec {_ended(status)}: {_said(errors)}")


def _words(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _ended(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _said(errors: IO[str]) -> str:
    """The last lines of a process's stderr, as one."""
    errors.seek(0)
    told = [line.strip() for line in errors.read().splitlines() if line.strip()]
    own = [line.removeprefix("commtrace: ") for line in told if line.startswith("commtrace: ")]
    return own[0] if own else " | ".join(told[-3:]) or "it said nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- being a rank ---------------------------------------------------------------------------------------------------


def main() -> int:
    """A process that `start_ranks` has started: its status."""
    try:
        return run_rank(BenchPlan.from_json(sys.argv[1]), bound=True)
    except NetworkError as error:
        print(f"commtrace: {error}", file=sys.stderr, flush=True)
        return 1


def bind_to_core(rank: int, ranks: int) -> None:
    """Bind each rank of a host to a core, if there are enough cores.

    Ranks of MPI spin while they wait. The kernel sometimes puts two of them on one core and leaves another idle; a call
    then takes four times as long.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def run_rank(plan: BenchPlan, *, bound: bool = False) -> int:
    """Measure with the other ranks; rank 0 prints and keeps the results. Returns the status of this process.

    bound: bind ranks of MPI to cores. torch's are not: gloo has threads of its own, which wait for each other's locks.

    Raises NetworkError before the ranks are connected; from then on, says on stderr which rank failed, and how.
    """
    if plan.through == "torch":
        _complete_environment()
    library = connect(plan)
    try:
        if bound and plan.through == "mpi4py":
            bind_to_core(library.local_rank, library.size)
        results = _measured(plan, library)
        if library.rank == 0:
            write_results(results, Path(plan.out), force=plan.force)
            print(*results_lines(results, plan.form, plan.width), f"kept in {plan.out}", sep="\n", flush=True)
        library.close()
    except Exception as error:
        print(f"commtrace: rank {library.rank}: {_words_of(error)}", file=sys.stderr, flush=True)
        library.abort()
        return 1
    if plan.through == "torch":
        from .process_exit import wait_for_threads

        wait_for_threads()
    return 0


def _words_of(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, CommtraceError) else f"{type(error).__name__}: {first}"


def _complete_environment() -> None:
    from commtrace.launchers import find_process

    if "SLURM_STEP_NODELIST" in os.environ and "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = first_host(os.environ["SLURM_STEP_NODELIST"])
    try:
        find_process(os.environ)
    except LaunchError as error:
        raise NetworkError(str(error)) from error


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm host list, which has rank 0: "node[03-07,12],login1" -> "node03"."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    return "" if found is None else found[1] + (found[2] or "") + (found[3] or "")


def _measured(plan: BenchPlan, library: BenchLibrary) -> BenchResults:
    hosts: list[str] = library.everyone(socket.gethostname())
    check_memory(plan, hosts.count(hosts[library.rank]))
    rows: list[BenchRow] = []
    for ranks, operations in operations_by_group(plan, hosts).items():
        group = library.group(ranks)
        spread = len({hosts[rank] for rank in ranks})
        for op in operations:
            if group is not None:
                rows += _sized(group, op, spread, plan, library.abort)
            library.wait()  # those that are not in the group, for one operation at a time
    return BenchResults.of(plan, hosts, library.facts(), rows)  # whole on rank 0 only, which is in every group


def operations_by_group(plan: BenchPlan, hosts: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
    """Return the operations to measure by group of ranks.

    Collectives are measured among all ranks and among the first ranks, by the plan's group sizes; messages between the
    first two ranks, and from the first rank to one on another host.
    """
    messages = [op for op in plan.operations if op in POINT_TO_POINT]
    collectives = [op for op in plan.operations if op not in POINT_TO_POINT]
    found = {tuple(range(size)): [*collectives] for size in plan.groups(len(hosts))}
    elsewhere = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
    for pair in {(0, 1): None, (0, elsewhere): None}:
        found.setdefault(pair, []).extend(messages)
    return {ranks: operations for ranks, operations in found.items() if operations}


def _sized(group: BenchGroup, op: str, hosts: int, plan: BenchPlan, abort: Callable[[], None]) -> Iterator[BenchRow]:
    memory = BenchBuffers(group, 0 if op == BARRIER else plan.max_bytes)
    for size in [0] if op == BARRIER else payload_sizes(plan.min_bytes, plan.max_bytes):
        try:
            with abort_after(plan.timeout_s if plan.through == "mpi4py" else None, f"{op} of {size:,} bytes", abort):
                row = measure(group, op, size, hosts, plan.seconds, memory)
        except (RuntimeError, MemoryError) as error:  # what torch and mpi4py raise of theirs
            raise NetworkError(f"{op} of {size:,} bytes among {group.size} ranks: {_words_of(error)}") from error
        if row is not None:
            yield row


@contextlib.contextmanager
def abort_after(seconds: float | None, what: str, abort: Callable[[], None]) -> Iterator[None]:
    """Say so and abort what takes longer, from another thread: MPI waits for ever. None: the library has limits."""

    def over() -> None:
        print(f"commtrace: {what}: no end after {seconds:g} s (--timeout)", file=sys.stderr, flush=True)
        abort()

    timer = None if seconds is None else threading.Timer(seconds, over)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


_COPIES: Final = 6
"""Buffers of the largest size that a rank holds at once: given, taken, right values, and what is made on the way."""


def check_memory(plan: BenchPlan, ranks: int) -> None:
    """Raises NetworkError where so many ranks of this host need more memory than there is."""
    free, needed = _available(), _COPIES * plan.max_bytes * ranks
    if free is not None and needed > free:
        raise NetworkError(
            f"{ranks} ranks of a host need {needed >> 20:,} MiB for messages of {plan.max_bytes:,} bytes, and "
            f"{free >> 20:,} MiB are available; give a smaller --max-bytes"
        )


def _available() -> int | None:
    """Bytes, None where the system does not say."""
    try:
        told = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", told, re.MULTILINE)
    return None if found is None else int(found[1]) << 10
