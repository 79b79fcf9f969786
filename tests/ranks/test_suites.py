"""PyTorch's and mpi4py's own tests have equal outcomes traced and untraced, and both recorders record equal calls."""

from __future__ import annotations

import collections
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import mpi_launch
import numpy as np
import processes
import pytest
import recorders

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(5400)]

PYTORCH = Path(__file__).parents[1] / "support" / "hook_programs" / "torch_suite.py"
LIMIT_SECONDS = 2400
VARIABLES: Final[dict[str, Any]] = {
    "COMMTRACE_RING_RECORDS": 1 << 19,  # the suites call faster than two busy cores can write the log
    "PYTHONPATH": Path(processes.__file__).parent,
}
POLLING = "test_util_sync.py"
"""Tests of locks, which repeat calls until they have the lock, so that the number of calls varies."""

LEFT_OUT: Final = ("test_spawn", "test_dynproc", "test_util_pool", "test_doc")
"""Modules of mpi4py that start further processes or listen on ports: their outcome depends on the machine."""
PARTS: Final = {"cco_nb": 130, "cco_pr": 140, "cco": 250, "p2p": 170, "rma": 50, "util": 200, "": 900}
"""Parts of mpi4py's suite: prefix of module names (the first that matches) -> least number of tests that pass."""

Outcomes = dict[str, dict[str, str]]
Calls = collections.Counter[tuple[int, str, int]]


@pytest.fixture(scope="module")
def mpi4py_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tests in the sdist of the installed mpi4py."""
    folder = tmp_path_factory.mktemp("mpi4py")
    wanted = f"mpi4py=={metadata.version('mpi4py')}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=mpi4py", "-d", str(folder)]
    done = subprocess.run([*command, wanted], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"cannot download the sdist of {wanted}: {done.stderr.strip().splitlines()[-1]}")
    [sdist] = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder)
    [suite] = folder.glob("*/test")
    return suite


def modules(suite: Path, part: str) -> list[str]:
    """Return the modules of one part in alphabetical order."""
    names = (path.stem for path in sorted(suite.glob("test_*.py")) if path.stem not in LEFT_OUT)
    return [name for name in names if next(filter(name.removeprefix("test_").startswith, PARTS)) == part]


def calls(log: Path) -> Calls:
    """Count the calls by (rank, operation, payload in bytes); assert that no hook failed and no call is missing."""
    counts: Calls = collections.Counter()
    for left in processes.read_all(log):
        assert left.stats["hook_errors"] == 0, left.stats["first_error"]
        assert left.stats["calls"] == len(left.records), left.stats
        rank = left.tables["process"][0]["rank"]
        ops = {row["id"]: row["op"] for row in left.tables.get("kinds", [])}
        sites = [row["id"] for row in left.tables.get("sites", []) if Path(row["file"]).name == POLLING]
        times = left.records["t_begin"]
        polling = times[np.isin(left.records["site"], sites)]
        # Some calls of these tests have unittest's `assertRaises` as call site, so all calls of that time are left out.
        records = left.records[(times < polling.min()) | (times > polling.max())] if len(polling) else left.records
        sizes = zip(records["kind"].tolist(), records["payload"].tolist(), strict=True)
        counts.update((rank, ops[kind], size) for kind, size in sizes)
    return counts


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part or "others")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mpi", mpi_launch.NAMES)
def test_mpi4py(mpi: str, ranks: int, part: str, mpi4py_suite: Path, tmp_path: Path) -> None:
    recorders.needs("native")
    mpi_launch.needs(mpi)

    def outcomes(recorder: str | None) -> Outcomes:
        out = tmp_path / str(recorder)
        out.mkdir()
        mpi_launch.succeeds(
            mpi, "suite", mpi4py_suite, out, *modules(mpi4py_suite, part), ranks=ranks, limit=LIMIT_SECONDS,
            log=out / "log" if recorder else None, COMMTRACE_RECORDER=recorder or "python", **VARIABLES,
        )  # fmt: skip
        return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}

    untraced = outcomes(None)
    assert len(untraced) == ranks
    for rank_outcomes in untraced.values():
        assert sum(outcome == "passed" for outcome in rank_outcomes.values()) >= PARTS[part]
    for recorder in recorders.RECORDERS:
        assert outcomes(recorder) == untraced
    assert calls(tmp_path / "python" / "log") == calls(tmp_path / "native" / "log")


@pytest.mark.parametrize("ranks", [2, 3])
def test_pytorch(ranks: int, tmp_path: Path) -> None:
    recorders.needs("native")
    pytest.importorskip("expecttest")

    def outcomes(recorder: str | None) -> dict[str, str]:
        folder = tmp_path / str(recorder)
        for name in ("barrier", "test_dir"):
            (folder / name).mkdir(parents=True)
        settings: dict[str, Any] = {"COMMTRACE": folder / "log", "COMMTRACE_RECORDER": recorder} if recorder else {}
        result = processes.run(
            [sys.executable, PYTORCH, folder / "outcomes.json"],
            limit=LIMIT_SECONDS, WORLD_SIZE=ranks, TEMP_DIR=folder, **VARIABLES, **settings,
        )  # fmt: skip
        assert result.status == 0, result.err[-4000:]
        loaded: dict[str, str] = json.loads((folder / "outcomes.json").read_text())
        return loaded

    untraced = outcomes(None)
    assert sum(outcome == "passed" for outcome in untraced.values()) >= 80
    for recorder in recorders.RECORDERS:
        assert outcomes(recorder) == untraced
    assert calls(tmp_path / "python" / "log") == calls(tmp_path / "native" / "log")
