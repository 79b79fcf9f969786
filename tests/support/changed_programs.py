"""Random programs with changes that their generator knows, and the verdict on them from each source of expected calls.

program = ChangedProgram(seed)
verdict = SOURCES["rules"](program, tmp_path)
assert {*reported(verdict)} == {*program.differences("rules")}
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple

from factory import (
    ALL_GATHER,
    ALL_REDUCE,
    ALONE,
    BARRIER,
    KINDS,
    PAIR,
    REDUCE_SCATTER,
    SITES,
    WORLD,
    LogFactory,
    record,
)

from commtrace.analyses.compare.baseline import read_baseline, to_text
from commtrace.analyses.compare.counted_calls import DETAILED_STEPS
from commtrace.analyses.compare.recorded_calls import read_calls
from commtrace.analyses.compare.rules_verdict import check_by_rules
from commtrace.analyses.compare.two_runs import compare_calls
from commtrace.analyses.compare.verdict import Verdict
from commtrace.run import Run, open_run
from commtrace.schema import Phase
from commtrace.theory import ExpectedCall, Prediction
from commtrace.theory.expected_calls import WaterfallBar

ORDER: Final = -9
"""Payload of a difference that stands for another order."""

ROLES: Final = {WORLD: "data", PAIR: "tensor"}
OPS: Final = {kind["id"]: str(kind["op"]) for kind in KINDS}
_SIZES: Final = range(64, 640, 64)


class ProgramCall(NamedTuple):
    """A call of the program."""

    kind: int
    payload: int
    group: int
    phase: Phase


class Difference(NamedTuple):
    """A difference of a rank and step: `calls` is above 0 for calls that were not expected."""

    rank: int
    step: int
    role: str
    op: str
    payload: int
    calls: int
    cause: str = ""


class Change(NamedTuple):
    """A change of one call in a step: kind, ranks, steps, position of the call, and the call that it becomes."""

    kind: str
    ranks: frozenset[int]
    steps: frozenset[int]
    position: int
    call: ProgramCall


class ChangedProgram:
    """A program of some ranks and steps, and its changes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.ranks = self._random.choice((2, 4, 6))
        self.steps = self._random.choice((1, 2, 3, 5, 8, 8, 70 if seed % 5 == 0 else 8))
        patterns = [self._pattern() for _ in range(self._random.randint(1, 3))]
        every = self._random.randint(1, 4)
        self._pattern_of_step = {step: patterns[step // every % len(patterns)] for step in range(self.steps)}
        self._pattern_of_step[-1] = self._pattern(Phase.INIT)
        self.changes: list[Change] = []
        used: set[tuple[int, int, int]] = set()
        for number in range(self._random.choice((0, 1, 2, 3, 4))):
            change = self._change(number)
            places = {(rank, step, change.call.group) for rank in change.ranks for step in change.steps}
            if not places & used:
                self.changes.append(change)
                used |= places

    def calls(self, rank: int, step: int, *, changed: bool) -> list[ProgramCall]:
        """Return the calls of a rank in a step, in their order."""
        calls = [*self._pattern_of_step[step]]
        mine = [change for change in self.changes if rank in change.ranks and step in change.steps] if changed else []
        # The position of a change is that of the unchanged program: later ones first.
        for kind, _, _, position, call in sorted(mine, key=lambda change: -change.position):
            if kind == "missing":
                del calls[position]
            elif kind == "resized":
                calls[position] = call
            elif kind == "moved":
                after = next(at for at in range(position + 1, len(calls)) if calls[at].group == call.group)
                calls[position], calls[after] = calls[after], calls[position]
            else:
                calls.insert(position, call)
        return calls

    def differences(self, source: str) -> Iterator[Difference]:
        """Yield the differences that a comparison must report."""
        for change in self.changes:
            for rank in change.ranks:
                for step in change.steps:
                    yield from self._differences(change, rank, step, source)

    def payload(self, *, changed: bool) -> int:
        """Return the payload of all calls of all ranks."""
        places = [(rank, step) for rank in range(self.ranks) for step in range(-1, self.steps)]
        return sum(call.payload for place in places for call in self.calls(*place, changed=changed))

    def group_size(self, group: int) -> int:
        """Return the number of ranks of a group."""
        return self.ranks if group == WORLD else 2

    def predict(self, job: Mapping[str, Any]) -> Prediction:
        """Return what rules expect of any of the ranks: the calls of the program without changes."""
        expected = {
            step: tuple(
                ExpectedCall(OPS[call.kind], call.payload, "test", number, None, ROLES[call.group], size)
                for call, number in Counter(pattern).items()
                for size in [self.group_size(call.group) if self.steps % 2 else None]
            )
            for step, pattern in self._pattern_of_step.items()
        }
        steps = tuple(expected[step] for step in range(self.steps))
        form = WaterfallBar("none", Fraction(0))
        return Prediction("test", self.ranks, expected[-1], steps, form, (), others={"tensor": 2})

    def _pattern(self, phase: Phase = Phase.BACKWARD) -> list[ProgramCall]:
        """Return calls in which each group has at least three, not all equal."""
        calls = [self._call(group, phase) for group in ROLES for _ in range(self._random.randint(1, 5))]
        calls += [ProgramCall(ALL_REDUCE, size, group, phase) for group in ROLES for size in (8, 16)]
        self._random.shuffle(calls)
        return calls

    def _call(self, group: int, phase: Phase) -> ProgramCall:
        kind = self._random.choice((ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BARRIER))
        return ProgramCall(kind, 0 if kind == BARRIER else self._random.choice(_SIZES), group, phase)

    def _change(self, number: int) -> Change:
        """Return a change of the same call in some steps with the same pattern, on some ranks."""
        pattern = self._random.choice([*self._pattern_of_step.values()])
        steps = [step for step, calls in self._pattern_of_step.items() if calls is pattern]
        some_steps = self._random.sample(steps, self._random.randint(1, len(steps)))
        some_ranks = self._random.sample(range(self.ranks), self._random.randint(1, self.ranks))
        if self._random.random() < 0.3:
            some_ranks = [*range(self.ranks)]
        kind = self._random.choice(("missing", "added", "evaluated", "resized", "moved"))
        position = self._random.randrange(len(pattern))
        if kind == "moved":
            position = self._movable(pattern)
        call = pattern[position]
        size = 10_000 * (number + 1)  # no other call has this size
        if kind in ("added", "evaluated"):
            call = self._call(call.group, Phase.EVALUATION if kind == "evaluated" else call.phase)
            call = call._replace(kind=ALL_REDUCE, payload=size)
        elif kind == "resized":
            call = call._replace(kind=call.kind if call.payload else ALL_REDUCE, payload=size)
        return Change(kind, frozenset(some_ranks), frozenset(some_steps), position, call)

    def _movable(self, pattern: list[ProgramCall]) -> int:
        """Return the position of a call that differs from the next one of its group."""
        for group in self._random.sample([*ROLES], len(ROLES)):
            positions = [at for at, call in enumerate(pattern) if call.group == group]
            pairs = [at for at, after in itertools.pairwise(positions) if pattern[at] != pattern[after]]
            if pairs:
                return self._random.choice(pairs)
        raise AssertionError("each group has calls of two sizes")

    def _differences(self, change: Change, rank: int, step: int, source: str) -> Iterator[Difference]:
        before, after = self._pattern_of_step[step][change.position], change.call
        role = ROLES[after.group]
        if change.kind == "moved":
            if source != "rules":  # they have no order
                yield Difference(rank, step, role, "-", ORDER, 0)
            return
        if source == "rules" and step >= DETAILED_STEPS:
            yield from self._late_differences(change, rank, step)
            return
        gone = change.kind in ("missing", "resized")
        found = change.kind in ("added", "evaluated", "resized")
        cause = "evaluation" if change.kind == "evaluated" else ""
        if gone:
            yield Difference(rank, step, role, OPS[before.kind], before.payload, -1)
        if found:
            yield Difference(rank, step, role, OPS[after.kind], after.payload, 1, cause)

    def _late_differences(self, change: Change, rank: int, step: int) -> Iterator[Difference]:
        """Yield the sums of calls and bytes by which the cells of a late step differ, the bytes as payload."""
        calls: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        before, after = self._pattern_of_step[step][change.position], change.call
        if change.kind in ("missing", "resized"):
            calls[OPS[before.kind]] -= 1
            sizes[OPS[before.kind]] -= before.payload
        if change.kind in ("added", "evaluated", "resized"):
            calls[OPS[after.kind]] += 1
            sizes[OPS[after.kind]] += after.payload
        yield from (Difference(rank, step, ROLES[after.group], op, sizes[op], calls[op]) for op in calls)


def write_program(
    program: ChangedProgram, folder: Path, *, changed: bool, simulated: bool = False, lines_later: int = 0
) -> Run:
    """Write the log of a program, in a dry run of one rank that stands for all, and return its run.

    Args:
        program: The program.
        folder: The log's directory.
        changed: Whether the program has its changes.
        simulated: Whether the log is one of a dry run.
        lines_later: Number of lines that were added above the call sites.
    """
    log = LogFactory(folder)
    for rank in [0] if simulated else range(program.ranks):
        process = log.process(rank, pid=rank + 1, world_size=program.ranks, simulated=simulated)
        pair = [rank - rank % 2, rank - rank % 2 + 1]
        process.known({WORLD: [*range(program.ranks)], PAIR: pair, ALONE: [rank]}, ROLES)
        for row in SITES if lines_later else ():
            process.add("sites", **{**row, "id": row["id"] + 100, "line": row["line"] + lines_later})
        process.add("job", id=1, rank=rank)
        if simulated:
            process.add("stands_for", ranks=f"0-{program.ranks - 1}", count=program.ranks)
        rows = [
            record(
                kind=call.kind,
                payload=call.payload,
                local=call.payload // program.group_size(call.group) if call.kind != ALL_REDUCE else 0,
                group=call.group,
                phase=call.phase,
                site=101 if lines_later else 1,
                step=step,
                t_begin=1_000 * (step + 2) * 100 + number,
            )
            for step in range(-1, program.steps)
            for number, call in enumerate(program.calls(rank, step, changed=changed))
        ]
        process.write(rows).end()
    return open_run(folder)


def _by_rules(program: ChangedProgram, folder: Path) -> Verdict:
    verdict, _ = check_by_rules(write_program(program, folder, changed=True), strict=True)
    return verdict


def _by_run(program: ChangedProgram, folder: Path, **log: Any) -> Verdict:
    expected = write_program(program, folder / "expected", changed=False, **log)
    return compare_calls(read_calls(expected), read_calls(write_program(program, folder / "recorded", changed=True)))


def _by_baseline(program: ChangedProgram, folder: Path) -> Verdict:
    text = to_text(read_calls(write_program(program, folder / "expected", changed=False)), ())
    (folder / "calls.txt").write_text(text, encoding="utf-8")
    expected = read_baseline(folder / "calls.txt").run
    return compare_calls(expected, read_calls(write_program(program, folder / "recorded", changed=True)))


SOURCES: Final[Mapping[str, Callable[[ChangedProgram, Path], Verdict]]] = {
    "rules": _by_rules,
    "dry run": lambda program, folder: _by_run(program, folder, simulated=True),
    "accepted run": lambda program, folder: _by_run(program, folder, lines_later=3),
    "baseline": _by_baseline,
    "run": _by_run,
}
