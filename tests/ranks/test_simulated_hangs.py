"""Hangs of many simulated ranks: the culprit and what it does, or what the ranks disagree about."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from simulated_hangs import FAULTS, LINE, Job, write_hang

from commtrace.analyses.across_ranks.culprits import HIGH, LOW, MEDIUM, Culprit, find_culprits
from commtrace.analyses.across_ranks.stalls import find_stalls
from commtrace.analyses.across_ranks.stuck_calls import find_stuck_calls
from commtrace.rank_ranges import parse_ranks
from commtrace.run import open_run

DEFAULT = ("lock", "two hangs", "operation")
WITHOUT_STACK = ("not sampled", "died", "left")


def assert_found(fault: str, job: Job, log: Path) -> None:
    run = open_run(log)
    tables = {**find_stuck_calls(run), **find_stalls(run)}
    culprits, calls = find_culprits(tables), tables["stuck_calls"]
    kind = FAULTS[fault][1]
    if kind in ("operation", "size", "dtype", "root", "tag", "order"):
        assert culprits == []
        disagreements = [text for text in calls["disagreement"] if text]
        assert all(text.startswith(f"{kind}: ") for text in disagreements[:1])
        assert f"rank {job.bad}" in disagreements[0]
        return
    ranks = {"whole host": [*job.host(job.bad)], "outside": [*range(job.ranks)]}.get(fault, [job.bad])
    first = culprits[0]
    assert (first.ranks, first.activity) == ((*ranks,), kind)
    assert first.line == ("" if fault in WITHOUT_STACK else LINE)
    assert first.confidence == {"not sampled": MEDIUM, "outside": LOW}.get(fault, HIGH)
    assert_waiting(fault, job, culprits)
    if fault != "outside":
        listed_first = {*parse_ranks(calls["absent_ranks"].iloc[0])}
        assert listed_first & {*ranks}, "the cause"


def assert_waiting(fault: str, job: Job, culprits: list[Culprit]) -> None:
    involved = {rank for culprit in culprits for rank in culprit.involved}
    assert involved == {*range(job.ranks)}
    assert [culprit.activity for culprit in culprits[1:]] == (["sleeping"] if fault == "two hangs" else [])


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        *(pytest.param(fault, 24, marks=() if fault in DEFAULT else pytest.mark.exhaustive) for fault in FAULTS),
        *(pytest.param(fault, 1024, marks=pytest.mark.exhaustive) for fault in FAULTS),
    ],
)
def test_a_fault(fault: str, ranks: int, tmp_path: Path) -> None:
    bad = random.Random(f"{fault} {ranks}").randrange(ranks)
    assert_found(fault, write_hang(tmp_path, fault, ranks, bad), tmp_path)


@pytest.mark.parametrize("seconds", [-3600, 3600])
@pytest.mark.parametrize("wrong", [(9,), range(16, 24), (11,)])
def test_a_wrong_wall_clock(wrong: Iterable[int], seconds: int, tmp_path: Path) -> None:
    """The clock of a host is wrong, or was set between the starts of its ranks: no rank seems to have died before."""
    job = write_hang(tmp_path, "lock", 24, 11, dict.fromkeys(wrong, seconds))
    assert_found("lock", job, tmp_path)
