"""The example's rules: closed forms computed by hand, and commtrace's errors for such jobs without the rules."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from commtrace.theory import NotPredictedError, closed_forms, predict
from commtrace.theory.forecast import PlanError, PlanOptions, forecast, plan_job
from commtrace.theory.rules import schemes
from examples.gpt_neox.theory import closed_forms as forms
from examples.gpt_neox.theory import register

ORACLE = r"compare with a dry run \(commtrace check DIR --dryrun -- CMD\) or with a baseline"


def test_closed_forms() -> None:
    """Each closed form equals a value computed by hand, or the paper's equation that it contains."""
    assert forms.zero_1_bytes(1000, 1000, 8) == closed_forms.data_parallel(1000, 8)
    assert forms.zero_2_bytes(1000, 500, 2, 4) == 4 * 500 + 250
    assert forms.fully_sharded(1000, 8) == closed_forms.zero_3(1000, 8)
    assert forms.fully_sharded(1000, 8, kept=True) == 1750
    parts = forms.zero_plus_plus_bytes(1600, 2, 16, 8)
    assert parts == {"qwZ": 1500, "hpZ": 2800, "qgZ": 700 + 50}
    # 6 all_reduces in each of L layers and one at the embedding: equation 5.
    layers = 6 * forms.tensor_layer(100, 4, recomputed=True) + closed_forms.all_reduce(100, 4)
    assert layers == closed_forms.tensor_parallel(1, 10, 10, 6, 4)
    assert forms.tensor_layer(100, 4, recomputed=False) == 8 * 75
    assert forms.vocabulary_loss_bytes(2, 8, 4) == 3 * 2 * 64 * Fraction(3, 4)
    kept = forms.sequence_layer(100, 4, recomputed=True, gathered_again=False)
    assert kept == forms.tensor_layer(100, 4, recomputed=True)
    assert forms.sequence_layer(100, 4, recomputed=True, gathered_again=True) == kept + 150
    assert forms.pipeline_stage(100, micro_batches=8) == 1600
    assert forms.pipeline_stage(100, micro_batches=8, chunks=2, tensor=4) == 800
    assert forms.ring_attention(2, 64, 16, 4) == 3 * 3 * 1024
    assert forms.ring_attention(2, 64, 16, 4, wide_gradients=True) == 4 * 3 * 1024
    assert forms.ulysses_layer(2, 64, 16, 4) == 2 * 4 * 512 * Fraction(3, 4)
    assert forms.ulysses_layer(2, 64, 16, 4, key_share=Fraction(1, 4)) == 2 * Fraction(5, 2) * 512 * Fraction(3, 4)
    assert forms.expert_layer(64, 16, 2, 4) == 4 * 2048 * Fraction(3, 4)
    assert forms.gathered_keys(2, 64, 16, 4) == 2 * 2048 * Fraction(3, 4)


def keys_file(folder: Path, keys: dict[str, Any]) -> str:
    """Write a file with these keys, and return its path."""
    path = folder / "keys.yml"
    path.write_text(json.dumps(keys))
    return str(path)


@pytest.mark.parametrize(
    ("keys", "dimension"),
    [
        ({"sequence_parallel_size": 4}, "sequence"),
        ({"context_parallel_size": 4}, "context"),
        ({"moe_num_experts": 4, "moe_expert_parallel_size": 2}, "expert"),
    ],
)
def test_dimensions_are_predicted_with_these_rules_only(
    keys: dict[str, Any], dimension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    files, options = ["tiny", keys_file(tmp_path, keys)], PlanOptions(zero_stage=1)
    assert dimension in {call.role for call in forecast(files, 8, options).prediction.step(0)}
    monkeypatch.delitem(schemes.EXTENSIONS, dimension)
    with pytest.raises(PlanError, match=f"there are no rules for {dimension} parallelism; {ORACLE}"):
        forecast(files, 8, options)


@pytest.mark.parametrize(("world", "job"), [(2, "dtensor parallelize_module"), (4, "DTensor parallelism")])
def test_dtensors_are_predicted_with_these_rules_only(
    world: int, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are needed for DTensors alone and under FSDP."""
    register()
    row = plan_job(["tiny", keys_file(tmp_path, {"model_parallel_size": 2})], world, PlanOptions(engine="fsdp")).row
    assert "tensor" in {call.role for call in predict(row).step(0)}
    monkeypatch.delitem(schemes.SCHEMES, ("dtensor", "parallelize_module", None))
    monkeypatch.delitem(schemes.EXTENSIONS, "DTensor")
    with pytest.raises(NotPredictedError, match=f"there are no rules for {job}; {ORACLE}"):
        predict(row)
