"""ZeRO-3's rules for logs that have evaluations; tests/ranks/theory/test_passes.py compares them with DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from commtrace.theory import NotPredictedError, Prediction, predict
from commtrace.theory.expected_calls import sorted_calls

RECORDED: Final = Path(__file__).parents[3] / "support" / "recorded" / "trainer_zero3.json"


def predicted(*rows: tuple[int, Any], **job: Any) -> Prediction:
    """Return the prediction for the recorded job of a GPT-2, with these rows of passes in its log."""
    captured = json.loads(RECORDED.read_text())["job"]
    return predict({**captured, **job, "passes": [{"step": step, "passes": passes} for step, passes in rows]})


def evaluations(times: int, kind: str = "evaluation") -> list[dict[str, Any]]:
    """Return passes of one kind."""
    return [{"kind": kind, "times": times}]


def test_an_evaluation_before_the_first_step_is_recorded_in_its_place() -> None:
    """Its order of modules does not fit the first step, which therefore records an order a second time."""
    regular, evaluated = predicted(), predicted((-1, evaluations(2)), (0, []))
    starts = [
        sum(call.calls for call in prediction.start if call.op == "broadcast") for prediction in (regular, evaluated)
    ]
    assert starts[1] == starts[0] + 8  # an empty order, that of the modules, and two lists of parameters
    assert sorted_calls(evaluated.step(0)) != sorted_calls(regular.step(0))
    assert sorted_calls(evaluated.step(5)) == sorted_calls(regular.step(5))
    assert evaluated.special_step(5) is None


def test_without_evaluations_nothing_changes() -> None:
    assert predicted((-1, []), (3, [])) == predicted()


def test_steps_are_found_however_many_there_are() -> None:
    rows = [(step, evaluations(1) if step % 10 == 9 else []) for step in range(20_000) if step % 10 in (0, 9)]
    prediction = predicted(*rows)
    assert sorted_calls(prediction.step(19_989)) == sorted_calls(prediction.step(49))
    assert sorted_calls(prediction.step(10**6)) == sorted_calls(prediction.step(10**6 + 1))


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (evaluations(1, "interruption"), "a forward pass without gradients within step 3 has no rules yet"),
        (None, "the log does not have the evaluations from step 3 on"),
        ([{"kind": "evaluation"}], "the job in the log has no passes.0.passes.0.times"),
    ],
)
def test_passes_without_rules(passes: Any, message: str) -> None:
    with pytest.raises(NotPredictedError, match=message):
        predicted((3, passes))
