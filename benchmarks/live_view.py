"""Processor time and memory of `commtrace top` beside a job that makes many calls, and its start on a long log.

Each rank makes short calls of mpi4py at a constant rate, so that a small machine can run many ranks whose recorders
write a real log. After the job, the totals of `top` are compared with those of `commtrace report`: the benchmark fails
if they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import commands
import groups
import mpi_groups
import results
from measuring import Row

from commtrace.hooks.native import libraries
from commtrace.process_setup.system_files import read_stat

CALLS_OF_STEP = 1000
TABLES = ("volume_by_purpose", "ranks", "volume_by_step", "steady_step")
LIMIT_SECONDS = 1800.0
WRITER = """
import sys, time
import commtrace, numpy
from mpi4py import MPI
rate, seconds, calls = map(float, sys.argv[1:])
sent, received, begun = numpy.ones(1), numpy.zeros(1), time.monotonic()
for step in range(int(rate * seconds / calls)):
    commtrace.step()
    for _ in range(int(calls)):
        MPI.COMM_SELF.Allreduce(sent, received)
    time.sleep(max(0.0, begun + (step + 1) * calls / rate - time.monotonic()))
"""


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=64, help="ranks of the job (%(default)s)")
    parser.add_argument("--rate", type=int, default=10_000, help="calls of each rank in a second (%(default)s)")
    parser.add_argument("--seconds", type=int, default=600, help="duration of the job (%(default)s)")
    options = results.parsed(parser, ranks=2, rate=1000, seconds=10)
    libraries.MPI.build()
    with tempfile.TemporaryDirectory() as folder:
        results.write("live_view", [*rows(Path(folder, "log"), options)], options)


def rows(log: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows: of `top` beside the job, of its end, and of its start on the log of the whole job."""
    arguments = [str(options.rate), str(options.seconds), str(CALLS_OF_STEP)]
    job = subprocess.Popen(
        [*mpi_groups.launcher(options.ranks), sys.executable, "-c", WRITER, *arguments],
        env={**os.environ, "COMMTRACE": str(log)},
    )
    with following(log) as (top, url, peak_kib):
        begun = time.perf_counter()
        assert job.wait() == 0, "the job failed"
        ended = time.perf_counter()
        cost = processor_seconds(top)
        state = read_state(url)
        case = f"{options.ranks} ranks, {options.rate:,} calls a second each, {options.seconds} s"
        yield shown(case, "processor, share of a core", "%", 100 * cost / (ended - begun))
        yield shown(case, "calls in the totals when the job ended", "%", 100 * state["totalled"] / state["records"])
        while not (state["is_over"] and state["totalled"] == state["records"]):
            assert time.perf_counter() - ended < LIMIT_SECONDS, "the totals are not complete"
            time.sleep(0.5)
            state = read_state(url)
        yield shown(case, "time from then until all are", "s", time.perf_counter() - ended)
        yield shown(case, "peak memory", "MiB", peak_kib[0] / 1024)
    report = json.loads(
        subprocess.run(
            commands.commtrace("report", log, "--json", "--per-rank"), check=True, capture_output=True
        ).stdout
    )
    for name in TABLES:
        assert state["tables"][name] == report["tables"][name], f"{name} is not that of the report"
    case = f"start on a log of {state['records']:,} calls"
    begun = time.perf_counter()
    with following(log) as (_, url, _):
        read_state(url)
        yield shown(case, "time until the first screen", "s", time.perf_counter() - begun)


def shown(case: str, name: str, unit: str, value: float) -> Row:
    """Return a row, and print it."""
    results.show(row := Row(case, name, unit, value))
    return row


@contextmanager
def following(log: Path) -> Iterator[tuple[int, str, list[float]]]:
    """Run `commtrace top`. Yield its process, the address of its state, and its peak memory in KiB so far."""
    port = groups.free_port()
    command = commands.commtrace("top", log, "--web", str(port), "--wait", "120", "--linger", str(LIMIT_SECONDS))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as top:
        try:
            with commands.peak_memory(top.pid) as peak_kib:
                yield top.pid, f"http://127.0.0.1:{port}/state.json", peak_kib
        finally:
            top.terminate()


def read_state(url: str) -> dict[str, Any]:
    """Return the state that `top` shows, as soon as there is one."""
    deadline = time.perf_counter() + 120
    while True:
        try:
            with urllib.request.urlopen(url) as answer:
                state: dict[str, Any] = json.load(answer)
                return state
        except OSError:
            if time.perf_counter() > deadline:
                raise
            time.sleep(0.05)


def processor_seconds(process: int) -> float:
    """Return the processor time that a process has used, s."""
    stat = read_stat(f"/proc/{process}")
    assert stat is not None, "commtrace top has ended"
    return stat.cpu_ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
