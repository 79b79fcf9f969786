"""Predictions for messages that block their rank, held to a simulator of the same program with other messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from factory import ALL_REDUCE, BARRIER
from replayed_programs import GRADIENTS_SITE, PARAMETERS_SITE, Instruction, Operation, Program, run, write

import commtrace
from commtrace.analyses.what_if import bucket_size
from commtrace.analyses.what_if.blocking_buckets import BlockingCalls, NewMessage
from commtrace.analyses.what_if.changed_run import replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.message_plans import Planned
from commtrace.analyses.what_if.predictions import what_if
from commtrace.errors import CommtraceError
from commtrace.schema import Phase, Purpose

US: Final = 1_000
MIB: Final = 1 << 20
LATENCY_US, US_PER_MIB, BLOCK_US = 40, 100, 80
RANKS: Final = 3
SIZES: Final = [1, 1, 2, 1, 3, 1, 20]
"""MiB of the parameters of each block, in the order of forward. They differ enough to show the latency."""


def trained(
    folder: Path, gathers: Sequence[Sequence[int]], reductions: Sequence[Sequence[int]], *, late_us: int = 0
) -> list[int]:
    """Write a run whose ranks gather parameters in forward and reduce gradients in backward, and wait in each call.

    Args:
        folder: Directory of the log.
        gathers: Blocks whose parameters each call gathers.
        reductions: Blocks whose gradients each call reduces.
        late_us: Additional computation of rank 1 in each block, us.

    Returns:
        The duration of steps, ns.
    """
    program = Program(RANKS, [], [[] for _ in range(RANKS)])
    everyone = tuple(range(RANKS))

    def call(step: int, phase: Phase, kind: int, site: int, size: int) -> None:
        us = LATENCY_US + US_PER_MIB * size if size else 5
        times = dict.fromkeys(everyone, us * US)
        number = len(program.operations)
        program.operations.append(Operation(kind, everyone, 0, times, number, False, payload=size * MIB, site=site))
        for rank in everyone:
            program.instructions[rank].append(Instruction("call", 0, number, phase, step))

    def compute(step: int, phase: Phase) -> None:
        for rank in everyone:
            own = (BLOCK_US + (late_us if rank == 1 else 0)) * US
            program.instructions[rank].append(Instruction("compute", own, -1, phase, step))

    for step in range(7):
        for blocks in gathers:
            call(step, Phase.FORWARD, ALL_REDUCE, PARAMETERS_SITE, sum(SIZES[block] for block in blocks))
            for _ in blocks:
                compute(step, Phase.FORWARD)
        for blocks in reductions:
            for _ in blocks:
                compute(step, Phase.BACKWARD)
            call(step, Phase.BACKWARD, ALL_REDUCE, GRADIENTS_SITE, sum(SIZES[block] for block in blocks))
        call(step, Phase.OPTIMIZER, BARRIER, 2, 0)
    ran = run(program)
    write(program, ran, folder)
    return ran.step_ns(RANKS, range(2, 6))


EACH: Final = [[block] for block in range(len(SIZES))]
PAIRS: Final = [[0, 1], [2, 3], [4, 5], [6]]
REVERSED: Final = [blocks[::-1] for blocks in EACH[::-1]]
REVERSED_PAIRS: Final = [blocks[::-1] for blocks in PAIRS[::-1]]


def in_pairs(calls: BlockingCalls) -> Planned:
    """Return the messages of pairs of blocks, from those of each one."""
    at = {Purpose.PARAMETERS_FORWARD: [0, 2, 4, 6], Purpose.GRADIENTS: [0, 2, 4, 6]}[calls.purpose]
    blocks = PAIRS if calls.purpose is Purpose.PARAMETERS_FORWARD else REVERSED_PAIRS
    return Planned(
        [NewMessage(*own) for own in zip(at, [sum(SIZES[block] for block in own) * MIB for own in blocks], strict=True)]
    )


def of_each(calls: BlockingCalls) -> Planned:
    """Return the messages of each block, from those of pairs."""
    order = EACH if calls.purpose is Purpose.PARAMETERS_FORWARD else REVERSED
    at = [0, 0, 1, 1, 2, 2, 3] if calls.purpose is Purpose.PARAMETERS_FORWARD else [0, 1, 1, 2, 2, 3, 3]
    return Planned([NewMessage(*own) for own in zip(at, [SIZES[block] * MIB for [block] in order], strict=True)])


@pytest.mark.parametrize("late_us", [0, 30])
def test_combined_messages_agree_with_the_simulator(
    late_us: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that compute longer are waited for in fewer places, but lose nothing by it: only the latency counts."""
    before = trained(tmp_path / "before", EACH, REVERSED, late_us=late_us)
    expected = trained(tmp_path / "after", PAIRS, REVERSED_PAIRS, late_us=late_us)
    monkeypatch.setattr(bucket_size, "_plan", lambda _run, _limit: in_pairs)
    changed = changed_run(replayed_run(commtrace.open(tmp_path / "before")), ["bucket=3MB"])
    assert changed.replayed.replay.step_ns(changed.delays[0])[1:] == pytest.approx(expected, abs=1 * US)
    assert before[0] - expected[0] == 6 * LATENCY_US * US
    row = what_if(changed).iloc[-1]
    assert row.low_ns <= expected[0] <= row.high_ns


def test_divided_messages_agree_with_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "before", PAIRS, REVERSED_PAIRS)
    expected = trained(tmp_path / "after", EACH, REVERSED)
    monkeypatch.setattr(bucket_size, "_plan", lambda _run, _limit: of_each)
    changed = changed_run(replayed_run(commtrace.open(tmp_path / "before")), ["bucket=1MB"])
    # The recorded sizes, 2 to 20 MiB, differ too little to show the latency, which bounds the interval.
    low, high = (changed.replayed.replay.step_ns(changed.delays[row])[1:] for row in (1, 2))
    assert (low <= expected).all()
    assert (high >= expected).all()
    sizes = changed.replayed.replay.message
    assert {*sizes[sizes >= 0].tolist()} == {size * MIB for size in SIZES}


def test_changes_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, EACH, REVERSED, late_us=30)
    monkeypatch.setattr(bucket_size, "_plan", lambda _run, _limit: in_pairs)
    replayed = replayed_run(commtrace.open(tmp_path))
    for text in ("scale-network=0.5x", "no-wait", "compute=0.5x", "balance", "free=all_reduce"):
        both = [
            what_if(changed_run(replayed, texts))["step_ns"].iloc[-1]
            for texts in ((text, "bucket=3MB"), ("bucket=3MB", text))
        ]
        assert both[0] == pytest.approx(both[1], rel=0.01), text
    with pytest.raises(CommtraceError, match="have already been changed"):
        changed_run(replayed, ["bucket=3MB", "bucket=3MB"])


def test_calls_that_do_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_size, "_plan", lambda _run, _limit: in_pairs)
    program = Program(RANKS, [], [[Instruction("compute", US)] for _ in range(RANKS)])
    for step in range(5):
        program.operations.append(Operation(BARRIER, (0, 1, 2), 0, dict.fromkeys(range(3), US), step, False, payload=0))
        for rank in range(RANKS):
            program.instructions[rank] += [
                Instruction("compute", US),
                Instruction("call", 0, step, Phase.BACKWARD, step),
            ]
    write(program, run(program), tmp_path)
    with pytest.raises(CommtraceError, match="no gradients or parameters for which their rank waits in the call"):
        changed_run(replayed_run(commtrace.open(tmp_path)), ["bucket=1MB"])
