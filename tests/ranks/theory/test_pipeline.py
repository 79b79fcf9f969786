"""Theory against real pipelines: two, four and eight ranks, alone and with tensor and data parallelism."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("yaml")

import pipelines
import trainings
from theory_assertions import assert_exact

from commtrace.analyses import reconciliation
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.cli import main
from commtrace.run import Run
from commtrace.theory import NotPredictedError, closed_forms, predict
from commtrace.theory.forecast import PlanError, PlanOptions, forecast
from commtrace.theory.forecast.predicted_volumes import json_document, size_bin_rows, size_rows, volume_rows

pytestmark = trainings.TIMEOUT


@functools.cache
def tables(name: str) -> NamedTables:
    """The tables of theory of one training."""
    return fold(pipelines.run(name), [reconciliation.ANALYSIS])


@pytest.mark.parametrize("name", trainings.parameters(pipelines.NAMES, pipelines.OF_EACH_SCHEME))
def test_pipelines_are_exact_on_every_rank(name: str) -> None:
    assert_exact(tables(name), pipelines.run(name))
    assert_adds_up_by_role(tables(name), pipelines.run(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", pipelines.MORE_NAMES)
def test_more_pipelines_are_exact(name: str) -> None:
    run = pipelines.more(name)
    found = fold(run, [reconciliation.ANALYSIS])
    assert_exact(found, run)
    assert_adds_up_by_role(found, run)
    assert_described(pipelines.MORE[pipelines.MORE_NAMES[name]][name], run, run.log.path.parent)


def assert_adds_up_by_role(found: NamedTables, run: Run) -> None:
    """Each role's formula leads to what that role sends, and all roles are the whole."""
    whole, parts = found["waterfall"], found["waterfall_by_role"]
    events = run.events()
    step = events.loc[(events["rank"] == 0) & (events["step"] == events["step"].max())]
    sent = step.groupby("role", observed=True)["wire_bytes"].sum()
    for role, rows in parts.groupby("role"):
        assert [*rows["kind"]][0 :: len(rows) - 1] == ["closed form", "measured"]
        assert set(rows["kind"][1:-1]) <= {"cause"}
        assert rows["bytes"][:-1].sum() == rows["bytes"].iloc[-1] == round(sent[role])
    if len(parts):
        assert abs(parts.loc[parts["kind"] == "measured", "bytes"].sum() - whole["bytes"].iloc[-1]) <= len(parts)


def assert_described(one: dict[str, Any], run: Run, folder: Path) -> None:
    """Every rank's captured job is the one of its stage, as the configuration tells it."""
    rows = pipelines.described(one, len(run.ranks), folder)
    assert len(rows) == one["model"]["pipe_parallel_size"]
    for process in run.processes:
        (job,) = process.tables.jobs.values()
        captured, told = dict(job), dict(rows[process.rank * len(rows) // len(run.ranks)])
        assert predict(told) == predict(captured)
        if told["zero_stage"] == 0:
            del told["optimizer"]  # what is around none communicates nothing
        zero, known = told.pop("zero"), captured.pop("zero")
        assert zero == {key: value for key, value in known.items() if key in zero}
        assert told == {key: value for key, value in captured.items() if key in told}


@pytest.mark.parametrize("name", trainings.parameters(pipelines.STAGED, pipelines.OF_EACH_SCHEME))
def test_a_job_told_from_its_configuration_is_the_one_that_was_captured(name: str, tmp_path: Path) -> None:
    ranks = pipelines.NAMES[name]
    assert_described(pipelines.WANTED[ranks][name], pipelines.run(name), tmp_path)


@pytest.mark.parametrize(("staged", "whole"), pipelines.SAME_LOSSES.items())
def test_stages_train_what_the_whole_model_trains(staged: str, whole: str) -> None:
    """Rank 0's losses of three steps: sums come in another order, and Adam makes more of the difference (1e-4)."""
    found = pipelines.losses(staged)
    assert len(found) == 3
    assert found == pytest.approx(pipelines.losses(whole), rel=1e-4)
    assert found[0] == pytest.approx(pipelines.losses(whole)[0], rel=1e-6)
    assert found[0] != pytest.approx(found[-1], rel=1e-3)  # it does train


def roles(name: str) -> set[tuple[str, str]]:
    """(operation, role) of all calls."""
    events = pipelines.run(name).events()
    return {*zip(events["op"].astype(str), events["role"].astype(str), strict=True)}


@pytest.mark.exhaustive
def test_roles_are_found_without_help() -> None:
    """Messages between stages go through torch's default group, and are the pipeline's all the same."""
    assert {(op, role) for op, role in roles("pp2tp2dp2") if op in ("send", "recv")} == {
        ("send", "pipeline"),
        ("recv", "pipeline"),
    }
    assert {role for _, role in roles("pp2tp2dp2")} == {"data", "tensor", "pipeline", "model"}
    assert {role for _, role in roles("pp2-tied")} == {"self", "pipeline"}


def test_micro_batches_phases_and_steps_of_messages() -> None:
    events = pipelines.run("pp2-four").events()
    messages = events.loc[(events["rank"] == 0) & (events["step"] == 2) & events["op"].isin(["send", "recv"])]
    found = {(str(row.op), str(row.phase), row.micro_batch) for row in messages.itertuples()}
    assert found == {
        (op, phase, part) for op, phase in (("send", "forward"), ("recv", "backward")) for part in range(4)
    }


# --- what the paper suspected ---------------------------------------------------------------------------------------


def sent(name: str, rank: int, step: int, **columns: str) -> Any:
    """Calls of one rank and step with these values."""
    events = pipelines.run(name).events()
    events = events.loc[(events["rank"] == rank) & (events["step"] == step)]
    for column, value in columns.items():
        events = events.loc[events[column] == value]
    return events


def test_the_large_all_reduce_of_a_pure_pipeline_goes_to_nobody() -> None:
    """All gradients of the stage, over a group of one."""
    (one,) = (row for row in sent("pp2", 0, 2, op="all_reduce", phase="backward").itertuples())
    job = pipelines.run("pp2").job or {}
    elements = sum(functools.reduce(int.__mul__, entry["shape"], 1) for entry in job["parameters"])
    assert one.payload_bytes == 4 * elements
    assert (one.role, one.group_size, one.wire_bytes) == ("self", 1, 0)


def test_the_first_send_is_metadata_and_every_one_has_a_mask() -> None:
    first, later = (sent("pp2", 0, step, op="send")["payload_bytes"].tolist() for step in (0, 1))
    assert first == [1024, *later]
    batch, length, hidden = 2, 12, 32
    assert later == [4 * batch * length * hidden, 2 * length**2]


def test_mixed_parallelism_gathers_what_it_sent_in_parts() -> None:
    """Three all_gathers at each boundary within and behind a stage, of the activations that travel as halves."""
    length, hidden = 12, 32
    whole = 4 * 2 * length * hidden
    for rank, calls in ((0, 2), (2, 1)):
        gathered = sent("pp2tp2", rank, 2, op="all_gather", role="tensor")
        assert gathered["payload_bytes"].tolist() == [whole] * calls * 2  # micro-batches
    parts = sent("pp2tp2", 0, 2, op="send")["payload_bytes"].tolist()
    assert parts == [8 * (7 + 2), whole // 2, 2 * length**2] * 2


# --- without a training ---------------------------------------------------------------------------------------------


def test_division_of_layers_is_deepspeed_s() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    for layers in range(1, 12):
        for stages in range(1, 7):
            assert partition_uniform(layers, stages) == [*partition_uniform(layers, stages)]
            for weights in ([1] * layers, [0, *[1] * layers, 0, 0], [5, 0, *[3] * layers, 0, 1, 5], [*range(layers)]):
                assert partition_balanced(weights, stages) == [int(one) for one in partition_balanced(weights, stages)]


def staged(tmp_path: Path, **keys: Any) -> list[str]:
    """The shipped tiny configuration with these keys."""
    path = tmp_path / "staged.yml"
    path.write_text(json.dumps(keys))
    return ["tiny", str(path)]


def test_a_forecast_has_every_stage(tmp_path: Path) -> None:
    found = forecast(staged(tmp_path, pipe_parallel_size=2, model_parallel_size=2, num_layers=4), 8)
    told = json_document(found)
    assert (told["pipeline_stages"], told["data_parallel_size"], len(told["stage_parameters"])) == (2, 2, 2)
    for stage in (0, 1):
        last = [row for row in volume_rows(found) if row["stage"] == stage and row["when"] == "steps from 1"]
        parts, whole = last[:-1], last[-1]
        for name in ("calls", "payload_bytes", "all_ranks_payload_bytes"):
            assert sum(row[name] for row in parts) == whole[name]
        assert whole["all_ranks_payload_bytes"] == 4 * whole["payload_bytes"]
        for rows in (size_rows(found), size_bin_rows(found)):
            assert sum(row["sum_bytes"] for row in rows if row["stage"] == stage) == whole["payload_bytes"]
        bars = [row for row in told["waterfall"] if row["stage"] == stage]
        assert sum(row["wire_bytes"] for row in bars) == pytest.approx(whole["wire_bytes"])
    form = closed_forms.three_dimensional(closed_forms_parameters(), 4, 32, 96, 4, (2, 2, 2)) * 4
    assert told["closed_form"]["wire_bytes"] == form


def closed_forms_parameters() -> int:
    """Of the model above, as GPT-NeoX counts: 256 rows of 96, untied."""
    return 2 * 256 * 96 + 4 * (12 * 96**2 + 13 * 96) + 2 * 96


def test_the_command_tells_all_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = staged(tmp_path, pipe_parallel_size=4, num_layers=4)
    assert main(["theory", *files, "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ZeRO-1, pipeline of 4 stages on 8 ranks: stages of ")
    assert "stage 3: step 0" in text
    assert "metadata of the first activations" not in text  # it belongs to no steady step
    assert main(["theory", *files, "--world-size", "8", "--json"]) == 0
    assert {row["stage"] for row in json.loads(capsys.readouterr().out)["volumes"]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({"pipe_parallel_size": 3}, PlanOptions(), "num_layers is 2"),
        ({"pipe_parallel_size": 2}, PlanOptions(zero_stage=2), "ZeRO-0 and ZeRO-1 only"),
        ({"pipe_parallel_size": 2, "model_parallel_size": 3}, PlanOptions(), "num_attention_heads"),
        ({"pipe_parallel_size": 2, "pipe_partition_method": "profile"}, PlanOptions(), "type:REGULAR-EXPRESSION"),
        ({"pipe_parallel_size": 2}, PlanOptions(engine="ddp"), "is DeepSpeed's"),
        ({"pipe_parallel_size": 2, "model_parallel_size": 4}, PlanOptions(), "times model_parallel_size 4"),
    ],
)
def test_impossible_divisions_are_said(keys: dict[str, Any], options: PlanOptions, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        forecast(staged(tmp_path, **keys), 4, options)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_layers": 6, "pipe_parallel_size": 4}, ""),
        ({"num_layers": 6, "pipe_parallel_size": 4, "pipe_partition_method": "uniform"}, "begin behind"),
        (
            {
                "num_layers": 3,
                "pipe_parallel_size": 3,
                "pipe_partition_method": "parameters",
                "tokenizer_type": "words",
            },
            "stage 0 would have none",
        ),
        ({"num_layers": 2, "pipe_parallel_size": 2, "pipe_partition_method": "type:norm|linear"}, "begin behind"),
    ],
)
def test_stages_that_deepspeed_would_hang_in_are_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    from examples.gpt_neox import ConfigError, load_config
    from examples.gpt_neox.pipeline_engine import check_stages

    config = load_config(staged(tmp_path, **keys))
    if words:
        with pytest.raises(ConfigError, match=words):
            check_stages(config)
    else:
        check_stages(config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": None}, "does not declare its architecture"),
        ({"attention_mask": False}, "not GPT-NeoX's"),
        ({"dynamic_shape": True}, "shapes that change"),
        ({"layers": ["Linear"]}, "layers other than GPT-NeoX's"),
        ({"optimizer": "FP16_UnfusedOptimizer", "precision": "fp16"}, "FP16_UnfusedOptimizer"),
    ],
)
def test_what_cannot_be_predicted_is_said(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    row = dict(forecast(staged(tmp_path, pipe_parallel_size=2), 2).plan.row)
    inner = {name: value for name, value in change.items() if name in row["pipeline"]}
    row |= {"pipeline": {**row["pipeline"], **inner}}
    row |= {name: value for name, value in change.items() if name not in inner}
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(NotPredictedError, match=reason):
        predict(row)
