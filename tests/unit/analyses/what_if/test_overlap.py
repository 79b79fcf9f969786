"""`commtrace whatif --overlap`: the shortest step that overlap allows, beside steps computed by hand and simulated."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import replayed_programs
from factory import ALL_GATHER, ALL_REDUCE
from replayed_programs import GRADIENTS_SITE, PARAMETERS_SITE, US, Instruction, Operation, Program, run, write

from commtrace.analyses.what_if.changed_run import REMARKS, DoesNotApplyError, replayed_run
from commtrace.analyses.what_if.changes import changed_run
from commtrace.analyses.what_if.predictions import what_if
from commtrace.cli import main
from commtrace.errors import CommtraceError
from commtrace.run import open_run
from commtrace.schema import Phase

FORWARD, BACKWARD, OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
NORM: Final = 2
"""Site of a call without a known purpose."""


class Call(NamedTuple):
    """A call of each rank: us of computation before it, us of its transfer, and what it is."""

    compute: int
    transfer: int
    site: int = GRADIENTS_SITE
    phase: Phase = BACKWARD
    kind: int = ALL_REDUCE


def program_of(calls: list[Call], steps: int = 6, ranks: int = 3) -> Program:
    """Return a program whose ranks make synchronous calls, with some us more of computation on later ranks."""
    program = Program(ranks, [], [[] for _ in range(ranks)])
    everyone = tuple(range(ranks))
    for step in range(steps):
        for call in calls:
            number = len(program.operations)
            times = dict.fromkeys(everyone, call.transfer * US)
            program.operations.append(Operation(call.kind, everyone, 0, times, number, False, site=call.site))
            for rank in everyone:
                program.instructions[rank] += [
                    Instruction("compute", call.compute * US, -1, call.phase, step),
                    Instruction("call", 0, number, call.phase, step),
                ]
    return program


def overlapped_us(folder: Path, calls: list[Call], *changes: str) -> tuple[float, float]:
    """Return the recorded step and the one after changes, us."""
    program = program_of(calls)
    write(program, run(program), folder)
    table = what_if(changed_run(replayed_run(open_run(folder)), changes or ["overlap"]))
    return table["step_ns"].iloc[0] / US, table["step_ns"].iloc[-1] / US


END: Final = Call(30, 10, NORM, OPTIMIZER)


def test_gradients_are_waited_for_before_the_first_call_after_backward(tmp_path: Path) -> None:
    # The second bucket is launched after 200 us and takes 80; the optimizer's call follows 30 us of computation.
    assert overlapped_us(tmp_path, [Call(100, 50), Call(100, 80), END]) == (370, 290)


def test_operations_of_a_group_run_one_after_the_other(tmp_path: Path) -> None:
    # The first one is over after 100 + 150 us, the second 80 later.
    assert overlapped_us(tmp_path, [Call(100, 150), Call(100, 80), END]) == (470, 340)


def test_the_last_gradients_are_waited_for_at_the_end_of_the_step(tmp_path: Path) -> None:
    assert overlapped_us(tmp_path, [Call(100, 50), Call(100, 80)]) == (330, 280)


def test_parameters_begin_with_their_pass(tmp_path: Path) -> None:
    gather = Call(10, 40, PARAMETERS_SITE, FORWARD, ALL_GATHER)
    calls = [gather, gather._replace(compute=50, transfer=60), Call(70, 20)]
    # Gathered for 100 us from the begin of forward on, beside 130 us of computation.
    assert overlapped_us(tmp_path / "hidden", calls) == (250, 150)
    # Longer than the computation: backward's first call waits for them.
    calls[1] = calls[1]._replace(transfer=160)
    assert overlapped_us(tmp_path / "exposed", calls) == (350, 220)


def test_parameters_precede_gradients_in_the_queue_of_their_group(tmp_path: Path) -> None:
    """Gathered in backward after gradients, they begin with backward, and are over when these are ready."""
    gather = Call(0, 40, PARAMETERS_SITE, BACKWARD, ALL_GATHER)
    calls = [Call(50, 10, NORM, FORWARD), Call(100, 50), gather, Call(60, 20), END]
    assert overlapped_us(tmp_path, calls) == (50 + 10 + 100 + 50 + 40 + 60 + 20 + 30 + 10, 60 + 100 + 60 + 30 + 10)


def test_one_purpose_or_operation_alone(tmp_path: Path) -> None:
    gather = Call(10, 40, PARAMETERS_SITE, FORWARD, ALL_GATHER)
    calls = [gather, Call(100, 50), Call(100, 80), END]
    recorded, gradients = overlapped_us(tmp_path / "gradients", calls, "overlap=gradients reduced")
    assert (recorded, gradients) == (420, 340)
    assert overlapped_us(tmp_path / "gather", calls, "overlap=all_gather")[1] == 420 - 40
    assert overlapped_us(tmp_path / "all", calls, "overlap=data")[1] == 300


def test_the_step_is_that_of_an_asynchronous_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random steps with synchronous gradients, beside the same ones waited for before the optimizer's call."""
    monkeypatch.setattr(replayed_programs, "LAUNCH", 0)
    chance = random.Random(7)
    for number in range(25):
        calls = [Call(chance.randint(1, 300), chance.randint(1, 300)) for _ in range(chance.randint(1, 6))]
        program = program_of([*calls, END])
        for instructions in program.instructions:  # ranks are late in turns
            instructions[:] = [
                own._replace(ns=round(own.ns * (1 + chance.random()))) if own.what == "compute" else own
                for own in instructions
            ]
        write(program, run(program), tmp_path / str(number))
        changed = changed_run(replayed_run(open_run(tmp_path / str(number))), ["overlap"])
        found = changed.replayed.replay.step_ns(changed.delays[0])
        background = _asynchronous(program)
        expected = run(background).step_ns(3, range(1, 6))
        # The first replayed step begins as it was recorded.
        assert found[1:] == pytest.approx(expected[1 : len(found)])


def _asynchronous(program: Program) -> Program:
    """Return the program with its gradients in the background until the optimizer's call."""
    is_gradient = [own.site == GRADIENTS_SITE for own in program.operations]
    operations = [
        replace(own, is_async=gradient) for own, gradient in zip(program.operations, is_gradient, strict=True)
    ]  # fmt: skip
    result = Program(program.ranks, operations, [[] for _ in range(program.ranks)])
    for own, instructions in zip(result.instructions, program.instructions, strict=True):
        pending: list[int] = []
        for instruction in instructions:
            if instruction.what == "call" and not is_gradient[instruction.operation]:
                own += [instruction._replace(what="wait", operation=number) for number in pending]
                pending = []
            elif instruction.what == "call":
                pending.append(instruction.operation)
            own.append(instruction)
    return result


def test_changes_compose_with_overlap(tmp_path: Path) -> None:
    calls = [Call(100, 150), Call(100, 80), END]
    assert overlapped_us(tmp_path / "a", calls, "overlap", "scale-network=2x")[1] == 100 + 100 + 40 + 5
    assert overlapped_us(tmp_path / "b", calls, "scale-network=2x", "overlap")[1] == 100 + 100 + 40 + 5
    assert overlapped_us(tmp_path / "c", calls, "overlap", "free=data")[1] == 230


def test_overlap_after_overlap_changes_nothing(tmp_path: Path) -> None:
    gather = Call(10, 40, PARAMETERS_SITE, FORWARD, ALL_GATHER)
    program = program_of([gather, gather, Call(100, 50), END])
    write(program, run(program), tmp_path)
    once = changed_run(replayed_run(open_run(tmp_path)), ["overlap"])
    assert "... overlap" not in what_if(once, catalogue=True)["change"].tolist()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_of([Call(100, 50), Call(100, 80), END])
    write(program, run(program), tmp_path)
    assert main(["whatif", str(tmp_path), "--overlap", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["change"] for row in document["tables"]["what_if"]] == ["as recorded", "overlap"]
    assert any("the shortest step that overlap allows" in sentence for sentence in document["sentences"])
    assert main(["whatif", str(tmp_path), "--overlap", "gradients reduced", "--compute", "0.5x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["what_if"][1]["change"] == (
        "overlap=gradients reduced compute=0.5x"
    )
    assert main(["whatif", str(tmp_path), "--all", "--json"]) == 0
    rows = {row["change"]: row for row in json.loads(capsys.readouterr().out)["tables"]["what_if"]}
    assert rows["overlap"]["step_ns"] == 290 * US
    assert main(["whatif", str(tmp_path), "--overlap", "tensor"]) == 2
    assert "'tensor' is no dimension, operation or purpose of the steps" in capsys.readouterr().err


def test_nothing_to_overlap(tmp_path: Path) -> None:
    program = program_of([Call(100, 50, NORM), END])
    write(program, run(program), tmp_path)
    replayed = replayed_run(open_run(tmp_path))
    with pytest.raises(DoesNotApplyError, match="no call can overlap more than recorded"):
        changed_run(replayed, ["overlap"])
    with pytest.raises(DoesNotApplyError, match="no call of 'all_reduce' can overlap"):
        changed_run(replayed, ["overlap=all_reduce"])
    with pytest.raises(CommtraceError, match="'overlap=': the dimension, operation or purpose is missing"):
        changed_run(replayed, ["overlap="])
    assert "overlap" not in what_if(changed_run(replayed), catalogue=True)["change"].tolist()
    assert REMARKS in what_if(changed_run(replayed)).attrs
