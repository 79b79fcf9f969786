"""What all tests share: nothing of the surroundings reaches a test or the processes that it starts."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import mpi_launch
import processes
import pytest
import ranks
from recorders import RECORDERS, needs

LONG = os.environ.pop("COMMTRACE_LONG", "0") == "1"  # not a setting of commtrace: what tests start must not see it
for _name in [name for name in os.environ if name.startswith("COMMTRACE")]:
    del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what takes minutes, unless asked for."""
    for item in items:
        if item.get_closest_marker("long") is not None and not LONG:
            item.add_marker(pytest.mark.skip(reason="takes minutes; runs with COMMTRACE_LONG=1"))


@pytest.fixture(autouse=True)
def no_rings_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test that failed has left in shared memory is removed."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is not None:
        processes.clean_shm(folder)


@pytest.fixture(scope="session", params=RECORDERS)
def recorder(request: pytest.FixtureRequest) -> str:
    """Which recorder the programs of a test use: whatever asks for this runs once with each."""
    name: str = request.param
    needs(name)
    return name


@pytest.fixture
def new_recorder(recorder: str) -> processes.NewRecorder:
    """Makes recorders of this kind in the process of the test."""
    return functools.partial(processes.recorder_of, recorder)


@pytest.fixture(scope="session")
def nursery(recorder: str) -> Iterator[ranks.Nursery]:
    """A process that has imported torch once, and forks ranks of small programs, which `recorder` records."""
    with ranks.Nursery(recorder) as parent:
        yield parent


@pytest.fixture(scope="module", params=mpi_launch.NAMES)
def mpi(request: pytest.FixtureRequest) -> str:
    """An MPI that is installed: whatever asks for this runs once under each."""
    name: str = request.param
    mpi_launch.needs(name)
    return name


@pytest.fixture(scope="module", params=RECORDERS)
def mpi_recorder(request: pytest.FixtureRequest, mpi: str) -> str:
    """Which recorder the programs of `mpi` use; the native one is a library of its own, and needs no torch."""
    name: str = request.param
    if name == "native":
        from commtrace.hooks.native import libraries

        libraries.MPI.build()
    return name
