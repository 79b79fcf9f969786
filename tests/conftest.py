"""What all tests share: nothing of the surroundings reaches a test or the processes that it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import processes
import pytest
import ranks

LONG = os.environ.pop("COMMTRACE_LONG", "0") == "1"  # not a setting of commtrace: what tests start must not see it
# Faults are put into parts in Python, and the two recorders differ in the ends that they can see: the portable one is
# what is tested, unless COMMTRACE_RECORDER=native asks for the other, which tests of its own compare with it.
RECORDER = os.environ.get("COMMTRACE_RECORDER", "python")

for _name in [name for name in os.environ if name.startswith("COMMTRACE")]:
    del os.environ[_name]
os.environ["COMMTRACE_RECORDER"] = RECORDER
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


@pytest.fixture(scope="session")
def nursery() -> Iterator[ranks.Nursery]:
    """A process that has imported torch once, and forks ranks of small programs."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    with ranks.Nursery() as parent:
        yield parent
