"""Clocks of two simulated hosts: a UTS and a time namespace for one rank, and a preloaded library for its drift.

Rank 1 compares its clock with the machine's at each call, so the truth is known.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import processes
import pytest

from commtrace.run import Run, open_run

SHIFT_SECONDS = 5
SECONDS = 3
SOURCE = Path(processes.__file__).parent / "native_programs" / "drifting_clock.c"
UNSHARE = ["unshare", "--uts", "--time", "--monotonic", str(SHIFT_SECONDS), "--fork"]


def why_not() -> str:
    """Return why hosts cannot be simulated here; "" if they can."""
    for command in ("unshare", "cc"):
        if shutil.which(command) is None:
            return f"{command} is not installed"
    tried = subprocess.run([*UNSHARE, "hostname", "hostb"], capture_output=True, text=True, timeout=20, check=False)
    return tried.stderr.strip() and f"no time and UTS namespaces here: {tried.stderr.strip()}"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("clock") / "drifting_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, SOURCE], check=True, timeout=60)
    return built


def record_two_hosts(folder: Path, seed: int, library: Path, **clock: int) -> tuple[Run, list[tuple[int, int, int]]]:
    """Return the run, and rank 1's clock with the machine's before and after, at each of its calls."""
    port, started = processes.free_port(), []
    for rank in (0, 1):
        variables = {"COMMTRACE": folder, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        preloaded = {"LD_PRELOAD": library, **clock} if rank and clock else {}
        host = [*UNSHARE, "sh", "-c", 'hostname hostb && exec "$@"', "sh"] if rank else []
        program = [sys.executable, str(processes.PROGRAMS / "two_hosts.py"), str(rank), str(SECONDS), str(seed)]
        started.append(
            subprocess.Popen(
                [*host, *program], env=processes.environment(**variables, **preloaded), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip
    try:
        results = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            processes.kill_group(process.pid)
    assert [process.returncode for process in started] == [0, 0], results
    return open_run(folder), json.loads(results[1][0].splitlines()[-1])


DRIFTS = [
    (-1000, 3),
    *(pytest.param(ppm, seed, marks=pytest.mark.exhaustive) for ppm, seed in ((0, 1), (100, 2))),
    *(pytest.param((seed * 37) % 2001 - 1000, seed, marks=pytest.mark.exhaustive) for seed in range(4, 201)),
]


@pytest.mark.parametrize(("ppm", "seed"), DRIFTS)
def test_the_true_offset_lies_in_the_bounds(ppm: int, seed: int, library: Path, tmp_path: Path) -> None:
    run, pairs = record_two_hosts(tmp_path, seed, library, **({"CLOCK_PPM": ppm} if ppm else {}))
    clocks = run.clocks
    assert (list(clocks.hosts[1:]), clocks.reference) == (["hostb"], 0)
    clock, row = clocks.aligned[1], clocks.table.iloc[1]
    assert clock is not None
    assert not clock.steps
    own, before, after = np.array(pairs, np.int64).T
    earliest, latest = clock.to_reference(own)
    assert (earliest <= after - SHIFT_SECONDS * 10**9).all()
    assert (latest >= before - SHIFT_SECONDS * 10**9).all()
    print(f"half width {row['half_width_ns'] / 1e3:.0f} us, drift {row['drift_ppm']:.1f} ppm of {ppm}")
    assert abs(row["drift_ppm"] - ppm) <= row["drift_half_width_ppm"]


@pytest.mark.exhaustive
def test_a_stepped_clock_is_found(library: Path, tmp_path: Path) -> None:
    run, pairs = record_two_hosts(tmp_path, 1, library, CLOCK_STEP_MS=20)
    own, before, _ = np.array(pairs, np.int64).T
    jump = int(np.diff(own - before).argmax())
    assert np.diff(own - before)[jump] > 15_000_000
    (step,) = run.clocks.aligned[1].steps if run.clocks.aligned[1] else ()
    assert step.after_ns <= before[jump + 1] - SHIFT_SECONDS * 10**9
    assert step.before_ns >= before[jump] - SHIFT_SECONDS * 10**9
    assert step.smallest_ns <= 20_000_000 <= step.largest_ns
