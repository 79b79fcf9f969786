"""Theory compared with real trainings: three models drawn at random, and settings that change the communication."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from theory_assertions import Runs, assert_described, assert_exact, tables

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import trainings

from commtrace.theory import NotPredictedError, closed_forms, predict
from commtrace.theory.expected_calls import exact_wire_bytes
from commtrace.theory.rules.gradients import (
    buckets_exceeding_limit,
    buckets_reaching_limit,
    buckets_within_limit,
    max_buckets_reaching_limit,
    max_buckets_within_limit,
)

pytestmark = trainings.TIMEOUT

SHAPES = [
    *trainings.parameters(trainings.SHAPES, (), trainings.shapes),
    *trainings.parameters(trainings.MORE_SHAPES, (), trainings.more_shapes),
]


VARIANTS = trainings.parameters(trainings.VARIANTS, trainings.VARIANT_OF_EACH_SCHEME)


@pytest.mark.parametrize(("runs", "name"), SHAPES)
def test_models_drawn_at_random_are_exact(runs: Runs, name: str) -> None:
    assert_exact(tables(runs, name), runs()[name])


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_settings_that_change_the_communication_are_exact(name: str) -> None:
    assert_exact(tables(trainings.variants, name), trainings.variants()[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_expected_and_measured_are_the_same_table(name: str) -> None:
    """The table `expected` says what the log has, operation by operation, and its bounds hold."""
    expected = tables(trainings.variants, name)["expected"].set_index(["rank", "step", "role", "op"])
    events = trainings.variants()[name].events()
    measured = events.groupby(["rank", "step", "role", "op"], observed=True)["payload_bytes"].agg(["size", "sum"])
    assert measured["size"].to_dict() == expected["calls"].to_dict()
    assert measured["sum"].to_dict() == expected["payload_bytes"].to_dict()
    bounds = expected.dropna(subset="calls_max")
    assert (bounds["calls"] <= bounds["calls_max"]).all()


FOUR = trainings.parameters([*trainings.SHARED, *trainings.DRAWN], trainings.SHARED_OF_EACH_SCHEME)


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_tensor_parallel_models_are_exact(name: str) -> None:
    assert_exact(tables(trainings.shared, name), trainings.shared()[name])


DESCRIBED = [
    *SHAPES,
    *trainings.parameters(
        [name for name, wanted in trainings.VARIANTS.items() if "model" in wanted],
        trainings.VARIANT_OF_EACH_SCHEME,
        trainings.variants,
    ),
    *trainings.parameters([*trainings.SHARED, *trainings.DRAWN], trainings.SHARED_OF_EACH_SCHEME, trainings.shared),
]


@pytest.mark.parametrize(("runs", "name"), DESCRIBED)
def test_a_job_told_from_its_configuration_is_the_one_that_was_captured(runs: Runs, name: str, tmp_path: Path) -> None:
    """The jobs agree in all that theory uses, including the list of parameters, so predictions are the same."""
    wanted = {**trainings.wanted_shapes(), **trainings.VARIANTS, **trainings.SHARED, **trainings.drawn()}
    assert_described(wanted[name], runs()[name], tmp_path)


def bars(name: str) -> dict[str, int]:
    """Return the waterfall of a variant by label."""
    waterfall = tables(trainings.variants, name)["waterfall"]
    return dict(zip(waterfall["label"], waterfall["bytes"], strict=True))


def test_zero_2_with_owners_measures_what_equation_2_says() -> None:
    """With owners there are no all_reduces; only micro-batches and padding differ from equation 2."""
    assert "all_reduce in place of reduce_scatter" in bars("zero2")
    assert "all_reduce in place of reduce_scatter" not in bars("zero2-owners")


# --- without a training ---------------------------------------------------------------------------------------------


def test_theory_imports_neither_torch_nor_deepspeed() -> None:
    code = "import sys, commtrace.theory; print(sorted({'torch', 'deepspeed'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_paper_s_formulas() -> None:
    """Equation 1 holds for the paper's four models, equations 2 and 3 for eight ranks."""
    models = ((512, 6, 71_459_840), (768, 12, 163_849_728), (2048, 24, 1_418_596_352), (5120, 40, 13_110_159_360))
    for hidden, layers, parameters in models:
        assert closed_forms.parameter_count(50_304, hidden, layers, 2048) == parameters
    assert closed_forms.data_parallel(1000, 8) == 1750
    assert closed_forms.zero_3(1000, 8) == 2625
    assert closed_forms.data_parallel(100, 3) == Fraction(400, 3)


def test_the_paper_s_formulas_of_pipelines_and_tensor_parallelism() -> None:
    """Equations 4 and 5 equal values by hand for b = 4, s = 2048, h = 512, L = 6."""
    activation = 4 * 2048 * 512
    assert closed_forms.pipeline(4, 2048, 512, 4) == 6 * activation
    assert closed_forms.pipeline(4, 2048, 512, 1) == 0
    assert closed_forms.tensor_parallel(4, 2048, 512, 6, 2) == 37 * activation
    assert closed_forms.tensor_parallel(4, 2048, 512, 6, 1) == 0
    # Two stages have three layers each: 19 all_reduces instead of 37.
    assert closed_forms.tensor_parallel(4, 2048, 512, 3, 2) == 19 * activation


def test_the_formula_of_hsdp() -> None:
    assert closed_forms.hybrid_sharded(1200, 4, 3) == 3 * 900 + 2 * 300 * Fraction(2, 3)
    assert closed_forms.hybrid_sharded(1200, 4, 1) == closed_forms.zero_3(1200, 4)


def test_wire_bytes_are_exact_where_ranks_do_not_divide() -> None:
    assert exact_wire_bytes("all_reduce", 4, 3) == Fraction(16, 3)
    assert exact_wire_bytes("all_gather", 9, 3) == 6
    assert exact_wire_bytes("barrier", 0, 3) == 0


def test_buckets_by_hand() -> None:
    assert buckets_reaching_limit([4, 4, 4, 4, 4], [4, 8]) == [[4], [4, 4], [4, 4]]
    assert buckets_reaching_limit([3, 3], [10]) == [[3, 3]]
    assert buckets_within_limit([3, 3, 5, 20, 0, 1], 8) == [[0, 1], [2], [3], [5]]
    assert buckets_exceeding_limit([3, 3, 3, 9, 1], 6) == [9, 9, 1]


@pytest.mark.parametrize("limit", [1, 5, 17, 100])
def test_no_order_makes_more_buckets_than_the_bound(limit: int) -> None:
    import itertools

    sizes = (1, 2, 3, 5, 8, 4)
    for order in itertools.permutations(sizes):
        assert len(buckets_within_limit(order, limit)) <= max_buckets_within_limit(sum(sizes), limit, len(sizes))
        assert len(buckets_reaching_limit(order, [3, limit])) <= max_buckets_reaching_limit(sum(sizes), [3, limit])


# Other programs may build what this project's workload refuses.
SHARED_TWICE: dict[str, object] = {
    "source": "deepspeed",
    "engine": "DeepSpeedEngine",
    "zero_stage": 0,
    "pipeline_stages": 1,
    "moe": False,
    "data_parallel_size": 2,
    "tensor_parallel_size": 2,
    "sequence_parallel_size": 2,
    "gradient_clipping": 0.0,
    "basic_optimizer": "AdamW",
    "communication_data_type": "float32",
    "precision": "fp32",
    "parameters": [],
    "model": {"model_parallel_size": 2},
}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (SHARED_TWICE, "tensor parallelism together with shared sequences or experts"),
        ({}, "there are no rules for None None"),
        ({"source": "deepspeed", "engine": "PipelineEngine", "zero_stage": 2}, "PipelineEngine with ZeRO stage 2"),
        ({"source": "deepspeed", "engine": "PipelineEngine", "zero_stage": 1}, "has no pipeline"),
        ({"source": "deepspeed", "engine": "DeepSpeedEngine", "zero_stage": 2}, "has no pipeline_stages"),
        ({"source": "ddp", "engine": "DistributedDataParallel"}, "has no mixed_precision"),
        ({"source": "ddp", "engine": "DistributedDataParallel", "mixed_precision": None}, "has no"),
    ],
)
def test_what_cannot_be_predicted_is_said(row: dict[str, object], reason: str) -> None:
    with pytest.raises(NotPredictedError, match=reason):
        predict(row)


def test_a_row_of_garbage_is_no_prediction() -> None:
    for name, garbage in (("parameters", [{"shape": None}]), ("data_parallel_size", "x"), ("buffers", 7)):
        row = dict(trainings.variants()["ddp"].job or {})
        row[name] = garbage
        with pytest.raises(NotPredictedError):
            predict(row)
