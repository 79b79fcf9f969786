"""Fixtures and settings of all tests; COMMTRACE variables in the environment do not reach them."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis
import mpi_launch
import processes
import pytest
import ranks
import trainings
from recorders import RECORDERS, built_for_mpi, needs

for _name in [name for name in os.environ if name.startswith("COMMTRACE") and name != "COMMTRACE_GPT_NEOX"]:
    del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The default tier is the same in every run; with THEORY_SEED, as in `make test-all`, hypothesis draws more examples.
# No deadlines: other processes may take the cores for a moment.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("drawn", deadline=None)
hypothesis.settings.load_profile("drawn" if "THEORY_SEED" in os.environ else "repeatable")


def pytest_report_header() -> str:
    """Return the seed that draws the same models again."""
    return f"THEORY_SEED={trainings.seed()}"


@pytest.fixture(autouse=True)
def no_rings_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove what a failed test has left in shared memory."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is not None:
        processes.clean_shm(folder)


# ranks/hooks/native/test_recorders.py tests that both recorders write the same log of a program. The Python recorder is
# the reference: with it, the default tier asserts what the log must contain.
@pytest.fixture(scope="session", params=["python", pytest.param("native", marks=pytest.mark.exhaustive)])
def recorder(request: pytest.FixtureRequest) -> str:
    """The recorder that the programs of a test use; `make test-all` runs each test with both."""
    name: str = request.param
    needs(name)
    return name


@pytest.fixture(params=RECORDERS)
def new_recorder(request: pytest.FixtureRequest) -> processes.NewRecorder:
    """A function that makes a recorder in the process of the test."""
    needs(request.param)
    return functools.partial(processes.recorder_of, request.param)


@pytest.fixture(scope="session")
def nursery(recorder: str) -> Iterator[ranks.Nursery]:
    """A process that imports torch once, and forks ranks of small programs, which `recorder` records."""
    # torch imports its compiler at the first optimizer step, which would take a second in each rank.
    with ranks.Nursery(recorder, "torch._dynamo", TORCHINDUCTOR_COMPILE_THREADS=1) as parent:
        yield parent


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 128 KiB, and yield its path."""
    path = tmp_path / "disk"
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"commtrace", str(path).encode(), b"tmpfs", 0, b"size=128k"):
        pytest.skip(f"cannot mount a disk: {os.strerror(ctypes.get_errno())}")
    yield path
    assert libc.umount2(str(path).encode(), 2) == 0


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a call as stuck sooner, after a wait that is longer than any pause of small programs."""
    monkeypatch.setattr("commtrace.analyses.across_ranks.stuck_calls.MIN_WAIT_NS", 10**9)


_TOGETHER: Final = {
    "trainings": (
        "tests/examples/gpt_neox/test_train.py",
        "tests/ranks/dryrun/test_equals_real.py",
        "tests/ranks/dryrun/test_scripts.py",
        "tests/ranks/hooks/torch/test_registries.py",
        "tests/ranks/recording/test_summary_tables.py",
        "tests/ranks/theory/",
    ),
    "programs of hooks": (
        "tests/ranks/hooks/deepspeed/",
        "tests/ranks/hooks/native/test_recorders.py",
        "tests/ranks/hooks/torch/test_",
    ),
}
"""Files whose tests share programs that a test process starts once: `support/trainings.py`, `support/hook_programs`."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file, and files that share programs, in one process: each program then starts once.

    Only with `--dist loadfile`, and not in `make test-all`, where the exhaustive trainings take half of the time: two
    processes share them.
    """
    if config.getoption("dist") != "loadfile" or not config.getoption("markexpr"):
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    file_of = scheduler._split_scope

    def scope(test: str) -> str:
        return next((name for name, files in _TOGETHER.items() if test.startswith(files)), file_of(test))

    scheduler._split_scope = scope
    return scheduler


_FIRST_MPI, *_OTHER_MPIS = mpi_launch.NAMES


@pytest.fixture(
    scope="module", params=[_FIRST_MPI, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in _OTHER_MPIS)]
)
def mpi(request: pytest.FixtureRequest) -> str:
    """An installed MPI; `make test-all` runs each test with every one."""
    name: str = request.param
    mpi_launch.needs(name)
    return name


@pytest.fixture(scope="module", params=RECORDERS)
def mpi_recorder(request: pytest.FixtureRequest, mpi: str) -> str:
    """The recorder that the programs of `mpi` use; the native one is a separate library, which does not need torch."""
    name: str = request.param
    if name == "native":
        built_for_mpi()
    return name
