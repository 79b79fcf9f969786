"""The comparison reports exactly the changes of random programs, whoever expects their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed_programs import ORDER, SOURCES, ChangedProgram, Difference, write_program

from commtrace.analyses.compare import rules_run
from commtrace.analyses.compare.counted_calls import DETAILED_STEPS
from commtrace.analyses.compare.verdict import Verdict
from commtrace.analyses.grouping import rows_of
from commtrace.cli import main
from commtrace.rank_ranges import parse_ranks

PROGRAMS_PER_TEST = 10


def reported(verdict: Verdict, source: str) -> Iterator[Difference]:
    """Yield the differences of each rank and step: those of the table, expanded."""
    sums: Counter[tuple[int, int, str, str]] = Counter()
    sizes: Counter[tuple[int, int, str, str]] = Counter()
    for row in rows_of(verdict.table):
        training = str(row.steps).rpartition("step ")[2] if "step " in str(row.steps) else ""
        steps = [-1] * str(row.steps).startswith("start-up") + parse_ranks(training)
        for rank in parse_ranks(str(row.ranks)):
            for step in steps:
                if row.kind == "order":
                    yield Difference(rank, step, row.role, "-", ORDER, 0)
                elif source == "rules" and step >= DETAILED_STEPS:  # only the sums of each cell are known
                    sums[rank, step, row.role, row.op] += row.calls_b - row.calls_a
                    sizes[rank, step, row.role, row.op] += row.difference_bytes
                else:
                    yield Difference(rank, step, row.role, row.op, row.payload, row.calls_b - row.calls_a, row.cause)
    yield from (Difference(*cell, sizes[cell], calls) for cell, calls in sums.items())


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.exhaustive) for first in range(10, 500, PROGRAMS_PER_TEST))]
)
def test_exactly_the_changes_are_reported(
    source: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + PROGRAMS_PER_TEST):
        program = ChangedProgram(seed)
        monkeypatch.setattr(rules_run, "predict", program.predict)
        verdict = SOURCES[source](program, tmp_path / str(seed))
        found = Counter(reported(verdict, source))
        assert max(found.values(), default=1) == 1, seed  # merged rows do not overlap
        assert {*found} == {*program.differences(source)}, seed
        assert verdict.agrees == (not found), seed
        assert verdict.compared == (frozenset(range(program.ranks)), frozenset(range(-1, program.steps))), seed
        assert [size for _, size in verdict.volumes] == [program.payload(changed=False), program.payload(changed=True)]


def test_the_changes_are_of_all_kinds() -> None:
    """The generated programs have every kind of change, on some ranks and steps and on all; some have none."""
    programs = [ChangedProgram(seed) for seed in range(PROGRAMS_PER_TEST * 5)]
    kinds = {kind for program in programs for kind, *_ in program.changes}
    assert kinds == {"missing", "added", "evaluated", "resized", "moved"}
    assert any(not program.changes for program in programs)
    assert any(len(ranks) == program.ranks for program in programs for _, ranks, *_ in program.changes)
    assert any(len(ranks) < program.ranks for program in programs for _, ranks, *_ in program.changes)
    assert any(program.steps > 64 for program in programs)


def test_the_commands_tell_a_changed_program(tmp_path: Path) -> None:
    program = next(ChangedProgram(seed) for seed in range(100) if ChangedProgram(seed).changes)
    for name, changed in (("a", False), ("b", True), ("again", False)):
        write_program(program, tmp_path / name, changed=changed)
    a, b, again = (str(tmp_path / name) for name in ("a", "b", "again"))
    assert main(["check", a, "--update-baseline", str(tmp_path / "calls.txt")]) == 0
    for log, status in ((b, 1), (again, 0)):
        assert main(["diff", a, log]) == status
        assert main(["check", log, "--against", a]) == status
        assert main(["check", log, "--baseline", str(tmp_path / "calls.txt")]) == status
