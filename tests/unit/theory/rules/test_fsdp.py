"""FSDP2's rules for logs that have the passes of each step; tests/ranks compares sizes with the library."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, Final

import pytest

from commtrace.reading.table_reader import ProcessTables
from commtrace.theory import NotPredictedError, Prediction, predict

SETTINGS: Final = {"reduce_grads": True, "all_reduce_grads": True, "reshard_after_backward": True}
TRAINING: Final = {"kind": "training", **SETTINGS, "is_last_backward": True, "times": 1}
ACCUMULATED: Final = {**TRAINING, "reduce_grads": False, "all_reduce_grads": False}
UNIT: Final = {
    "shapes": [[8]], "dims": [0], "dtypes": ["float32"], "reduce_dtype": None, "shards": 2, "copies": 1,
    "reshard_after_forward": True, "unshard_in_backward": True,
}  # fmt: skip
JOB: Final[dict[str, Any]] = {
    "source": "fsdp", "engine": "fully_shard", "data_parallel_size": 2, **SETTINGS,
    "parameters": [{"name": name, "shape": [8], "dtype": "float32", "trainable": True} for name in "ab"],
    "units": [
        {**UNIT, "name": "", "parameters": [0], "reshard_after_forward": False},
        {**UNIT, "name": "b", "parameters": [1]},
    ],
}  # fmt: skip
"""A job with a root that stays gathered after forward, and a block."""


def predicted(*rows: tuple[int, Any], **job: Any) -> Prediction:
    """Return the prediction of a job whose log has these passes from these steps on."""
    passes = [{"id": number, "step": step, "passes": entries} for number, (step, entries) in enumerate(rows)]
    return predict({**copy.deepcopy(JOB), **job, "passes": passes})


def counts(prediction: Prediction, step: int) -> dict[str, int]:
    """Return the number of calls of a step by operation."""
    calls = Counter[str]()
    for call in prediction.step(step):
        calls[call.op] += call.calls
    return dict(calls)


def test_a_step_has_the_passes_of_the_last_row_before_it() -> None:
    accumulated = {**ACCUMULATED, "times": 3}
    prediction = predicted((0, [accumulated, TRAINING]), (9, [TRAINING]), (10, [accumulated, TRAINING]))
    assert prediction.step(-1) == ()
    assert [counts(prediction, step) for step in (0, 8, 10, 1000)] == [{"all_gather": 12, "reduce_scatter": 2}] * 4
    assert counts(prediction, 9) == {"all_gather": 3, "reduce_scatter": 2}
    assert [prediction.special_step(step) is None for step in (0, 8, 9, 10)] == [True, True, False, True]
    assert sum(bar.bytes for bar in (prediction.closed_form, *prediction.bars)) == sum(
        call.bytes / 2 for call in prediction.steps[-1]
    )


def test_what_stays_gathered_after_an_evaluation_is_not_gathered_by_the_next_pass() -> None:
    evaluation = {"kind": "evaluation", "times": 5}
    prediction = predicted((-1, [evaluation]), (0, [TRAINING]), (1, [TRAINING, evaluation]), (2, [TRAINING]))
    assert counts(prediction, -1) == {"all_gather": 1 + 5}
    assert [counts(prediction, step)["all_gather"] for step in range(5)] == [2, 3 + 6, 2, 3, 3]


def test_after_an_evaluation_the_last_unit_is_prefetched_in_vain_if_the_root_has_no_parameters() -> None:
    units = [{**UNIT, "name": name, "parameters": [number]} for number, name in enumerate("ab")]
    evaluation = {"kind": "evaluation", "times": 2}
    prediction = predicted((-1, [evaluation]), (0, [{**TRAINING, "times": 2}]), units=units)
    assert [counts(prediction, step)["all_gather"] for step in (-1, 0, 1)] == [4, 8 + 1, 8]
    with pytest.raises(NotPredictedError, match="set_is_last_backward of a root without parameters"):
        predicted((0, [{**TRAINING, "is_last_backward": False}]), units=units)


def test_a_row_without_passes_is_a_step_of_another_model() -> None:
    prediction = predicted((0, [TRAINING]), (1, []), (2, [TRAINING]))
    assert [counts(prediction, step) for step in (0, 1)] == [{"all_gather": 3, "reduce_scatter": 2}, {}]


def test_equal_steps_are_not_special() -> None:
    assert predicted((0, [TRAINING])) == predict(JOB)
    assert not predicted((0, [TRAINING])).has_special_steps


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"kind": "part", "times": 1}], "only a part of the model ran in step 3"),
        ([TRAINING, {"kind": "backward", "times": 1}], "not every forward pass had its backward pass in step 3"),
        ([{**TRAINING, "reduce_grads": None}], "units whose settings differ .* in step 3"),
        (None, "does not have the passes of the steps from 3 on"),
        ([{"kind": "training"}], "the job in the log has no passes.1.passes.0.reduce_grads"),
        ([{**TRAINING, "times": "x"}], "the job in the log cannot be read"),
    ],
)
def test_passes_without_rules(entries: Any, message: str) -> None:
    with pytest.raises(NotPredictedError, match=message):
        predicted((0, [TRAINING]), (3, entries))


def test_passes_beneath_tensor_parallelism_are_refused() -> None:
    with pytest.raises(NotPredictedError, match="DTensor parallelism"):
        predicted((0, [TRAINING]), (3, [TRAINING, TRAINING]), tensor_plan=[])


def test_rows_belong_to_the_job_that_they_name() -> None:
    tables = ProcessTables()
    tables.add({"table": "job", "id": 1, "source": "fsdp"})
    tables.add({"table": "passes", "id": 1, "job": 1, "step": 0, "passes": [TRAINING]})
    assert [row["passes"] for row in tables.jobs[1]["passes"]] == [[TRAINING]]
    with pytest.raises(KeyError):
        tables.add({"table": "passes", "id": 2, "job": 2, "step": 0, "passes": []})
