"""Clocks of simulated hosts: a UTS and a time namespace for each rank but 0, and a preloaded library for its drift.

Every rank compares its clock with the machine's at each call, so the truth is known.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mpi_launch
import numpy as np
import numpy.typing as npt
import processes
import pytest
from draws import DRAWS
from ports import free_port

from commtrace.run import Run, open_run

SECONDS = 3
SOURCE = processes.NATIVE_PROGRAMS / "drifting_clock.c"
PROGRAM, ON_A_HOST = processes.PROGRAMS / "random_hosts.py", processes.PROGRAMS / "on_a_host.py"

Host = tuple[int, dict[str, str]]
"""Seconds by which a clock is ahead of the reference's, and the variables of its library."""


def why_not() -> str:
    """Return why hosts cannot be simulated here; "" if they can."""
    for name in ("unshare", "cc"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    command = ["unshare", "--uts", "--time", "--monotonic", "5", "--fork", "hostname", "host1"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return tried.stderr.strip() and f"no time and UTS namespaces here: {tried.stderr.strip()}"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("clock") / "drifting_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, SOURCE], check=True, timeout=60)
    return built


def host(library: Path, ahead_seconds: int, **clock: int) -> Host:
    variables = {"LD_PRELOAD": library, **clock} if clock else {}
    return ahead_seconds, {name: str(value) for name, value in variables.items()}


def record(folder: Path, backend: str, seed: int, hosts: list[Host], seconds: float = SECONDS) -> Run:
    """Record the random program on a rank for each host, and one for the reference."""
    library = "gloo" if backend == "gloo" else "mpi"
    arguments = [json.dumps(hosts), sys.executable, str(PROGRAM), library, str(seconds), str(seed), str(folder)]
    port = free_port()
    if backend != "gloo":
        mpi_launch.succeeds(
            backend, ON_A_HOST, *arguments, port, ranks=len(hosts) + 1, log=folder / "log", limit=100,
        )  # fmt: skip
        return open_run(folder / "log")
    started: list[subprocess.Popen[str]] = []
    store = free_port()
    for rank in range(len(hosts) + 1):
        variables = processes.environment(
            COMMTRACE=folder / "log", RANK=rank, WORLD_SIZE=len(hosts) + 1, MASTER_ADDR="127.0.0.1",
            MASTER_PORT=store, GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        command = [sys.executable, str(ON_A_HOST), *arguments, str(port)]
        started.append(
            subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
    try:
        errors = [process.communicate(timeout=100)[1] for process in started]
    finally:
        for process in started:
            processes.kill_group(process.pid)
    assert [process.returncode for process in started] == [0] * len(started), errors
    return open_run(folder / "log")


def clock_of(folder: Path, rank: int) -> npt.NDArray[np.int64]:
    """Return a rank's own clock, and the machine's before and after; shape (3, calls), nanoseconds."""
    return np.array(json.loads((folder / f"clock-{rank}.json").read_text()), np.int64).T


def rate(host: Host) -> float:
    """Return by what fraction a host's clock is faster than the machine's."""
    return int(host[1].get("CLOCK_PPM", 0)) / 1e6


def slewed_ns(host: Host, namespace_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return by how much a host's clock is ahead because its rate changes, at times of its namespace's clock."""
    period, slew = int(host[1].get("CLOCK_SLEW_MS", 0)) * 1_000_000, int(host[1].get("CLOCK_SLEW_PPB", 0)) / 1e9
    phase = namespace_ns % (2 * period) if period else np.zeros_like(namespace_ns)
    return np.round(slew * np.minimum(phase, 2 * period - phase)).astype(np.int64)


def at_machine_time(folder: Path, rank: int, host: Host, machine_ns: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Return the smallest and largest value of a rank's clock at times of the machine's clock."""
    own, before, after = clock_of(folder, rank)
    own = own - slewed_ns(host, before)  # which changes by less than a nanosecond until `after`
    base, ahead = before[0], host[0] * 10**9
    # own = machine's clock in its namespace, times 1 + rate, plus a constant that each pair bounds
    least = (own - after - rate(host) * (after - base)).max()
    most = (own - before - rate(host) * (before - base)).min()
    here = machine_ns + ahead
    straight = here + np.round(rate(host) * (here - base)).astype(np.int64) + slewed_ns(host, here)
    return straight + int(np.floor(least)) - 1, straight + int(np.ceil(most)) + 1


def assert_bounds_hold(run: Run, folder: Path, hosts: list[Host]) -> None:
    clocks, hosts = run.clocks, [(0, {}), *hosts]
    assert list(clocks.hosts[1:]) == [f"host{rank}" for rank in range(1, len(hosts))]
    half = json.loads((folder / "half-round-trip.json").read_text())
    reference = clocks.reference
    for rank, host in enumerate(hosts):
        clock, row = clocks.aligned[rank], run.table("clocks").iloc[rank]
        if rank == reference:
            continue
        assert clock is not None
        assert not clock.steps
        own, before, after = clock_of(folder, rank)
        earliest, latest = clock.to_reference(own)
        assert (earliest <= at_machine_time(folder, reference, hosts[reference], after - host[0] * 10**9)[1]).all()
        assert (latest >= at_machine_time(folder, reference, hosts[reference], before - host[0] * 10**9)[0]).all()
        ppm = 1e6 * ((1 + rate(host)) / (1 + rate(hosts[reference])) - 1)
        print(
            f"host {rank} of {len(hosts)}: half width {row['half_width_ns'] / 1e3:.0f} us, half round trip "
            f"{half / 1e3:.0f} us, drift {row['drift_ppm']:.1f} ppm of {ppm:.1f} +- {row['drift_half_width_ppm']:.1f}"
        )
        assert abs(row["drift_ppm"] - ppm) <= row["drift_half_width_ppm"]


def random_hosts(seed: int, library: Path) -> tuple[str, list[Host]]:
    """Return a backend, and one to three hosts besides the reference's."""
    chance = random.Random(seed)
    backend = chance.choice(["gloo", "gloo", *(name for name in mpi_launch.NAMES if not mpi_launch.obstacle(name))])
    hosts = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        ppm = chance.choice((0, chance.randint(-1000, 1000)))
        clock = {"CLOCK_PPM": ppm} if ppm else {}
        if chance.random() < 0.5:  # rates that change by up to 5 ppm
            clock |= {
                "CLOCK_SLEW_PPB": chance.randint(500, 2500),
                "CLOCK_SLEW_MS": chance.choice((50, 500, 1000, 2000)),
            }
        hosts.append(host(library, chance.randint(1, 9), **clock))
    return backend, hosts


@pytest.mark.long
def test_the_true_offset_lies_in_the_bounds(library: Path, tmp_path: Path) -> None:
    hosts = [host(library, 5, CLOCK_PPM=-1000)]
    assert_bounds_hold(record(tmp_path, "gloo", 3, hosts), tmp_path, hosts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(DRAWS))
def test_true_offsets_of_random_hosts_lie_in_the_bounds(seed: int, library: Path, tmp_path: Path) -> None:
    backend, hosts = random_hosts(seed, library)
    print(backend, end=": ")
    assert_bounds_hold(record(tmp_path, backend, seed, hosts), tmp_path, hosts)


@pytest.mark.exhaustive
def test_drift_is_known_after_ten_seconds(library: Path, tmp_path: Path) -> None:
    hosts = [host(library, 2, CLOCK_PPM=100)]
    run = record(tmp_path, "gloo", 1, hosts, seconds=12)
    assert_bounds_hold(run, tmp_path, hosts)
    clock = run.table("clocks").loc[1]
    microseconds = clock["half_width_ns"] / 1000
    assert clock["drift_half_width_ppm"] <= 2 * microseconds / 10  # the offset's error at both ends, over 10 s


@pytest.mark.exhaustive
def test_a_stepped_clock_is_found(library: Path, tmp_path: Path) -> None:
    run = record(tmp_path, "gloo", 1, [host(library, 5, CLOCK_STEP_MS=20)])
    own, before, _ = clock_of(tmp_path, 1)
    jump = int(np.diff(own - before).argmax())
    assert np.diff(own - before)[jump] > 15_000_000
    (step,) = run.clocks.aligned[1].steps if run.clocks.aligned[1] else ()
    assert step.after_ns <= before[jump + 1] - 5 * 10**9
    assert step.before_ns >= before[jump] - 5 * 10**9
    assert step.smallest_ns <= 20_000_000 <= step.largest_ns
