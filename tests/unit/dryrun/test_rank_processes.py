"""A simulated rank continues without a message only when no rank can send one any more."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commtrace.dryrun import rank_processes


@dataclass
class Waiting:
    """Fake process of a rank; `waits` are the results of `awaited_message`, call by call, and the last one repeats."""

    waits: list[tuple[int, int] | None]
    has_message: bool = False

    def awaited_message(self) -> tuple[int, int] | None:
        return self.waits.pop(0) if len(self.waits) > 1 else self.waits[0]

    def may_continue(self) -> bool:
        return self.has_message


def skipped(folder: Path, *ranks: Waiting) -> list[str]:
    """Return the files that let ranks continue, after all ranks were seen waiting."""
    running: Any = dict(enumerate(ranks))
    waits = {rank: process.awaited_message() for rank, process in running.items()}
    job: Any = SimpleNamespace(messages=folder)
    rank_processes._break_deadlock(job, running, waits)
    return sorted(path.name for path in folder.iterdir())


def test_all_wait_for_each_other(tmp_path: Path) -> None:
    assert skipped(tmp_path, Waiting([(1, 0)]), Waiting([(0, 0)])) == ["skip-00000"]


@pytest.mark.parametrize(
    "second",
    [
        Waiting([(0, 0)], has_message=True),
        Waiting([(0, 0), (0, 64)]),  # has read a message since, and may have sent one before it waited again
        Waiting([(0, 0), (2, 0)]),
        Waiting([(0, 0), None]),
    ],
    ids=["has a message", "has read", "another", "runs"],
)
def test_a_rank_that_went_on_meanwhile(second: Waiting, tmp_path: Path) -> None:
    assert skipped(tmp_path, Waiting([(1, 0)]), copy.deepcopy(second)) == []
    assert skipped(tmp_path, second, Waiting([(0, 0)])) == []
