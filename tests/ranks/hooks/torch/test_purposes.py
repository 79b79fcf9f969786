"""The purpose of every call of a program whose purposes are known from its code and torch's documentation."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from hook_programs.runs import Ran
from hook_programs.runs import ran as ran_program

from commtrace.schema import Phase, Purpose

pytestmark = pytest.mark.long

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
SEND, RECV = "send", "recv"
FORWARD, BACKWARD = Purpose.PARAMETERS_FORWARD, Purpose.PARAMETERS_BACKWARD
START = Purpose.PARAMETERS_AT_START
P_TO_R = {"from": "P", "to": "R"}

Expected = tuple[str, Purpose, dict[str, Any]]


@pytest.fixture
def ran(recorder: str) -> list[Ran]:
    return ran_program("purposes", recorder)


def calls(ran: Ran, section: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return operation, name of the purpose, and its facts, of the calls of a section."""
    found = []
    for call in ran.log.between(*ran.told[section]):
        facts = {**call.purpose}
        found.append((call.op, facts.pop("name", ""), facts))
    return found


def named(*expected: Expected) -> list[tuple[str, str, dict[str, Any]]]:
    return [(op, purpose.value, facts) for op, purpose, facts in expected]


def unit(op: str, purpose: Purpose, number: int) -> Expected:
    return op, purpose, {"module": f"layers.{number}"}


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp(rank: int, ran: list[Ran]) -> None:
    """The running mean and variance are broadcast together, the number of batches, an integer, alone."""
    found = calls(ran[rank], "ddp")
    at_start = [name for _, name, _ in found if name in (Purpose.MODEL_CHECKED.value, START.value)]
    step = named(
        ("broadcast", Purpose.BUFFERS, {}),
        ("broadcast", Purpose.BUFFERS, {}),
        (ALL_REDUCE, Purpose.GRADIENTS, {}),
        (ALL_REDUCE, Purpose.USED_PARAMETERS, {}),
    )
    assert found[len(at_start) :] == 2 * step
    assert sorted({*at_start}) == sorted((Purpose.MODEL_CHECKED.value, START.value))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_communication_hook_knows_its_bucket(rank: int, ran: list[Ran]) -> None:
    found = [call for call in calls(ran[rank], "ddp_with_a_hook") if call[0] == ALL_REDUCE]
    assert found == named((ALL_REDUCE, Purpose.GRADIENTS, {"bucket": 0}))


@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp(rank: int, ran: list[Ran]) -> None:
    assert calls(ran[rank], "fsdp") == named(
        unit(ALL_GATHER, FORWARD, 0),
        unit(ALL_GATHER, FORWARD, 1),
        unit(ALL_GATHER, BACKWARD, 1),
        unit(ALL_GATHER, BACKWARD, 0),  # prefetched
        unit(REDUCE_SCATTER, Purpose.GRADIENTS, 1),
        unit(REDUCE_SCATTER, Purpose.GRADIENTS, 0),
        unit(ALL_GATHER, Purpose.PARAMETERS_ON_REQUEST, 0),
        (ALL_REDUCE, Purpose.GRADIENT_NORM, {}),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp_gathers_for_recomputation(rank: int, ran: list[Ran]) -> None:
    """The first unit of the backward pass is gathered by its repeated forward pass, the other one is prefetched."""
    assert calls(ran[rank], "fsdp_recomputed") == named(
        unit(ALL_GATHER, FORWARD, 0),
        unit(ALL_GATHER, FORWARD, 1),
        unit(ALL_GATHER, Purpose.PARAMETERS_RECOMPUTATION, 1),
        unit(ALL_GATHER, BACKWARD, 0),
        unit(REDUCE_SCATTER, Purpose.GRADIENTS, 1),
        unit(REDUCE_SCATTER, Purpose.GRADIENTS, 0),
    )


def down(purpose: Purpose, number: int) -> Expected:
    return ALL_REDUCE, purpose, {"module": f"layers.{number}.down", **P_TO_R}


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallelism(rank: int, ran: list[Ran]) -> None:
    found = calls(ran[rank], "tensors")
    parameters = [call for call in found if call[1] == START.value]
    assert {op for op, _, _ in parameters} == {"scatter", "broadcast"}
    assert len(parameters) == 8  # of two layers: two weights, a sharded bias, a replicated one
    assert found[8:] == named(
        down(Purpose.ACTIVATIONS, 0),
        down(Purpose.ACTIVATIONS, 1),
        *[(ALL_REDUCE, Purpose.ACTIVATION_GRADIENTS, P_TO_R)] * 2,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_recomputed_activations_are_no_checkpoint(rank: int, ran: list[Ran]) -> None:
    gradient = ALL_REDUCE, Purpose.ACTIVATION_GRADIENTS, P_TO_R
    assert calls(ran[rank], "tensors_recomputed")[8:] == named(
        down(Purpose.ACTIVATIONS, 0),
        down(Purpose.ACTIVATIONS, 1),
        down(Purpose.ACTIVATIONS_RECOMPUTED, 1),
        gradient,
        down(Purpose.ACTIVATIONS_RECOMPUTED, 0),
        gradient,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_redistributions_that_are_repeated(rank: int, ran: list[Ran]) -> None:
    """With the names of their own model's modules in both passes, and without where there are none."""
    forward, backward = (
        (ALL_GATHER, purpose, {"from": before, "to": after})
        for purpose, before, after in (
            (Purpose.ACTIVATIONS, "S(0)", "S(1)"),
            (Purpose.ACTIVATION_GRADIENTS, "S(1)", "S(0)"),
        )
    )
    expected = []
    for model in range(3):
        names = [f"transposed{model}_{position}" for position in range(16)]
        passes = [(name, forward) for name in names] + [(name, backward) for name in reversed(names)]
        expected += 3 * [(op, purpose, {"module": name, **facts}) for name, (op, purpose, facts) in passes]
    expected += 2 * [(ALL_GATHER, Purpose.TENSORS, forward[2]), backward]
    assert calls(ran[rank], "tensors_repeated") == named(*expected)


def message(op: str, purpose: Purpose, stage: int, micro_batch: int) -> Expected:
    return op, purpose, {"stage": stage, "micro_batch": micro_batch}


@pytest.mark.parametrize("stage", [0, 1])
def test_messages_of_a_pipeline(stage: int, ran: list[Ran]) -> None:
    """Three micro-batches with the schedule 1F1B."""
    out, back = (SEND, RECV) if stage == 0 else (RECV, SEND)
    activations, gradients = Purpose.PIPELINE_ACTIVATIONS, Purpose.PIPELINE_GRADIENTS
    purposes = {activations.value, gradients.value}
    found = [call for call in calls(ran[stage], "pipeline") if call[1] in purposes]
    forward = [message(out, activations, stage, number) for number in range(3)]
    backward = [message(back, gradients, stage, number) for number in range(3)]
    assert [call for call in found if call[1] == activations.value] == named(*forward)
    assert [call for call in found if call[1] == gradients.value] == named(*backward)


@pytest.mark.parametrize("stage", [0, 1])
def test_phases_of_a_pipeline(stage: int, ran: list[Ran]) -> None:
    """What the stages agree first is set-up, and the first step begins after it."""
    log = ran[stage].log
    made = log.between(*ran[stage].told["pipeline"])
    phases = {Purpose.PIPELINE_ACTIVATIONS.value: Phase.FORWARD, Purpose.PIPELINE_GRADIENTS.value: Phase.BACKWARD}
    set_up = [call for call in made if call.purpose["name"] == Purpose.PIPELINE_SET_UP.value]
    messages = made[len(set_up) :]
    assert made[: len(set_up)] == set_up
    assert {call.phase for call in set_up} <= {Phase.INIT}
    assert [(call.phase, call.micro_batch) for call in messages] == [
        (phases[call.purpose["name"]], call.purpose["micro_batch"]) for call in messages
    ]
    assert len({call.step for call in messages}) == 1
    roles = {row["group"]: row["role"] for row in log.tables["message_roles"]}
    assert {roles[call.group["id"]] for call in messages} == {"pipeline"}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_dimension_of_a_mesh_that_is_deleted_at_once(rank: int, ran: list[Ran]) -> None:
    """The default group does not name it, and the mesh is gone before the drain thread runs again."""
    (row,) = ran[rank].log.tables["dimensions"]
    assert (row["role"], row["source"]) == ("context", "DeviceMesh dimension cp")


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints(rank: int, ran: list[Ran]) -> None:
    names = [name for _, name, _ in calls(ran[rank], "checkpoints")]
    in_order = [name for at, name in enumerate(names) if names[at - 1 : at] != [name]]
    assert in_order == [
        purpose.value
        for purpose in (Purpose.STATE_DICT, Purpose.OBJECTS, Purpose.CHECKPOINT_SAVED, Purpose.CHECKPOINT_LOADED)
    ]
    assert names.count(Purpose.STATE_DICT.value) == 8  # parameters


@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp1(rank: int, ran: list[Ran]) -> None:
    """The root unit has no parameters of its own. Its first gathering in a backward pass is prefetched."""
    assert calls(ran[rank], "fsdp1") == named(
        *[(ALL_GATHER, FORWARD, {})] * 2,
        *[(ALL_GATHER, BACKWARD, {})] * 2,
        *[(REDUCE_SCATTER, Purpose.GRADIENTS, {})] * 2,
        (ALL_REDUCE, Purpose.GRADIENT_NORM, {}),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_ring_attention(rank: int, ran: list[Ran]) -> None:
    assert calls(ran[rank], "ring") == named((ALL_GATHER, Purpose.ATTENTION, {}))


@pytest.mark.parametrize("rank", [0, 1])
def test_experts(rank: int, ran: list[Ran]) -> None:
    """Rank 0 has the expert of three tokens of each rank, so it sends six results back, and rank 1 two."""
    exchange = "all_to_all"
    facts = {"module": "0", "token_bytes": 32}
    dispatched, combined = (
        {**facts, "of": purpose.value} for purpose in (Purpose.EXPERT_DISPATCH, Purpose.EXPERT_COMBINE)
    )
    assert calls(ran[rank], "experts") == named(
        (exchange, Purpose.EXPERT_COUNTS, {"module": "0"}),
        (exchange, Purpose.EXPERT_DISPATCH, facts),
        (exchange, Purpose.EXPERT_COMBINE, facts),
        (exchange, Purpose.EXPERT_GRADIENTS, combined),
        (exchange, Purpose.EXPERT_GRADIENTS, dispatched),
    )
    results = 6 if rank == 0 else 2
    made = ran[rank].log.between(*ran[rank].told["experts"])
    assert [call.payload for call in made] == [16, 4 * 32, results * 32, 4 * 32, results * 32]
    (layer,) = ran[rank].log.tables["experts"]
    expected = {"token_bytes": 32, "counts_bytes": 16, "passes": 1, "repeated": [0] * 4, "gradients": [1, 1, 0]}
    assert layer.items() >= expected.items()
    step = {call.step for call in made}.pop()
    (routing,) = [row for row in ran[rank].log.tables["routing"] if row["step"] == step]
    assert routing["layers"] == [[layer["id"], 4, results]]


ACTIVATIONS: Expected = ALL_REDUCE, Purpose.ACTIVATIONS, {}
RECOMPUTED: Expected = ALL_REDUCE, Purpose.ACTIVATIONS_RECOMPUTED, {}
ACTIVATION_GRADIENTS: Expected = ALL_REDUCE, Purpose.ACTIVATION_GRADIENTS, {}
LOSS: Expected = ALL_GATHER, Purpose.LOSS, {}


@pytest.mark.parametrize("rank", [0, 1])
def test_autograd_functions_that_communicate(rank: int, ran: list[Ran]) -> None:
    """Neither the helpers of their module nor the wrappers of mixed precision hide them."""
    assert calls(ran[rank], "functions") == named(ACTIVATIONS, LOSS, LOSS, ACTIVATION_GRADIENTS)


@pytest.mark.parametrize("rank", [0, 1])
def test_autograd_functions_that_are_repeated(rank: int, ran: list[Ran]) -> None:
    """With reentrant autograd and without. What is no activation keeps its purpose."""
    step = ACTIVATIONS, LOSS, RECOMPUTED, LOSS, LOSS, ACTIVATION_GRADIENTS
    assert calls(ran[rank], "functions_recomputed") == named(*step, *step, (ALL_REDUCE, Purpose.PROGRAM, {}))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_programs_own_calls(rank: int, ran: list[Ran]) -> None:
    assert calls(ran[rank], "own") == named(
        (ALL_REDUCE, Purpose.PROGRAM, {}), (ALL_GATHER, Purpose.TENSORS, {"from": "S(0)", "to": "R"})
    )
