"""ZeRO-3's rules for recorded runs: a GPT-2 of Hugging Face, and a small model with older versions of DeepSpeed.

`tests/support/recorded/trainer_zero3.json` has the job row of rank 0 and its calls from DeepSpeed by step, from
`tests/external/frameworks/trainer.py zero3` up to the first evaluation. Its model has two embeddings, and modules that
are registered but do not run. `zero3_versions.json` has those of two steps of `tests/versions`, by DeepSpeed version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matched_calls import counted_calls, unmatched_calls

from commtrace.job_row import JobRow
from commtrace.theory import NotPredictedError, predict
from commtrace.theory.job import Job, ModuleNode
from commtrace.theory.rules.deepspeed import zero3
from commtrace.theory.rules.deepspeed.zero3_coordinator import release_leftovers
from commtrace.theory.rules.deepspeed.zero3_passes import backward

FOLDER = Path(__file__).parents[3] / "support" / "recorded"
RECORDED = json.loads((FOLDER / "trainer_zero3.json").read_text())
VERSIONS = json.loads((FOLDER / "zero3_versions.json").read_text())


def leftovers(job: dict[str, Any], steps: dict[str, Any]) -> list[tuple[int, str, int, int]]:
    """Return (step, operation, payload, calls) that are only expected (calls below 0) or only recorded."""
    prediction = predict(job)
    return [
        (int(step), call.key.op, call.key.payload, call.calls)
        for step, calls in steps.items()
        for call in unmatched_calls(
            prediction.step(int(step)),
            [counted_calls("data", op, size, count) for op, size, count in calls],
            prediction,
        )
    ]


def test_every_call_is_expected() -> None:
    assert leftovers(RECORDED["job"], RECORDED["steps"]) == []


def test_the_second_embedding_reads_the_model_s_input() -> None:
    """Its parameter stays gathered until backward has ended, so the next forward pass does not gather it."""
    without = {name: value for name, value in RECORDED["job"].items() if name != "embeddings"}
    assert leftovers(without, RECORDED["steps"]) == [(0, "all_gather", 400_384, 1), (0, "all_gather", 416_768, -1)]


def test_embeddings_directly_beneath_the_model_are_released_after_backward_as_well() -> None:
    word_embedding, position_embedding = ModuleNode(1, (0,), ()), ModuleNode(2, (1,), (), reads_input=True)
    root = ModuleNode(0, (), (word_embedding, position_embedding, ModuleNode(3, (2,), ())))
    released = {module.number for call, module in backward(root, has_model_input=True) if call is release_leftovers}
    assert released == {0, 1, 2}


def test_fewer_modules_than_have_parameters_are_a_difference() -> None:
    shorter = [
        [op, 376 if (op, size) == ("broadcast", 496) else size, count] for op, size, count in RECORDED["steps"]["0"]
    ]
    assert leftovers(RECORDED["job"], {"0": shorter}) == [(0, "broadcast", 376, 1), (0, "broadcast", 528, -1)]


@pytest.mark.parametrize("version", VERSIONS["steps"])
def test_the_order_of_modules_is_compared_as_the_version_in_the_log_does(version: str) -> None:
    steps = VERSIONS["steps"][version]
    assert leftovers(VERSIONS["job"] | {"versions": {"deepspeed": version}}, steps) == []
    other = next(name for name in VERSIONS["steps"] if name != version)
    assert {op for _, op, *_ in leftovers(VERSIONS["job"] | {"versions": {"deepspeed": other}}, steps)} == {"broadcast"}


def test_between_the_two_versions_lengths_are_not_compared() -> None:
    """DeepSpeed 0.15.4 to 0.17.5 begin as 0.17.6 does, with an empty list."""
    steps = VERSIONS["steps"]["0.17.6"]
    for version in ("0.15.4", "0.17.5"):
        job = VERSIONS["job"] | {"versions": {"deepspeed": version}}
        assert leftovers(job, steps) == [(0, "broadcast", 8, 4)]


def test_evaluations_of_the_oldest_versions_are_not_predicted() -> None:
    job = Job(JobRow.read(VERSIONS["job"] | {"versions": {"deepspeed": "0.15.3"}}))
    with pytest.raises(NotPredictedError, match="evaluations"):
        zero3.SimulatedSteps(job).evaluation(1, 1)
