"""The processes of a measurement: started on this machine, or by a launcher.

mpiexec starts ranks of MPI. Ranks of torch are started here, not by torchrun, which takes 3 s of processor time for two
ranks that do nothing (two processes: 0.1 s), and prints 20 lines for a rank that fails, without its error.
"""

from __future__ import annotations

import contextlib
import json
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
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from commtrace.errors import CommtraceError
from commtrace.launchers import find_process, free_port

from . import NetworkError, mpiexec
from .bench_operations import BARRIER, POINT_TO_POINT, payload_sizes
from .bench_plan import BenchPlan
from .bench_results import BenchResults, write_results
from .bench_text import results_lines
from .measuring import BenchBuffers, BenchGroup, BenchLibrary, BenchRow, measure
from .process_exit import wait_for_threads

# The working directory is removed from sys.path: the folder `commtrace` of a checkout is not the whole package.
_PROGRAM: Final = """
import sys
sys.path[:1] == [""] and sys.path.pop(0)
from commtrace.errors import CommtraceError
try:
    from {} import main
    sys.exit(main())
except CommtraceError as error:
    sys.exit(f"commtrace: {{error}}")
"""
_TERMINATION_S: Final = 5.0
"""Seconds that a process has to exit after SIGTERM, and after SIGKILL."""

_BUFFERS: Final = 6
"""Buffers of the largest size that a rank holds at once: input, output, expected values, and temporary ones."""


def start_ranks(plan: BenchPlan, ranks: int) -> None:
    """Start ranks on this machine and wait until they have finished; rank 0 prints and writes the results.

    Raises:
        NetworkError: A rank failed; the message has the error of the first one. The other ranks are terminated.
        LaunchError: There is no mpiexec.
    """
    plan.groups(ranks)
    check_memory(plan, ranks)
    start_programs(__name__, json.dumps(asdict(plan)), plan.through, ranks)


def start_programs(
    module: str, argument: str, through: str, ranks: int, variables: Mapping[str, str] | None = None
) -> None:
    """Start ranks on this machine that call `main()` of a module, and wait until they have exited.

    Args:
        module: Dotted name of the module.
        argument: The argument of each rank (`sys.argv[1]`).
        through: "torch", or "mpi4py" for ranks that mpiexec starts.
        ranks: Number of ranks.
        variables: Environment variables to add.

    Raises:
        NetworkError: A rank failed; the message has the error of the first one. The other ranks are terminated.
        LaunchError: There is no mpiexec.
    """
    command = [sys.executable, "-c", _PROGRAM.format(module), argument]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **(variables or {})}
    if through == "mpi4py":
        command = mpiexec.mpiexec_command(ranks, command)
        names, variables_by_process = ["mpiexec"], [mpiexec.mpiexec_variables(ranks)]
    else:
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        names = [f"rank {rank} of {ranks}" for rank in range(ranks)]
        variables_by_process = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    errors = [tempfile.TemporaryFile("w+") for _ in names]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for own_variables, file in zip(variables_by_process, errors, strict=True):
            process = subprocess.Popen(command, env=environment | own_variables, stderr=file, start_new_session=True)
            processes.append(process)
        failed = _first_failure(processes)
    finally:
        for process in processes:
            _terminate(process)
    if failed is not None:
        status = processes[failed].returncode
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        raise NetworkError(f"{names[failed]} {end}: {_last_error(errors[failed])}")


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until a rank has failed or all have succeeded; return the failed rank, or None."""
    while True:
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            # The peers of a process that dies fail at the same time, so a process that was killed is the cause.
            time.sleep(0.2)
            statuses = [process.poll() for process in processes]
            return min(failed, key=lambda rank: (statuses[rank] or 0) > 0)
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.02)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process that is still running, with all processes that it started."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATION_S)


def _last_error(errors: IO[str]) -> str:
    """Return commtrace's own message in a process's stderr, else its last lines, as one line."""
    errors.seek(0)
    lines = [line.strip() for line in errors if line.strip()]
    messages = [line.removeprefix("commtrace: ") for line in lines if line.startswith("commtrace: ")]
    return messages[0] if messages else " | ".join(lines[-3:]) or "no error message"


def main() -> int:
    """Run one of the ranks of `start_ranks`; return its exit status."""
    return run_rank(BenchPlan(**json.loads(sys.argv[1])), bound=True)


def run_rank(plan: BenchPlan, *, bound: bool = False) -> int:
    """Measure together with the other ranks; rank 0 prints and writes the results.

    Args:
        plan: The same on all ranks.
        bound: Whether to bind MPI ranks to cores. Torch ranks are never bound: gloo's threads wait for each other.

    Returns:
        The exit status of this process: 2 after a failure, which is printed to stderr with the rank.

    Raises:
        CommtraceError: The ranks could not be connected.
    """
    if plan.through == "torch":
        if "SLURM_STEP_NODELIST" in os.environ and "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = first_host(os.environ["SLURM_STEP_NODELIST"])
        find_process(os.environ)
    library = connect(plan)
    try:
        if bound and plan.through == "mpi4py":
            bind_to_core(library.local_rank, library.size)
        world = library.group(range(library.size))
        assert world is not None
        hosts: list[str] = world.gather(socket.gethostname())
        check_memory(plan, hosts.count(hosts[library.rank]))
        rows: list[BenchRow] = []
        for ranks, operations in operations_by_group(plan, hosts).items():
            group = library.group(ranks)
            for op in operations:
                if group is not None:
                    rows += _measure_sizes(group, op, len({hosts[rank] for rank in ranks}), plan, library.abort)
                library.wait()  # ranks outside the group wait for one operation at a time
        results = BenchResults.from_measurement(plan, hosts, library.versions(), rows)
        # The results are complete on rank 0 only, which is in every group.
        if library.rank == 0:
            write_results(results, Path(plan.out), force=plan.force)
            text = results_lines(results, plan.form, plan.width)
            print(*text, f"results in {plan.out}", sep="\n", flush=True)
        library.close()
    except Exception as error:
        print(f"commtrace: rank {library.rank}: {_describe_error(error)}", file=sys.stderr, flush=True)
        library.abort()
        return 2
    if plan.through == "torch":
        wait_for_threads()
    return 0


def connect(plan: BenchPlan) -> BenchLibrary:
    """Connect this process as a rank, through the plan's library.

    Raises:
        NetworkError: The library is not installed, or the ranks cannot connect.
    """
    if plan.through == "mpi4py":
        from .bench_mpi import MpiBenchLibrary

        return MpiBenchLibrary()
    from .bench_torch import TorchBenchLibrary

    return TorchBenchLibrary(plan)


def bind_to_core(local_rank: int, ranks: int) -> None:
    """Bind a rank of this host to a core of its own, if there are enough cores for all its ranks.

    MPI ranks spin while they wait. The kernel sometimes puts two of them on one core and leaves another idle; a call
    then takes four times as long.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[local_rank]})


def _describe_error(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0]
    return first_line if isinstance(error, CommtraceError) else f"{type(error).__name__}: {first_line}"


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's host list, which has rank 0: "node[03-07,12],login1" -> "node03"."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodes)
    return "".join(group or "" for group in match.groups()) if match else ""


def operations_by_group(plan: BenchPlan, hosts: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
    """Return the operations to measure in each group of ranks.

    Collectives are measured among all ranks and among the first ranks, by the plan's group sizes; messages between the
    first two ranks, and from the first rank to one on another host.
    """
    messages = [op for op in plan.operations if op in POINT_TO_POINT]
    collectives = [op for op in plan.operations if op not in POINT_TO_POINT]
    operations = {tuple(range(size)): [*collectives] for size in plan.groups(len(hosts))}
    other_host = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
    for pair in {(0, 1): None, (0, other_host): None}:
        operations.setdefault(pair, []).extend(messages)
    return {ranks: ops for ranks, ops in operations.items() if ops}


def _measure_sizes(
    group: BenchGroup, op: str, hosts: int, plan: BenchPlan, abort: Callable[[], None]
) -> Iterator[BenchRow]:
    buffers = BenchBuffers(group, 0 if op == BARRIER else plan.max_bytes)
    timeout_s = plan.timeout if plan.through == "mpi4py" else None  # torch has a timeout of its own
    for size in [0] if op == BARRIER else payload_sizes(plan.min_bytes, plan.max_bytes):
        try:
            with abort_after(timeout_s, f"{op} of {size:,} bytes", abort):
                row = measure(group, op, size, hosts, plan.seconds, buffers)
        except (RuntimeError, MemoryError) as error:  # torch and mpi4py raise subclasses of these
            raise NetworkError(f"{op} of {size:,} bytes among {group.size} ranks: {_describe_error(error)}") from error
        if row is not None:
            yield row


@contextlib.contextmanager
def abort_after(timeout_s: float | None, subject: str, abort: Callable[[], None]) -> Iterator[None]:
    """Print an error and call `abort` from another thread if the body takes too long, because MPI has no timeout."""
    ended = threading.Event()

    def watch() -> None:
        if not ended.wait(timeout_s):
            print(f"commtrace: {subject}: not complete after {timeout_s:g} s (--timeout)", file=sys.stderr, flush=True)
            abort()

    if timeout_s is not None:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def check_memory(plan: BenchPlan, ranks: int) -> None:
    """Raise NetworkError if this host has too little memory for the buffers of `ranks` ranks."""
    available, needed = _available_bytes(), _BUFFERS * plan.max_bytes * ranks
    if needed > available:
        raise NetworkError(
            f"{ranks} ranks of a host need {needed >> 20:,} MiB for messages of {plan.max_bytes:,} bytes, but "
            f"{available / (1 << 20):,.0f} MiB are available; give a smaller --max-bytes"
        )


def _available_bytes() -> float:
    """Return the available memory of this host, infinity if the system does not report it."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(match[1]) << 10
    return float("inf")
