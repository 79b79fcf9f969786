"""DeepSpeed: steps, micro-batches, phases, roles and jobs, under ZeRO and in a pipeline."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

pytest.importorskip("deepspeed")

from hook_programs.runs import Call, Ran, Training
from hook_programs.runs import ran as ran_program
from hook_programs.runs import training as run_training
from recorders import WAITED, end

from commtrace.schema import Phase, Purpose

pytestmark = pytest.mark.long

FORWARD, BACKWARD, OPTIMIZER, INIT, OTHER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.INIT, Phase.OTHER
ZERO = ("0", "1", "2", "3")
GRADIENTS = 4 * (24 * 24 + 24 + 24 + 24 + 24 * 5 + 5)


@pytest.fixture
def training(recorder: str) -> Training:
    """Return the run of a model that every engine trains."""
    return run_training(recorder)


@pytest.fixture
def ran(recorder: str) -> list[Ran]:
    """Return the runs of a pipeline by rank."""
    return ran_program("pipeline", recorder, deepspeed=True)


def places(calls: list[Call]) -> list[tuple[int, int, Phase, str]]:
    """Return (step, micro-batch, phase, operation) of calls, without immediate repetitions."""
    return [place for place, _ in groupby((call.step, call.micro_batch, call.phase, call.op) for call in calls)]


def trained(training: Training, stage: str, rank: int = 0) -> list[Call]:
    """Return the calls of a training without its final barrier, with steps counted from its own first step."""
    calls = training.calls(rank, stage)[:-1]
    before = calls[0].step
    return [Call(**{**vars(call), "step": call.step - before - 1}) for call in calls]


# ---- ZeRO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_steps_micro_batches_and_phases_below_stage_3(stage: str, training: Training) -> None:
    expected = [(-1, -1, INIT, "broadcast")]
    for step in range(3):
        # Stage 2 reduces each micro-batch's gradients, the others their sum, after the second backward pass.
        expected += [(step, part, BACKWARD, "all_reduce") for part in ((0, 1) if stage == "2" else (1,))]
        expected.append((step, -1, OPTIMIZER, "all_reduce"))
        expected += [(step, -1, OPTIMIZER, "all_gather")] * (stage != "0")
    assert places(trained(training, stage)) == expected


def test_steps_micro_batches_and_phases_under_stage_3(training: Training) -> None:
    calls = trained(training, "3")
    assert {call.phase for call in calls if call.step < 0} == {INIT}
    for step in range(3):
        step_calls = [call for call in calls if call.step == step]
        reduced = [(call.micro_batch, call.phase) for call in step_calls if call.op == "reduce_scatter"]
        assert reduced == [(0, BACKWARD), (1, BACKWARD)]
        assert [call.phase for call in step_calls if call.micro_batch < 0] == [OPTIMIZER] * 7
    gathered = [call.phase for call in calls if (call.step, call.micro_batch, call.op) == (0, 0, "all_gather")]
    assert gathered == [FORWARD] * 3 + [BACKWARD] * 3  # each layer with parameters, forward and backward


@pytest.mark.parametrize("stage", ZERO)
def test_sites_are_deepspeed_s_lines_and_no_wrapper_s(stage: str, training: Training) -> None:
    for call in trained(training, stage):
        assert "/deepspeed/" in call.file or "/torch/nn/utils/" in call.file
        assert "/deepspeed/comm/" not in call.file
    reducers = {call.function.split(".")[-1] for call in trained(training, stage) if call.phase == BACKWARD}
    assert stage == "3" or reducers == {"allreduce_bucket"}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_job_is_told_whole(rank: int, training: Training) -> None:
    jobs = [job for job in training.logs[rank].tables["job"] if job["source"] == "deepspeed"]
    assert [job["zero_stage"] for job in jobs] == [0, 1, 2, 3]
    for stage, job in enumerate(jobs):
        assert job["engine"] == "DeepSpeedEngine"
        assert job["zero"]["stage"] == stage
        assert job["zero"]["reduce_bucket_size"] == 500_000_000
        degrees = ("world", "data_parallel", "tensor_parallel", "sequence_parallel")
        assert [job[f"{name}_size"] for name in degrees] == [2, 2, 1, 1]
        assert (job["pipeline_stages"], job["moe"], job["expert_parallel_sizes"]) == (1, False, [])
        assert (job["precision"], job["gradient_clipping"]) == ("fp32", 1.0)
        assert [job[name] for name in ("micro_batch_size", "gradient_accumulation_steps")] == [3, 2]
        # Full shapes, even where each rank has only a shard.
        shapes = {entry["name"]: entry["shape"] for entry in job["parameters"]}
        assert shapes["0.weight"] == [24, 24]
        assert shapes["3.bias"] == [5]
        elements = [entry["shape"][0] * (entry["shape"] + [1])[1] for entry in job["parameters"]]
        assert 4 * sum(elements) == GRADIENTS
        assert {(entry["dtype"], entry["trainable"]) for entry in job["parameters"]} == {("float32", True)}


def test_ddp_s_job_is_told(training: Training) -> None:
    (job,) = (job for job in training.logs[0].tables["job"] if job["source"] == "ddp")
    assert [entry["name"] for entry in job["parameters"]][:2] == ["0.weight", "0.bias"]
    assert (job["bucket_bytes_cap"], job["first_bucket_bytes_cap"]) == (25 << 20, 1 << 20)
    assert job["first_buckets_bytes"] == [GRADIENTS]
    assert (job["broadcast_buffers"], job["buffers"], job["data_parallel_size"]) == (True, [], 2)
    settings = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    assert [job[name] for name in settings] == [False, False, False]


# ---- a pipeline, and an engine that is trained in torch's style -----------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_backward_of_the_loss_is_as_good_as_the_engine_s(rank: int, ran: list[Ran]) -> None:
    each = [(BACKWARD, 1, "all_reduce"), (OPTIMIZER, -1, "all_reduce"), (OPTIMIZER, -1, "all_gather")]
    assert places(ran[rank].section("torch style", "no grad")) == [
        (step, part, phase, op) for step in range(2) for phase, part, op in each
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_of_the_optimizer_is_as_good_as_the_engine_s(rank: int, ran: list[Ran]) -> None:
    calls = ran[rank].section("optimizer's steps", "optimizer's end")
    each = [(BACKWARD, "all_reduce"), (OPTIMIZER, "all_reduce"), (OPTIMIZER, "all_gather")]
    first = calls[0].step
    assert [(call.step - first, call.phase, call.op) for call in calls] == [
        (step, phase, op) for step in range(2) for phase, op in each
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forward_without_gradients_begins_no_step(rank: int, ran: list[Ran]) -> None:
    (call,) = ran[rank].section("no grad", "torch style end")
    assert (call.step, call.phase) == (1, OTHER)


def messages(ran: list[Ran], rank: int, step: int, op: str, phase: Phase) -> list[Call]:
    until = "pipeline step 1" if step == 0 else "evaluation"
    calls = ran[rank].section(f"pipeline step {step}", until)
    return [call for call in calls if call.op == op and call.phase == phase]


@pytest.mark.parametrize("step", [0, 1])
def test_messages_of_a_pipeline_carry_their_micro_batches(step: int, ran: list[Ran]) -> None:
    activations = [0, *range(4)] if step == 0 else [*range(4)]  # metadata precede the first message
    for rank, op in ((0, "send"), (1, "recv")):
        assert [call.micro_batch for call in messages(ran, rank, step, op, FORWARD)] == activations
    for rank, op in ((1, "send"), (0, "recv")):
        assert [call.micro_batch for call in messages(ran, rank, step, op, BACKWARD)] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [0, 1])
def test_both_ends_of_a_message_agree(step: int, ran: list[Ran]) -> None:
    for source, phase in ((0, FORWARD), (1, BACKWARD)):
        sent, received = messages(ran, source, step, "send", phase), messages(ran, 1 - source, step, "recv", phase)
        assert [(call.seq, call.payload, call.step) for call in sent] == [
            (call.seq, call.payload, call.step) for call in received
        ]
        assert {call.peer for call in sent} == {1 - source}
        assert {call.peer for call in received} == {source}


def test_the_line_that_sends_metadata_is_named(ran: list[Ran]) -> None:
    first, *others = messages(ran, 0, 0, "send", FORWARD)
    assert (first.payload, first.function) == (1024, "PipelineEngine._send_tensor_meta")
    assert {(call.payload, call.function) for call in others} == {(64, "PipelineEngine._exec_send_activations")}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_gradients_of_a_stage_with_one_replica_go_to_a_group_of_one(rank: int, ran: list[Ran]) -> None:
    calls = ran[rank].section("pipeline step 1", "evaluation")
    (call,) = (call for call in calls if call.op == "all_reduce" and call.phase == BACKWARD)
    assert call.ranks == [rank]
    assert call.payload == 4 * 2 * (8 * 8 + 8)  # two layers of 8 by 8


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_of_a_pipeline_are_those_of_train_batch(rank: int, ran: list[Ran]) -> None:
    first = ran[rank].section("pipeline step 0", "pipeline step 1")
    second = ran[rank].section("pipeline step 1", "evaluation")
    assert {call.step for call in first} == {4}  # after the two of each of the other engines
    assert {call.step for call in second} == {5}
    evaluation = ran[rank].section("evaluation", "pipeline end")
    assert {"send", "recv", "barrier"} & {call.op for call in evaluation}
    assert {(call.step, call.micro_batch, call.phase) for call in evaluation} == {(5, -1, Phase.EVALUATION)}


@pytest.mark.parametrize("rank", [0, 1])
def test_roles_come_from_deepspeed_s_registries(rank: int, ran: list[Ran]) -> None:
    log = ran[rank].log
    ranks = {group["id"]: group["ranks"] for group in log.tables["groups"]}
    roles = {(row["role"], ranks[row["group"]]) for row in log.tables["roles"]}
    assert roles == {("data", "0-1"), ("data", str(rank)), ("pipeline", "0-1"), ("tensor", str(rank))}


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_between_stages_are_the_pipeline_s(rank: int, ran: list[Ran]) -> None:
    """The messages go through torch's default group, which has another role."""
    log = ran[rank].log
    groups = {group["id"]: (group["ranks"], group["desc"]) for group in log.tables["groups"]}
    (row,) = log.tables["message_roles"]
    assert (row["role"], groups[row["group"]]) == ("pipeline", ("0-1", "default_pg"))
    calls = [call for call in ran[rank].section("pipeline step 0", "evaluation") if call.op in ("send", "recv")]
    assert {call.group["id"] for call in calls} == {row["group"]}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_sets_up_the_stages_has_that_purpose(rank: int, ran: list[Ran]) -> None:
    """The numbers of parameters of all stages, the message that connects two neighbours, and shapes of activations."""
    marked = [call for call in ran[rank].log.calls if call.purpose.get("name") == Purpose.PIPELINE_SET_UP.value]
    at_start = [call for call in marked if call.phase == Phase.INIT]
    message = ("send", "recv")[rank]
    assert Counter(call.op for call in at_start) == {"all_reduce": 1, message: 1}
    shapes = [(call.op, call.payload, call.phase) for call in marked if call.phase != Phase.INIT]
    assert shapes == [(message, 1024, FORWARD)]


@pytest.mark.parametrize("step", [0, 1])
def test_what_stages_exchange_has_a_purpose_and_the_stage(step: int, ran: list[Ran]) -> None:
    for rank in (0, 1):
        for phase, purpose in ((FORWARD, Purpose.PIPELINE_ACTIVATIONS), (BACKWARD, Purpose.PIPELINE_GRADIENTS)):
            calls = [*messages(ran, rank, step, "send", phase), *messages(ran, rank, step, "recv", phase)]
            purposes = [call.purpose for call in calls if call.payload == 64]
            assert purposes == [{"name": purpose.value, "stage": rank}] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_of_a_pipeline_has_a_purpose(rank: int, ran: list[Ran]) -> None:
    calls = ran[rank].section("pipeline step 0", "pipeline end")
    assert calls
    assert [(call.op, call.function) for call in calls if not call.purpose] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_s_job_says_where_it_stands(rank: int, ran: list[Ran]) -> None:
    *_, job = ran[rank].log.tables["job"]
    stage = job["pipeline"]
    assert (stage["stage"], stage["bounds"], stage["layers"]) == (rank, [0, 2, 4], ["Linear", "Linear"])
    assert (stage["tied"], stage["attention_mask"], stage["activation_checkpoint_interval"]) == ([], False, 0)
    assert (job["tensor_parallel_size"], job["data_parallel_size"]) == (1, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_s_job_has_its_stages_and_the_parameters_of_its_own(rank: int, ran: list[Ran]) -> None:
    jobs = ran[rank].log.tables["job"]
    assert [(job["engine"], job["pipeline_stages"], len(job["parameters"])) for job in jobs] == [
        ("DeepSpeedEngine", 1, 8),
        ("DeepSpeedEngine", 1, 8),
        ("PipelineEngine", 2, 4),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_all_reduce_through_shared_memory_is_seen(rank: int, ran: list[Ran], recorder: str) -> None:
    (call,) = ran[rank].section("shared memory", "end")
    assert ran[rank].told["shared"] == [2.0] * 6
    assert (call.op, call.variant, call.dtype, call.reduce_op) == (
        "all_reduce", "inference_all_reduce_", "float32", "SUM",
    )  # fmt: skip
    assert (call.payload, call.ranks) == (24, [0, 1])
    assert (call.state, call.clock) == end(WAITED, call.variant, recorder)


# ---- purposes --------------------------------------------------------------------------------------------------------

PURPOSES: dict[tuple[Phase, str], set[Purpose]] = {
    (Phase.INIT, "broadcast"): {Purpose.PARAMETERS_AT_START, Purpose.MODEL_CHECKED},  # checked: by DDP
    (FORWARD, "all_gather"): {Purpose.PARAMETERS_FORWARD},
    (BACKWARD, "all_gather"): {Purpose.PARAMETERS_BACKWARD},
    (BACKWARD, "all_reduce"): {Purpose.GRADIENTS},
    (BACKWARD, "reduce_scatter"): {Purpose.GRADIENTS},
    (OPTIMIZER, "all_gather"): {Purpose.PARAMETERS_AFTER_OPTIMIZER},
    (OPTIMIZER, "all_reduce"): {Purpose.GRADIENT_NORM},
}
"""Of all trainings of the program: DDP, and DeepSpeed with the stages of ZeRO, in float32."""


@pytest.mark.parametrize(("phase", "op"), PURPOSES)
def test_purposes_of_a_phase(phase: Phase, op: str, training: Training) -> None:
    for log in training.logs:
        found = {call.purpose.get("name") for call in log.calls if (call.phase, call.op) == (phase, op)}
        assert found == {purpose.value for purpose in PURPOSES[phase, op]}


@pytest.mark.parametrize("rank", [0, 1])
def test_purposes_of_sequence_parallelism(rank: int, ran: list[Ran]) -> None:
    for begin, end_of_part, op, times, purpose in (
        ("forward", "backward", "all_to_all", 4, Purpose.ACTIVATIONS),
        ("backward", "loss", "all_to_all", 4, Purpose.ACTIVATION_GRADIENTS),
        ("loss", "end", "all_gather", 1, Purpose.LOSS),
    ):
        calls = ran[rank].section(f"sequence {begin}", f"sequence {end_of_part}")
        assert [(call.op, call.purpose) for call in calls] == [(op, {"name": purpose.value})] * times
