"""Ends of real programs under each launcher: the diagnosis is true, or says that it is not known."""

from __future__ import annotations

import os
import random
from pathlib import Path

import mpi_launch
import pytest
from ending_runs import EXPECTED, LAUNCHERS, applies, run, verdict

from commtrace.cli import main

SEEDS = range(int(os.environ.get("DRAWS", "1")))
SIZES = (2, 3, 4, 8)


def draw(*values: object) -> random.Random:
    """Return random numbers that depend on these values only."""
    return random.Random(repr(values))


@pytest.mark.parametrize(("launcher", "kind"), [("mpich", "one"), ("openmpi", "os._exit")])
def test_the_first_end_of_a_job(launcher: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mpi_launch.needs(launcher)
    run(launcher, kind, 1, 0, 3, tmp_path / "log")
    found = verdict(kind, 1, 3, tmp_path / "log").partition(":")[0]
    assert found in ("right", "not known")  # on a busy machine, ends may be too close to each other
    if kind == "one":
        assert main(["check", str(tmp_path / "log")]) == 5
        first = "Rank 1 ended first, by RuntimeError at " if found == "right" else "Which process ended first is not "
        assert capsys.readouterr().out.startswith(first)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recorder", ["python", "native"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", EXPECTED)
def test_no_diagnosis_is_wrong(kind: str, launcher: str, seed: int, recorder: str, tmp_path: Path) -> None:
    if not applies(kind, launcher):
        pytest.skip("needs an MPI launcher (MPI_Abort), or control groups that limit memory")
    if launcher in ("openmpi", "mpich"):
        mpi_launch.needs(launcher)
    size = draw(kind, launcher, seed).choice(SIZES)
    bad_rank = draw(kind, seed).randrange(size)
    run(launcher, kind, bad_rank, seed, size, tmp_path / "log", recorder=recorder)
    assert not (found := verdict(kind, bad_rank, size, tmp_path / "log")).startswith("wrong"), found


@pytest.mark.exhaustive
@pytest.mark.parametrize("recorder", ["python", "native"])
@pytest.mark.parametrize("kind", ["one", "thread", "abort", "sigint", "sigterm_raise"])
def test_hooks_of_the_program_are_called_as_without_tracing(kind: str, recorder: str, tmp_path: Path) -> None:
    mpi_launch.needs("mpich")
    written = []
    for log in (None, tmp_path / "log"):
        folder = tmp_path / ("traced" if log else "untraced")
        folder.mkdir()
        run("mpich", kind, 0, 0, 2, log, recorder=recorder, report=folder)
        # Addresses of threads differ from process to process.
        texts = {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith("fault")}
        faults = {path.name for path in folder.glob("fault-0") if "Fatal Python error" in path.read_text()}
        written.append((texts.get("sys-0"), texts.get("threading-0"), faults))
    assert written[0] == written[1]
    assert any(written[0])
