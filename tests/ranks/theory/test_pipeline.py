"""Theory compared with real pipelines: two, four and eight ranks, alone and with tensor and data parallelism."""

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

from commtrace.analyses.compare import rules_analysis
from commtrace.analyses.fold_engine import NamedTables, fold
from commtrace.cli import main
from commtrace.run import Run
from commtrace.theory import NotPredictedError, closed_forms, predict
from commtrace.theory.forecast import PlanError, PlanOptions, forecast
from commtrace.theory.forecast.predicted_volumes import json_document, size_bin_rows, size_rows, volume_rows

pytestmark = trainings.TIMEOUT


@functools.cache
def tables(name: str) -> NamedTables:
    """Return the theory tables of one training."""
    return fold(pipelines.run(name), [rules_analysis.ANALYSIS])


@pytest.mark.long
@pytest.mark.parametrize("name", trainings.parameters(pipelines.NAMES, pipelines.OF_EACH_SCHEME))
def test_pipelines_are_exact_on_every_rank(name: str) -> None:
    assert_exact(tables(name), pipelines.run(name))
    assert_adds_up_by_role(tables(name), pipelines.run(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", pipelines.MORE_NAMES)
def test_more_pipelines_are_exact(name: str) -> None:
    run = pipelines.more(name)
    folded = fold(run, [rules_analysis.ANALYSIS])
    assert_exact(folded, run)
    assert_adds_up_by_role(folded, run)
    assert_described(pipelines.MORE[pipelines.MORE_NAMES[name]][name], run, run.log.path.parent)


def assert_adds_up_by_role(folded: NamedTables, run: Run) -> None:
    """Assert that each role's waterfall ends at what the role sends, and that the roles add up to the total."""
    total, by_role = folded["waterfall"], folded["waterfall_by_role"]
    events = run.events()
    step = events.loc[(events["rank"] == 0) & (events["step"] == events["step"].max())]
    sent = step.groupby("role", observed=True)["wire_bytes"].sum()
    for role, rows in by_role.groupby("role"):
        assert [*rows["kind"]][0 :: len(rows) - 1] == ["closed form", "measured"]
        assert set(rows["kind"][1:-1]) <= {"cause"}
        assert rows["bytes"][:-1].sum() == rows["bytes"].iloc[-1] == round(sent[role])
    if len(by_role):
        measured = by_role.loc[by_role["kind"] == "measured", "bytes"].sum()
        assert abs(measured - total["bytes"].iloc[-1]) <= len(by_role)


def assert_described(training: dict[str, Any], run: Run, folder: Path) -> None:
    """Assert that every rank's captured job is that of its stage, as described by the configuration."""
    rows = pipelines.described(training, len(run.ranks), folder)
    assert len(rows) == training["model"]["pipe_parallel_size"]
    for process in run.processes:
        (job,) = process.tables.jobs.values()
        captured, planned = dict(job), dict(rows[process.rank * len(rows) // len(run.ranks)])
        assert predict(planned) == predict(captured)
        if planned["zero_stage"] == 0:
            del planned["optimizer"]  # its wrapper communicates nothing
        zero, captured_zero = planned.pop("zero"), captured.pop("zero")
        assert zero == {key: value for key, value in captured_zero.items() if key in zero}
        assert planned == {key: value for key, value in captured.items() if key in planned}


@pytest.mark.parametrize("name", trainings.parameters(pipelines.STAGED, pipelines.OF_EACH_SCHEME))
def test_a_job_told_from_its_configuration_is_the_one_that_was_captured(name: str, tmp_path: Path) -> None:
    ranks = pipelines.NAMES[name]
    assert_described(pipelines.WANTED[ranks][name], pipelines.run(name), tmp_path)


@pytest.mark.parametrize(("staged", "undivided"), pipelines.SAME_LOSSES.items())
def test_stages_train_what_the_whole_model_trains(staged: str, undivided: str) -> None:
    """Rank 0's losses of three steps agree within 1e-4: sums have another order, and Adam amplifies the difference."""
    losses = pipelines.losses(staged)
    assert len(losses) == 3
    assert losses == pytest.approx(pipelines.losses(undivided), rel=1e-4)
    assert losses[0] == pytest.approx(pipelines.losses(undivided)[0], rel=1e-6)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)  # it does train


def roles(name: str) -> set[tuple[str, str]]:
    """Return the (operation, role) pairs of all calls."""
    events = pipelines.run(name).events()
    return {*zip(events["op"].astype(str), events["role"].astype(str), strict=True)}


@pytest.mark.exhaustive
def test_roles_are_found_without_help() -> None:
    """Messages between stages go through torch's default group, but have the role pipeline."""
    assert {(op, role) for op, role in roles("pp2tp2dp2") if op in ("send", "recv")} == {
        ("send", "pipeline"),
        ("recv", "pipeline"),
    }
    assert {role for _, role in roles("pp2tp2dp2")} == {"data", "tensor", "pipeline", "model"}
    assert {role for _, role in roles("pp2-tied")} == {"self", "pipeline"}


def test_micro_batches_phases_and_steps_of_messages() -> None:
    events = pipelines.run("pp2-four").events()
    messages = events.loc[(events["rank"] == 0) & (events["step"] == 2) & events["op"].isin(["send", "recv"])]
    places = {(str(row.op), str(row.phase), row.micro_batch) for row in messages.itertuples()}
    assert places == {
        (op, phase, part) for op, phase in (("send", "forward"), ("recv", "backward")) for part in range(4)
    }


# --- what the paper suspected ---------------------------------------------------------------------------------------


def sent(name: str, rank: int, step: int, **columns: str) -> Any:
    """Return the calls of one rank and step with these column values."""
    events = pipelines.run(name).events()
    events = events.loc[(events["rank"] == rank) & (events["step"] == step)]
    for column, value in columns.items():
        events = events.loc[events[column] == value]
    return events


def test_the_large_all_reduce_of_a_pure_pipeline_goes_to_nobody() -> None:
    """The call reduces all gradients of the stage over a group of one rank."""
    (call,) = (row for row in sent("pp2", 0, 2, op="all_reduce", phase="backward").itertuples())
    job = pipelines.run("pp2").job or {}
    elements = sum(functools.reduce(int.__mul__, entry["shape"], 1) for entry in job["parameters"])
    assert call.payload_bytes == 4 * elements
    assert (call.role, call.group_size, call.wire_bytes) == ("self", 1, 0)


def test_the_first_send_is_metadata_and_every_one_has_a_mask() -> None:
    first, later = (sent("pp2", 0, step, op="send")["payload_bytes"].tolist() for step in (0, 1))
    assert first == [1024, *later]
    batch, length, hidden = 2, 12, 32
    assert later == [4 * batch * length * hidden, 2 * length**2]


def test_mixed_parallelism_gathers_what_it_sent_in_parts() -> None:
    """Activations travel as halves: a boundary needs two all_gathers on the first stage and one on the second."""
    length, hidden = 12, 32
    full = 4 * 2 * length * hidden
    for rank, calls in ((0, 2), (2, 1)):
        gathered = sent("pp2tp2", rank, 2, op="all_gather", role="tensor")
        assert gathered["payload_bytes"].tolist() == [full] * calls * 2  # micro-batches
    parts = sent("pp2tp2", 0, 2, op="send")["payload_bytes"].tolist()
    assert parts == [8 * (7 + 2), full // 2, 2 * length**2] * 2


# --- without a training ---------------------------------------------------------------------------------------------


def test_division_of_layers_is_deepspeed_s() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    for layers in range(1, 12):
        for stages in range(1, 7):
            assert partition_uniform(layers, stages) == [*partition_uniform(layers, stages)]
            for weights in ([1] * layers, [0, *[1] * layers, 0, 0], [5, 0, *[3] * layers, 0, 1, 5], [*range(layers)]):
                assert partition_balanced(weights, stages) == [int(end) for end in partition_balanced(weights, stages)]


def staged(tmp_path: Path, **keys: Any) -> list[str]:
    """Return the configuration files of the tiny model with these keys."""
    path = tmp_path / "staged.yml"
    path.write_text(json.dumps(keys))
    return ["tiny", str(path)]


def test_a_forecast_has_every_stage(tmp_path: Path) -> None:
    prediction = forecast(staged(tmp_path, pipe_parallel_size=2, model_parallel_size=2, num_layers=4), 8)
    document = json_document(prediction)
    assert (document["pipeline_stages"], document["data_parallel_size"], len(document["stage_parameters"])) == (2, 2, 2)
    for stage in (0, 1):
        last = [row for row in volume_rows(prediction) if row["stage"] == stage and row["when"] == "steps from 1"]
        parts, total = last[:-1], last[-1]
        for name in ("calls", "payload_bytes", "all_ranks_payload_bytes"):
            assert sum(row[name] for row in parts) == total[name]
        assert total["all_ranks_payload_bytes"] == 4 * total["payload_bytes"]
        for rows in (size_rows(prediction), size_bin_rows(prediction)):
            assert sum(row["sum_bytes"] for row in rows if row["stage"] == stage) == total["payload_bytes"]
        bars = [row for row in document["waterfall"] if row["stage"] == stage]
        assert sum(row["wire_bytes"] for row in bars) == pytest.approx(total["wire_bytes"])
    # Two stages have two layers each.
    equations_4_and_5 = closed_forms.pipeline(4, 32, 96, 2) + closed_forms.tensor_parallel(4, 32, 96, 2, 2)
    form = closed_forms.data_parallel(parameter_count(), 2) + equations_4_and_5
    assert document["closed_form"]["wire_bytes"] == 4 * form


def parameter_count() -> int:
    """Return the parameter count of the model above as GPT-NeoX counts it: 256 rows of 96, untied."""
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
    ("keys", "options", "reason"),
    [
        ({"pipe_parallel_size": 3}, PlanOptions(), "num_layers is 2"),
        ({"pipe_parallel_size": 2}, PlanOptions(zero_stage=2), "ZeRO-0 and ZeRO-1 only"),
        ({"pipe_parallel_size": 2, "model_parallel_size": 3}, PlanOptions(), "num_attention_heads"),
        ({"pipe_parallel_size": 2, "pipe_partition_method": "profile"}, PlanOptions(), "type:REGULAR-EXPRESSION"),
        ({"pipe_parallel_size": 2}, PlanOptions(engine="ddp"), "is DeepSpeed's"),
        ({"pipe_parallel_size": 2, "model_parallel_size": 4}, PlanOptions(), "times model_parallel_size 4"),
    ],
)
def test_impossible_divisions_are_said(keys: dict[str, Any], options: PlanOptions, reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=reason):
        forecast(staged(tmp_path, **keys), 4, options)


@pytest.mark.parametrize(
    ("keys", "reason"),
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
def test_stages_that_deepspeed_would_hang_in_are_refused(keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    from examples.gpt_neox import ConfigError, load_config
    from examples.gpt_neox.pipeline_engine import check_stages

    config = load_config(staged(tmp_path, **keys))
    if reason:
        with pytest.raises(ConfigError, match=reason):
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
    row = forecast(staged(tmp_path, pipe_parallel_size=2), 2).plan.row.to_json()
    inner = {name: value for name, value in change.items() if name in row["pipeline"]}
    row |= {"pipeline": {**row["pipeline"], **inner}}
    row |= {name: value for name, value in change.items() if name not in inner}
    row = {name: value for name, value in row.items() if value is not None}
    with pytest.raises(NotPredictedError, match=reason):
        predict(row)
