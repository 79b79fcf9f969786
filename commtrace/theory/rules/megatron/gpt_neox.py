"""Calls that GPT-NeoX's program (`train.py`) makes itself, in addition to those of its engine and parallel layers.

It makes them even in groups of one rank. Loading a checkpoint and resuming from one are not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Final

from commtrace.schema import Purpose
from commtrace.theory.expected_calls import ExpectedCall, Prediction, cause_bars
from commtrace.theory.job import Job, refuse
from commtrace.theory.rules.deepspeed import zero3, zero3_calls
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule

from . import sequence_parallel, tensor_parallel

WORLD: Final = "world"
BATCH: Final = "the batch, for the ranks that share a model"

CHECKPOINT: Final = Purpose.CHECKPOINT_SAVED.value

_INT64: Final = 8
_FLOAT32: Final = 4


def check(job: Job) -> None:
    """Raise NotPredictedError for settings of the program that have no rules yet."""
    train_impl = job.model.train_impl
    refuse(
        (train_impl != "normal", f"GPT-NeoX's train_impl {train_impl} has no rules yet"),
        (job.model.gpt_j_tied, "GPT-NeoX's gpt_j_tied has no rules yet"),
        (job.row.zero_stage == 3 and job.micro_batches == 1 == job.model.eval_interval,
         "GPT-NeoX under ZeRO-3 with an evaluation after the first micro-batch has no rules yet"),
    )  # fmt: skip


def extend_prediction(job: Job, prediction: Prediction) -> Prediction:
    """Add the program's own calls to a prediction."""
    if job.row.zero_stage == 3:  # with an mpu, barriers and comparisons are among all ranks
        steps = tuple(_with_world_role(calls) for calls in prediction.steps)
        start = (*_with_world_role(prediction.start), *pipeline_module_broadcasts(job))
        prediction = replace(prediction, start=start, steps=steps)
    added_calls = _in_dimension(job, program_calls(job))
    extended = replace(
        prediction,
        start=_in_dimension(job, (*prediction.start, *data_set_indices(job), data_flags(job), parameter_count())),
        steps=tuple((*_in_dimension(job, calls), *added_calls) for calls in prediction.steps),
        others={**prediction.others, WORLD: job.row.world_size, "self": 1},
    )
    bars = (
        replace(bar, role=role)
        for role in sorted({call.role for call in added_calls})
        for bar in cause_bars([call for call in added_calls if call.role == role], extended.ranks_of(role))
    )
    extended = replace(extended, bars=(*prediction.bars, *bars))
    simulation = zero3.SimulatedSteps(job) if job.row.zero_stage == 3 else None
    return replace(extended, special_step=partial(_special_step, job, extended, simulation))


def program_calls(job: Job) -> tuple[ExpectedCall, ...]:
    """Return the program's own calls in a step."""
    calls = (*_optimizer_calls(job), *batches(job, job.micro_batches), *losses(job, job.micro_batches))
    return calls if job.has_pipeline_engine else (*calls, reduced_losses(job.micro_batches))


@rule("megatron.training.get_model (deepspeed.zero.Init)", GPT_NEOX)
def pipeline_module_broadcasts(job: Job) -> list[ExpectedCall]:
    """Return the broadcasts of the pipeline's modules, which ZeRO-3 partitions before the model's modules are made."""
    cause = "parameters of the pipeline's modules, which are not trained"
    return [ExpectedCall("broadcast", parameter.bytes, cause, role=WORLD) for parameter in job.parameters]


def _with_world_role(calls: Iterable[ExpectedCall]) -> tuple[ExpectedCall, ...]:
    in_world = (zero3_calls.BARRIERS, zero3_calls.COMPARED)
    return tuple(replace(call, role=WORLD) if call.cause in in_world else call for call in calls)


def _in_dimension(job: Job, calls: Iterable[ExpectedCall]) -> tuple[ExpectedCall, ...]:
    """Return calls in which the group of all ranks has the role that recorded runs give it."""
    role = _role_of_all_ranks(job)
    return tuple(replace(call, role=role) if call.role == WORLD else call for call in calls)


def _role_of_all_ranks(job: Job) -> str:
    """Return the dimension of a job that has only one, else WORLD. With stages, ranks that load data are a second one.

    See `commtrace.reading.labels.roles_of`.
    """
    if job.row.pipeline_stages > 1 or 1 < job.tensor < job.row.world_size or job.row.world_size == 1:
        return WORLD
    return tensor_parallel.ROLE if job.tensor > 1 else "data"


def _special_step(
    job: Job, regular: Prediction, simulation: zero3.SimulatedSteps | None, step: int
) -> tuple[ExpectedCall, ...] | None:
    """Return the calls of a step and of the evaluation or checkpoint after it; None for regular steps.

    Under ZeRO-3 (`simulation`), an evaluation leaves some parameters gathered for the next step.
    """
    iteration = step + 1
    is_last = iteration == job.model.train_iters and bool(job.model.save)
    earlier, (evaluated, tested) = passes_of_evaluations(job, step), passes_of_evaluations(job, iteration)
    extra = [call for passes in (*evaluated, *tested) for call in evaluation(job, passes)]
    extra += checkpoint(job) * (saves_checkpoint(job, iteration) + is_last)
    calls = regular.step(step)
    if simulation is not None:
        if any(earlier):
            _, calls = simulation.evaluation(min(step, zero3.STEPS), sum(map(sum, earlier)))
            calls = (*_with_world_role(calls), *program_calls(job))
        for passes in (evaluated, tested) if is_last else (evaluated + tested,):
            all_gathers, _ = simulation.evaluation(min(iteration, zero3.STEPS), sum(passes))
            extra += _with_world_role(all_gathers)
    return _in_dimension(job, (*calls, *extra)) if extra or (simulation and any(earlier)) else None


def _model_group(job: Job, call: ExpectedCall) -> ExpectedCall:
    """Return a call in the tensor-parallel group, which may have one rank."""
    return replace(call, role=tensor_parallel.ROLE).among(job.tensor)


# --- start-up -------------------------------------------------------------------------------------------------------


@rule("megatron.data.gpt2_dataset._build_index_mappings; megatron.mpu.initialize.initialize_model_parallel (IO group)",
      GPT_NEOX)  # fmt: skip
def data_set_indices(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces (one int64 each) with which ranks wait for the index of each data set.

    There is one data set for training and one for each kind of evaluation. The group consists of the ranks that load
    data: the data-parallel ranks of the first and the last stage.
    """
    if job.row.tensor_parallel_rank > 0 or not loads_batches(job):
        return []
    data_sets = 1 + bool(job.model.do_valid) + bool(job.model.do_test)
    call = ExpectedCall("all_reduce", _INT64, "data sets are indexed", calls=data_sets)
    return [call.among(job.ranks) if job.row.pipeline_stages == 1 else replace(call, ranks=2 * job.ranks)]


@rule("megatron.data.data_utils.build_train_valid_test_data_loaders", GPT_NEOX)
def data_flags(job: Job) -> ExpectedCall:
    """Return the broadcast of three int64 flags for data sets; without a pipeline, in the tensor-parallel group."""
    call = ExpectedCall("broadcast", 3 * _INT64, "kinds of data sets", role=WORLD)
    return call if job.has_pipeline_engine else _model_group(job, call)


@rule("megatron.utils.get_total_params", GPT_NEOX)
def parameter_count() -> ExpectedCall:
    """Return the all_reduce of the number of parameters (int64) among all ranks."""
    return ExpectedCall("all_reduce", _INT64, "parameters of the model", role=WORLD)


# --- steps ----------------------------------------------------------------------------------------------------------


def loads_batches(job: Job) -> bool:
    """Return whether this rank's stage is the first or the last one."""
    return computes_loss(job) or job.row.pipeline.stage == 0


def computes_loss(job: Job) -> bool:
    """Return whether this rank's stage is the last one."""
    return not job.has_pipeline_engine or job.row.pipeline.stage == job.row.pipeline_stages - 1


@rule("megatron.mpu.data.broadcast_data, _build_key_size_numel_dictionaries", GPT_NEOX)
def batches(job: Job, number: int) -> list[ExpectedCall]:
    """Return the broadcasts of batches in the tensor-parallel group: the shape (four int64), then the tokens."""
    if not loads_batches(job):
        return []
    batch, length, _ = tensor_parallel.batch_dimensions(job)
    tokens = batch * (length + 1) * _INT64
    return [_model_group(job, ExpectedCall("broadcast", size, BATCH, number)) for size in (4 * _INT64, tokens)]


def losses(job: Job, number: int) -> list[ExpectedCall]:
    """Return the loss's all_reduces in a tensor-parallel group of one rank; larger groups are in `tensor_parallel`."""
    if job.tensor > 1 or not computes_loss(job):
        return []
    return [_model_group(job, call).times(number) for call in tensor_parallel.loss_all_reduces(job)]


@rule("megatron.utils.reduce_losses", GPT_NEOX)
def reduced_losses(number: int) -> ExpectedCall:
    """Return the all_reduce of the losses of a step or an evaluation (32 bits each) among all ranks."""
    return ExpectedCall("all_reduce", number * _FLOAT32, "losses, averaged", role=WORLD)


def _optimizer_calls(job: Job) -> list[ExpectedCall]:
    """Return the optimizer's calls in a model-parallel group of one rank: GPT-NeoX always passes its mpu."""
    if job.has_pipeline_engine or job.tensor > 1:
        return []  # other rules return them
    return [replace(call, role="self") for call in tensor_parallel.optimizer_calls(job)]


# --- evaluation -----------------------------------------------------------------------------------------------------


@rule("megatron.training.train, pretrain, evaluate", GPT_NEOX)
def passes_of_evaluations(job: Job, iteration: int) -> tuple[list[int], list[int]]:
    """Return the forward passes of each evaluation after an iteration: those before and after the last checkpoint.

    Evaluations follow every eval_interval iterations and the last iteration, if there is data for them. Each has
    eval_iters times the micro-batches of a step. With a pipeline engine, GPT-NeoX's evaluation fails: it expects a
    pair, but DeepSpeed returns a loss.
    """
    interval, is_last = job.model.eval_interval, iteration == job.model.train_iters
    passes = 0 if job.has_pipeline_engine else job.model.eval_iters * job.micro_batches
    times = bool(iteration and interval and iteration % interval == 0) + is_last
    valid, test = ([passes] * bool(passes and has_data) for has_data in (job.model.do_valid, job.model.do_test))
    return valid * times, test * is_last


@rule("megatron.training.evaluate", GPT_NEOX)
def evaluation(job: Job, passes: int) -> tuple[ExpectedCall, ...]:
    """Return the calls of an evaluation: its forward passes, and the average of its losses."""
    forward = [call.times(passes) for call in forward_calls(job)]
    return (*batches(job, passes), *losses(job, passes), *forward, reduced_losses(passes))


@rule("megatron.training.is_save_iter", GPT_NEOX)
def saves_checkpoint(job: Job, iteration: int) -> bool:
    """Return whether an iteration saves a checkpoint: multiples of checkpoint_factor, or powers (checkpoint_scale)."""
    factor = job.model.checkpoint_factor
    if not job.model.save or not factor:
        return False
    if job.model.checkpoint_scale == "linear":
        return iteration % int(factor) == 0
    power = 1.0
    while int(power) < iteration and factor > 1:
        power *= factor
    return int(power) == iteration


@rule("megatron.checkpointing.save_checkpoint", GPT_NEOX)
def checkpoint(job: Job) -> list[ExpectedCall]:
    """Return the calls that save a checkpoint, with three barriers of all ranks at the end."""
    sharded = zero3_calls.saved_state(job) if job.row.zero_stage == 3 else []
    return [
        *saved_state(),
        *(replace(call, cause=CHECKPOINT) for call in sharded),
        ExpectedCall("barrier", 0, CHECKPOINT, 3, role=WORLD),
    ]


@rule("deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint, _checkpoint_tag_validation", DEEPSPEED)
def saved_state() -> list[ExpectedCall]:
    """Return the calls of DeepSpeed's checkpoint: maximum and minimum of its tag's hash (20 bytes), two barriers."""
    return [
        ExpectedCall("all_reduce", 20, CHECKPOINT, 2, role=WORLD),
        ExpectedCall("barrier", 0, CHECKPOINT, 2, role=WORLD),
    ]


def forward_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of tensor parallelism in one forward pass."""
    if job.tensor == 1:
        return []
    is_shared = job.model.sequence_parallel
    return sequence_parallel.evaluation_calls(job) if is_shared else tensor_parallel.evaluation_calls(job)
