"""Lost overlap is found in real trainings, and equal runs have lost none, whatever else the machine does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import recorders
from draws import DRAWS

from commtrace.cli import main

pytestmark = pytest.mark.exhaustive
STEPS = 40
KINDS = ("ddp", "async", "prefetch")


@pytest.fixture(scope="module")
def nursery() -> Iterator[ranks.Nursery]:
    recorders.needs("native")
    with ranks.Nursery("native", OMP_NUM_THREADS=1) as parent:
        yield parent


@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("kind", KINDS)
def test_lost_overlap_is_found(
    kind: str, seed: int, nursery: ranks.Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = {name: tmp_path / name for name in ("accepted", "again", "lost")}
    for name, log in logs.items():
        statuses, outputs = nursery.run("overlapping", log, kind, STEPS, *["lost"] * (name == "lost"))
        assert statuses == [0, 0], "\n".join(outputs)
    found = {
        (name, other): main(["check", str(logs[name]), "--overlap-as", str(logs[other])])
        for name, other in (("again", "accepted"), ("accepted", "again"), ("lost", "accepted"))
    }
    expected = {("again", "accepted"): 0, ("accepted", "again"): 0, ("lost", "accepted"): 1}
    assert found == expected, capsys.readouterr().out
