"""Replays of programs whose schedule is known, with and without changes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from factory import ALL_REDUCE, BARRIER
from replayed_programs import (
    Instruction,
    Operation,
    Program,
    Scale,
    random_program,
    run,
    shows_buffered,
    unchanged,
    write,
)

from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.event_graph import CircularEventsError, EventGraph
from commtrace.analyses.what_if.predictions import what_if
from commtrace.analyses.what_if.recorded_graph import Part
from commtrace.run import open_run
from commtrace.schema import Clock

US = 1_000
STEPS = 6
SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(20, 500))]


@pytest.mark.parametrize("seed", SEEDS)
def test_events_occur_when_a_recursion_says(seed: int) -> None:
    chance = random.Random(seed)
    events = chance.randint(1, 40)
    names = chance.sample(range(events), events)  # edges do not follow the numbers
    pairs = [(a, b) for a in range(events) for b in range(a + 1, events) if chance.random() < 0.2]
    edges = [(names[a], names[b]) for a, b in pairs]
    start = np.array([chance.choice([-np.inf, chance.uniform(0, 100)]) for _ in range(events)])
    delays = np.array([[chance.choice([-np.inf, chance.uniform(-5, 50)]) for _ in edges] for _ in range(3)])
    graph = EventGraph(start, *np.array(edges, np.int64).reshape(-1, 2).T)
    times = graph.times(delays.reshape(3, len(edges)))
    for row, own in zip(times, delays, strict=True):

        def expected(event: int, own: np.ndarray = own) -> float:
            arrived = [expected(a) + delay for (a, b), delay in zip(edges, own, strict=True) if b == event]
            return float(max([start[event], *arrived]))

        assert row.tolist() == [expected(event) for event in range(events)]


def test_a_circle() -> None:
    graph = EventGraph(np.zeros(3), np.array([0, 1, 2]), np.array([1, 2, 1]))
    with pytest.raises(CircularEventsError, match="2 of 3 events wait for each other in a circle"):
        graph.times(np.ones(3))


def test_the_longest_path() -> None:
    graph = EventGraph(np.array([0.0, 5.0, -np.inf, -np.inf]), np.array([0, 1, 2]), np.array([2, 2, 3]))
    delays = np.array([10.0, 1.0, 3.0])
    times = graph.times(delays)
    assert times.tolist() == [0, 5, 10, 13]
    assert [*graph.path(delays, times, 3)] == [2, 0]


CHANGES: dict[str, tuple[Scale, Scale]] = {
    "compute=0.5x": (lambda ns: ns // 2, unchanged),
    "compute=3x": (lambda ns: 3 * ns, unchanged),
    "scale-network=4x": (unchanged, lambda ns: ns // 4),
    "scale-network=0.25x": (unchanged, lambda ns: 4 * ns),
    "free=data": (unchanged, lambda ns: 0),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_agrees_with_the_simulator(seed: int, tmp_path: Path) -> None:
    """To the nanosecond as recorded, and to the microsecond with each change."""
    chance = random.Random(seed)
    ranks = chance.randint(3, 6)
    program = random_program(chance, ranks, STEPS)
    write(program, before := run(program), tmp_path)
    replayed = replayed_run(open_run(tmp_path))
    replay = replayed.replay
    steps = range(1, STEPS - 1)
    assert replay.paths.steps.tolist() == [*steps]
    assert replay.error_ns == 0
    assert replay.step_ns(replay.delays).tolist() == before.step_ns(ranks, steps)
    if not shows_buffered(program, before, int(replay.paths.ends[:, 0].max())):
        return  # nothing in the log tells whether a send waits for its receive
    for change in CHANGES:
        expected = run(program, *CHANGES[change]).step_ns(ranks, steps)
        found = replay.step_ns(changed_run(replayed, [change]).delays[0])
        assert found[1:] == pytest.approx(expected[1:], abs=US), change


def test_parts_are_those_of_the_program(tmp_path: Path) -> None:
    """Two ranks: compute, all_reduce. Everything of a step is one of the two."""
    program = Program(2, [], [[], []])
    for step in range(5):
        program.operations.append(Operation(ALL_REDUCE, (0, 1), 0, {0: 70 * US, 1: 70 * US}, step, False))
        for rank in (0, 1):
            own = (100 + 50 * rank) * US
            program.instructions[rank] += [
                Instruction("compute", own, -1, step=step),
                Instruction("call", 0, step, step=step),
            ]
    write(program, run(program), tmp_path)
    replayed = replayed_run(open_run(tmp_path))
    replay = replayed.replay
    sums = {part: replay.delays[replay.part == part].sum() / US for part in Part}
    assert sums[Part.COMPUTATION] == 3 * (100 + 150)
    # Each rank's operation waits for its own arrival, and for that of the last rank.
    assert sums[Part.TRANSFER] == 3 * 2 * 2 * 70
    expected = {"without-straggler=worst": 170, "without-straggler=0": 220, "balance": 195, "no-wait": 220}
    assert {
        change: what_if(changed_run(replayed, [change]))["step_ns"].iloc[-1] / US for change in expected
    } == expected


def test_ends_that_waits_observed_late(tmp_path: Path) -> None:
    """Background operations take 50 us. Their end is seen when it occurs in every third step, else at a later wait."""
    program = Program(2, [], [[], []])
    for step in range(9):
        transfer = dict.fromkeys((0, 1), 50 * US)
        program.operations.append(Operation(ALL_REDUCE, (0, 1), 0, transfer, 2 * step, True))
        program.operations.append(Operation(BARRIER, (0, 1), 0, transfer, 2 * step + 1, False))
        for rank in (0, 1):
            program.instructions[rank] += [
                Instruction("call", 0, 2 * step, step=step),
                Instruction("compute", (400 if step % 3 else 10) * US, -1, step=step),
                Instruction("wait", 0, 2 * step, step=step),
                Instruction("call", 0, 2 * step + 1, step=step),
            ]
    before = run(program)
    write(program, before, tmp_path, clock=Clock.WAIT)
    replayed = replayed_run(open_run(tmp_path))
    assert replayed.replay.error_ns == 0
    found = replayed.replay.step_ns(changed_run(replayed, ["compute=0.01x"]).delays[0])
    expected = run(program, lambda ns: ns // 100)
    assert found[1:] == pytest.approx(expected.step_ns(2, range(1, 8))[1:], abs=US)
