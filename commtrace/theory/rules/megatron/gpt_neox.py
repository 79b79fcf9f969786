"""Calls that GPT-NeoX's program (`train.py`) makes itself, beside those of its engine and of its parallel layers.

It makes them in groups of one rank as well. Loading a checkpoint and training from one are not counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from commtrace.theory.expected_calls import ExpectedCall, Prediction
from commtrace.theory.job import Job, NotPredictedError
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, rule
from commtrace.theory.waterfall import cause_bars

from . import sequence_parallel
from . import tensor_parallel as tensor

WORLD: Final = "world"
BATCH: Final = "the batch, for the ranks that share a model"

CHECKPOINT: Final = "a checkpoint"

_INT64: Final = 8
_FLOAT32: Final = 4


def check(job: Job) -> None:
    """Raise NotPredictedError for what the program does otherwise under this job."""
    if job.model("train_impl", "normal") != "normal":
        raise NotPredictedError(f"GPT-NeoX's train_impl {job.model('train_impl')} has no rules yet")
    if job.row.get("zero_stage") == 3:
        raise NotPredictedError(
            "GPT-NeoX under ZeRO-3 has no rules yet: it builds its layers twice, and they hand biases on to others"
        )


def extend_prediction(job: Job, prediction: Prediction) -> Prediction:
    """Add the program's own calls."""
    own = (*_among_model_ranks(job), *batches(job, job.micro_batches), *losses(job, job.micro_batches))
    if not job.has_pipeline_engine:
        own = (*own, reduced_losses(job.micro_batches))
    extended = replace(
        prediction,
        start=(*prediction.start, *set_up(job)),
        steps=tuple((*calls, *own) for calls in prediction.steps),
        others={**prediction.others, WORLD: int(job.fact("world_size")), "self": 1},
    )
    bars = (
        replace(bar, role=role)
        for role in sorted({call.role for call in own})
        for bar in cause_bars([call for call in own if call.role == role], extended.ranks_of(role))
    )
    extended = replace(extended, bars=(*prediction.bars, *bars))
    return replace(extended, special_step=partial(_special_step, job, extended))


def _special_step(job: Job, regular: Prediction, step: int) -> tuple[ExpectedCall, ...] | None:
    """Return the calls of a step that an evaluation or a checkpoint follows, with theirs; None for other steps."""
    iteration, last = step + 1, int(job.model("train_iters", 0))
    interval = int(job.model("eval_interval", 0))
    extra = [*checkpoint()] if saves(job, iteration) else []
    if interval and iteration % interval == 0:
        extra += evaluation(job, "do_valid")
    if iteration == last:
        at_end = [*checkpoint()] if job.model("save", False) else []
        extra += (*evaluation(job, "do_valid"), *at_end, *evaluation(job, "do_test"))
    return (*regular.step(step), *extra) if extra else None


def _model_group(job: Job, call: ExpectedCall) -> ExpectedCall:
    """Return a call among the ranks that share a model, of which there may be one."""
    return replace(call, role=tensor.ROLE).among(job.tensor)


# --- start-up -------------------------------------------------------------------------------------------------------


def set_up(job: Job) -> list[ExpectedCall]:
    """Return the calls before the first batch."""
    return [*data_set_indices(job), data_flags(job), parameter_count()]


@rule("megatron.data.gpt2_dataset._build_index_mappings; megatron.mpu.initialize.initialize_model_parallel (IO group)",
      GPT_NEOX)  # fmt: skip
def data_set_indices(job: Job) -> list[ExpectedCall]:
    """Ranks that load data wait for the index of each data set: a 64-bit number among those of one model part."""
    loads = int(job.row.get("tensor_parallel_rank", 0)) == 0 and loads_batches(job)
    call = ExpectedCall("all_reduce", _INT64, "data sets are indexed", calls=data_sets(job))
    stages = int(job.fact("pipeline_stages"))
    if not loads or not call.calls:
        return []
    return [call.among(job.ranks) if stages == 1 else replace(call, ranks=2 * job.ranks)]


def data_sets(job: Job) -> int:
    """Return the number of data sets: one to train with, and one for each kind of evaluation."""
    return 1 + bool(job.model("do_valid", 1)) + bool(job.model("do_test", 1))


@rule("megatron.data.data_utils.build_train_valid_test_data_loaders", GPT_NEOX)
def data_flags(job: Job) -> ExpectedCall:
    """Three 64-bit numbers tell which data sets there are: to all ranks with a pipeline engine, else to a model's."""
    call = ExpectedCall("broadcast", 3 * _INT64, "kinds of data sets", role=WORLD)
    return call if job.has_pipeline_engine else _model_group(job, call)


@rule("megatron.utils.get_total_params", GPT_NEOX)
def parameter_count() -> ExpectedCall:
    """All ranks sum a 64-bit number of parameters."""
    return ExpectedCall("all_reduce", _INT64, "parameters of the model", role=WORLD)


# --- steps ----------------------------------------------------------------------------------------------------------


def loads_batches(job: Job) -> bool:
    """Return whether this rank's stage is the first or the last one."""
    return not job.has_pipeline_engine or job.fact("pipeline", "stage") in (0, int(job.fact("pipeline_stages")) - 1)


def computes_loss(job: Job) -> bool:
    """Return whether this rank's stage is the last one."""
    return not job.has_pipeline_engine or job.fact("pipeline", "stage") == int(job.fact("pipeline_stages")) - 1


@rule("megatron.mpu.data.broadcast_data, _build_key_size_numel_dictionaries", GPT_NEOX)
def batches(job: Job, number: int) -> list[ExpectedCall]:
    """Of each batch, the shape (four 64-bit numbers) and then the tokens go to the ranks that share a model."""
    if not loads_batches(job):
        return []
    batch, length, _ = tensor.batch_dimensions(job)
    tokens = batch * (length + 1) * _INT64
    return [_model_group(job, ExpectedCall("broadcast", size, BATCH, number)) for size in (4 * _INT64, tokens)]


def losses(job: Job, number: int) -> list[ExpectedCall]:
    """Return the calls of the loss, which a rank makes without tensor parallelism as well."""
    if job.tensor > 1 or not computes_loss(job):
        return []
    return [_model_group(job, call).times(number) for call in tensor.loss_sums(job)]


@rule("megatron.utils.reduce_losses", GPT_NEOX)
def reduced_losses(number: int) -> ExpectedCall:
    """The losses of a step or of an evaluation are summed over all ranks, 32 bits each."""
    return ExpectedCall("all_reduce", number * _FLOAT32, "losses, averaged", role=WORLD)


def _among_model_ranks(job: Job) -> list[ExpectedCall]:
    """Return the optimizer's calls in a model-parallel group of one rank: GPT-NeoX always hands its mpu on."""
    if job.has_pipeline_engine or job.tensor > 1:
        return []  # in other rules
    return [replace(call, role="self") for call in tensor.optimizer_calls(job)]


# --- evaluation -----------------------------------------------------------------------------------------------------


@rule("megatron.training.evaluate, pretrain", GPT_NEOX)
def evaluation(job: Job, condition: str) -> tuple[ExpectedCall, ...]:
    """An evaluation goes forward eval_iters times, with as many micro-batches as a step, if there are data for it.

    With a pipeline engine GPT-NeoX's evaluation fails: DeepSpeed's returns a loss, and it expects a pair.
    """
    iterations = int(job.model("eval_iters", 0))
    if not iterations or not job.model(condition, 1) or job.has_pipeline_engine:
        return ()
    number = iterations * job.micro_batches
    forward = [call.times(number) for call in forward_calls(job)]
    return (*batches(job, number), *losses(job, number), *forward, reduced_losses(number))


@rule("megatron.training.is_save_iter", GPT_NEOX)
def saves(job: Job, iteration: int) -> bool:
    """A checkpoint is saved every checkpoint_factor iterations, or at its powers (checkpoint_scale)."""
    factor = job.model("checkpoint_factor", 0)
    if not job.model("save", False) or not factor:
        return False
    if job.model("checkpoint_scale", "linear") == "linear":
        return iteration % int(factor) == 0
    power = 1.0
    while int(power) < iteration and factor > 1:
        power *= float(factor)
    return int(power) == iteration


@rule("megatron.checkpointing.save_checkpoint", GPT_NEOX)
def checkpoint() -> list[ExpectedCall]:
    """GPT-NeoX waits three times for all ranks when a checkpoint has been saved."""
    return [*saved_state(), ExpectedCall("barrier", 0, CHECKPOINT, 3, role=WORLD)]


@rule("deepspeed.runtime.engine.DeepSpeedEngine.save_checkpoint, _checkpoint_tag_validation", DEEPSPEED)
def saved_state() -> list[ExpectedCall]:
    """Ranks compare the hash of the checkpoint's name, 20 bytes, by maximum and minimum, and wait twice."""
    return [
        ExpectedCall("all_reduce", 20, CHECKPOINT, 2, role=WORLD),
        ExpectedCall("barrier", 0, CHECKPOINT, 2, role=WORLD),
    ]


def forward_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of tensor parallelism in one forward pass."""
    if job.tensor == 1:
        return []
    is_shared = bool(job.model("sequence_parallel", False))
    return sequence_parallel.evaluation_calls(job) if is_shared else tensor.evaluation_calls(job)
