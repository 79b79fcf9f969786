"""Plain PyTorch: steps and phases, whichever code communicates."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from hook_programs.runs import FOLDER, Call
from hook_programs.runs import ran as ran_program
from ranks import Nursery
from recorders import FORGOTTEN, end

from commtrace.run import open_run
from commtrace.schema import Phase

FORWARD, BACKWARD, OPTIMIZER, INIT, OTHER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.INIT, Phase.OTHER
EVALUATION = Phase.EVALUATION

STEPS, MICRO_BATCHES = 3, 2
"""Of `programs/own_pipeline.py`."""


@pytest.fixture
def ran(recorder: str) -> list[dict[str, list[Call]]]:
    """Return the calls of each section by rank."""
    return [
        {name: run.log.between(*times) for name, times in run.told.items()} for run in ran_program("plain", recorder)
    ]


# Section -> (step, phase, operation) of its calls. The first optimizer counts steps across all sections.
REDUCE = "all_reduce"
EXPECTED: dict[str, list[tuple[int, Phase, str]]] = {
    "tensor_parallel": [
        # The last of each three is an evaluation after the step, which begins no new step. The next forward pass
        # does, although autograd functions communicate under no_grad, as evaluations do.
        (0, FORWARD, REDUCE), (0, BACKWARD, REDUCE), (0, EVALUATION, REDUCE),
        (1, FORWARD, REDUCE), (1, BACKWARD, REDUCE), (1, EVALUATION, REDUCE),
    ],
    "another_optimizer": [(2, FORWARD, REDUCE), (2, BACKWARD, REDUCE)] * 2,
    "recomputed_reentrantly": [(3, FORWARD, REDUCE), (3, BACKWARD, REDUCE), (3, BACKWARD, REDUCE)],
    # Non-reentrant checkpointing stops recomputing as soon as it has what it needs.
    "recomputed": [(4, FORWARD, REDUCE), (4, BACKWARD, REDUCE)],
    "failing_optimizer": [(5, OPTIMIZER, REDUCE), (5, OTHER, REDUCE)],
    "sharded": [
        (10, FORWARD, "all_gather"), (10, FORWARD, "all_gather"),
        (10, BACKWARD, "all_gather"), (10, BACKWARD, "all_gather"),
        (10, BACKWARD, "reduce_scatter"), (10, BACKWARD, "reduce_scatter"),
        (11, FORWARD, "all_gather"), (11, FORWARD, "all_gather"),
        (11, BACKWARD, "all_gather"), (11, BACKWARD, "all_gather"),
        (11, BACKWARD, "reduce_scatter"), (11, BACKWARD, "reduce_scatter"),
        (11, EVALUATION, "all_gather"), (11, EVALUATION, "all_gather"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("section", EXPECTED)
def test_steps_and_phases(section: str, rank: int, ran: list[dict[str, list[Call]]]) -> None:
    assert [(call.step, call.phase, call.op) for call in ran[rank][section]] == EXPECTED[section]


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_reduces_once_a_step_whatever_is_accumulated(rank: int, ran: list[dict[str, list[Call]]]) -> None:
    calls = ran[rank]["accumulated"]
    reduced = [call for call in calls if call.op == REDUCE]
    assert [(call.step, call.phase, call.payload) for call in reduced] == [
        (step, BACKWARD, 4 * (8 * 3 + 3)) for step in (7, 8)
    ]
    setting_up = [call for call in calls if call.step == 6]
    assert [call.op for call in setting_up] == ["all_gather", "broadcast", "broadcast"]
    assert {call.phase for call in setting_up} == {INIT}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("section", ["accumulated", "compiled"])
def test_what_ddp_sends_is_placed_on_the_line_that_calls_backward(
    section: str, rank: int, ran: list[dict[str, list[Call]]], recorder: str
) -> None:
    for call in ran[rank][section]:
        if call.phase == BACKWARD:
            assert (call.file, call.function) == (str(FOLDER / "plain.py"), section)
            assert "backward()" in Path(call.file).read_text().splitlines()[call.line - 1]
            assert (call.state, call.clock) == end(FORGOTTEN, call.variant, recorder)  # C++ code waits


@pytest.mark.parametrize("rank", [0, 1])
def test_a_compiled_replica_is_recorded_as_any(rank: int, ran: list[dict[str, list[Call]]]) -> None:
    reduced = [call for call in ran[rank]["compiled"] if call.op == REDUCE]
    assert [(call.step, call.phase, call.payload) for call in reduced] == [(9, BACKWARD, 4 * (8 * 3 + 3))]


@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp_gathers_whole_layers(rank: int, ran: list[dict[str, list[Call]]]) -> None:
    layer = 4 * (8 * 8 + 8)
    assert {(call.payload, call.local) for call in ran[rank]["sharded"]} == {(layer, layer // 2)}


def test_messages_of_a_pipeline_of_the_program_begin_its_steps(nursery: Nursery, recorder: str, tmp_path: Path) -> None:
    """A step begins with the first activation, which no module communicates; weights and evaluations begin none."""
    statuses, outputs = nursery.run("own_pipeline", tmp_path / "log", recorder=recorder)
    assert statuses == [0, 0], outputs
    events = open_run(tmp_path / "log").events()
    found = [
        [(call.step, call.op, call.phase) for call in events[events["rank"] == rank].itertuples()] for rank in (0, 1)
    ]
    steps = range(STEPS)
    step = ("send", "forward"), ("recv", "other")
    sent = [(number, *call) for number in steps for call in (*step * MICRO_BATCHES, ("send", "other"))]
    step = ("recv", "other"), ("send", "other")
    received = [(number, *call) for number in steps for call in (*step * MICRO_BATCHES, ("recv", "other"))]
    assert found == [[(-1, "send", "init"), *sent], [(-1, "recv", "init"), *received]]
