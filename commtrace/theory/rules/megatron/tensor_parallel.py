"""Megatron's tensor parallelism (arXiv 1909.08053) within a data-parallel job: calls of the tensor-parallel group.

All except those of partition_activations are all_reduces: of activations (b s h elements: micro-batch, sequence, hidden
size) where partial results of a layer are summed, of one number per token in the loss, and of scalars in the optimizer.
Counts are exact: they follow from the architecture, not from the order of modules.

Assumptions that the captured job cannot confirm: every micro-batch has the configured size and length; embedding and
loss are sharded along the vocabulary as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from commtrace.job_row import JobRow
from commtrace.theory.closed_forms import all_reduce, tensor_parallel
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, element_size, refuse
from commtrace.theory.rules.deepspeed import zero12
from commtrace.theory.rules.deepspeed.engine import NORM, OVERFLOW
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, TORCH, WORKLOAD, rule

ROLE: Final = "tensor"
ACTIVATIONS: Final = "activations of tensor-parallel layers"
SEGMENTS: Final = "inputs of recomputed layers"
LOSS: Final = "vocabulary-parallel loss"
FORM: Final = "equation 5: (12 L + 2) b s h (t-1)/t"


def extend_prediction(job: Job, prediction: Prediction) -> Prediction:
    """Add the calls of tensor parallelism to a prediction.

    Raise NotPredictedError if the job does not have the model's architecture, or has a setting without rules.
    """
    check(job)
    tensor_calls = (*activation_calls(job), *optimizer_calls(job))
    scheme = f"{prediction.scheme}, tensor-parallel over {job.tensor}"
    form = WaterfallBar(FORM, form_bytes(job))
    return combine_predictions(job, prediction, tensor_calls, form, _bars(job, tensor_calls), scheme)


def combine_predictions(
    job: Job,
    prediction: Prediction,
    calls: tuple[ExpectedCall, ...],
    form: WaterfallBar,
    bars: list[WaterfallBar],
    scheme: str,
    others: Mapping[str, int] | None = None,
) -> Prediction:
    """Return the prediction of a job with another parallel dimension beside data parallelism.

    `calls` are the other dimension's calls of a step, and the waterfall `bars` lead from the closed form `form` to
    their wire bytes. `others` are the group sizes of other roles; default: those of tensor parallelism.
    """
    data_form = prediction.closed_form
    return replace(
        prediction,
        scheme=scheme,
        start=with_self_role(job, prediction.start),
        steps=tuple((*with_self_role(job, step), *calls) for step in prediction.steps),
        closed_form=WaterfallBar(f"{data_form.label} + {form.label}", data_form.bytes + form.bytes),
        bars=(*prediction.bars, *(bars if others else [replace(bar, role=ROLE) for bar in bars])),
        skipped=skipped_calls(job, prediction, calls),
        others=others or {ROLE: job.tensor, "self": 1},
        forms=() if others else (data_form, replace(form, role=ROLE)),
    )


def skipped_calls(
    job: Job, prediction: Prediction, calls: Iterable[ExpectedCall]
) -> tuple[tuple[ExpectedCall, ...], ...]:
    """Return `Prediction.skipped`, with the norms of the other dimension in entries that have norms."""
    norms = [call for call in calls if call.cause == NORM]
    return tuple(
        (*with_self_role(job, entry), *(norms if any(call.cause == NORM for call in entry) else ()))
        for entry in prediction.skipped
    )


def check(job: Job) -> None:
    """Raise NotPredictedError for settings that have no rules yet."""
    job.require_architecture(f"tensor parallelism over {job.tensor} ranks")
    size = job.model.model_parallel_size
    refuse(
        (size != job.tensor, f"the model has {size} tensor-parallel ranks, but the engine has {job.tensor}"),
        (job.sequence > 1 or job.context > 1 or job.has_experts,
         "tensor parallelism together with shared sequences or experts has no rules yet"),
        (job.row.get(JobRow.optimizer, "") == "FP16_Optimizer",
         "tensor parallelism with DeepSpeed's fused 16-bit optimizer has no rules yet"),
    )  # fmt: skip


def with_self_role(job: Job, calls: tuple[ExpectedCall, ...]) -> tuple[ExpectedCall, ...]:
    """Return calls, with the role "self" if the data-parallel group has one rank, which sends nothing."""
    return calls if job.ranks > 1 else tuple(replace(call, role="self") for call in calls)


def activation_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of the model's forward and backward passes in one step."""
    layers = num_layers(job)
    count = forward_all_reduces(job, layers) + recomputed_all_reduces(job) + backward_all_reduces(layers)
    count += edge_all_reduces()
    all_reduces = ExpectedCall("all_reduce", activation_bytes(job), ACTIVATIONS, count, role=ROLE)
    calls = [all_reduces, *segment_all_gathers(job, len(recomputed_segments(job))), *loss_all_reduces(job)]
    return [call.times(job.micro_batches) for call in calls]


def evaluation_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of one forward pass without a backward pass."""
    count = edge_all_reduces(last=False) + forward_all_reduces(job, num_layers(job))
    return [ExpectedCall("all_reduce", activation_bytes(job), ACTIVATIONS, count, role=ROLE), *loss_all_reduces(job)]


def optimizer_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of the optimizer in one step."""
    if job.row.source == "ddp":
        return clipping(job)
    if job.row.optimizer == "BF16_Optimizer":
        return global_norm()
    if job.row.zero_stage == 0:
        return [*fallback_overflow(job), *fallback_norm(job)]
    return model_parallel_all_reduces(job)


def _bars(job: Job, tensor_calls: tuple[ExpectedCall, ...]) -> list[WaterfallBar]:
    layers = num_layers(job)
    without_recomputation = forward_all_reduces(job, layers) + backward_all_reduces(layers)
    without_recomputation += edge_all_reduces(last=False)
    recomputed = without_recomputation + recomputed_all_reduces(job)
    counts = {
        "two forward and two backward in each layer": 1 + 4 * layers,
        "attention and MLP side by side, summed once": without_recomputation,
        "activations recomputed": recomputed,
        "the gradient of the head's input": recomputed + edge_all_reduces(first=False),
    }
    bars = activation_bars(job, tensor_calls, form_bytes(job), counts)
    return [*bars, *cause_bars(tensor_calls, job.tensor, ACTIVATIONS, prefix="tensor parallelism: ")]


def activation_bars(
    job: Job,
    tensor_calls: Iterable[ExpectedCall],
    form: Fraction,
    counts: Mapping[str, int],
    name: str = "tensor",
    volume: Callable[[int, int], Fraction] = all_reduce,
) -> list[WaterfallBar]:
    """Return the waterfall bars from the bytes of a closed form to the wire bytes of a step's activations.

    `counts` are the collective calls per micro-batch at each level, and `volume` is the closed form of such a call.
    """
    call_bytes = volume(activation_elements(job), job.tensor) * job.parameter_size
    levels = {label: count * call_bytes for label, count in counts.items()}
    levels[f"in each of {job.micro_batches} micro-batches"] = job.micro_batches * [*levels.values()][-1]
    levels["sums travel in fp32"] = total_wire_bytes(tensor_calls, job.tensor, ACTIVATIONS)
    return level_bars(form, {f"{name} parallelism: {label}": level for label, level in levels.items()})


def num_layers(job: Job) -> int:
    """Return the number of transformer layers."""
    return job.model.num_layers


def form_bytes(job: Job, stages: int = 1) -> Fraction:
    """Return equation 5 in bytes of the parameters' dtype, for a stage's share of the layers."""
    batch, length, hidden = batch_dimensions(job)
    return tensor_parallel(batch, length, hidden, Fraction(num_layers(job), stages), job.tensor) * job.parameter_size


def batch_dimensions(job: Job) -> tuple[int, int, int]:
    """Return b, s and h: sequences of a micro-batch, their length, and the hidden size."""
    return job.model.train_micro_batch_size_per_gpu, job.model.seq_length, job.model.hidden_size


def activation_elements(job: Job) -> int:
    """Return the number of elements of one micro-batch's activations between two layers: b s h."""
    batch, length, hidden = batch_dimensions(job)
    return batch * length * hidden


@rule("megatron.mpu.mappings._reduce", GPT_NEOX)
def activation_bytes(job: Job) -> int:
    """Return the payload of a reduction of activations in bytes: the parameters' dtype, or fp32 with fp32_allreduce."""
    is_wide = job.model.fp32_allreduce
    return activation_elements(job) * (element_size("float32") if is_wide else job.parameter_size)


@rule("megatron.mpu.layers.VocabParallelEmbedding.forward; megatron.model.transformer.ParallelLinear (the head)",
      GPT_NEOX)  # fmt: skip
def edge_all_reduces(first: bool = True, last: bool = True) -> int:
    """Return the number of all_reduces of the first and the last layer per micro-batch.

    The first layer, the embedding, all_reduces its output, because each token's row comes from one rank. The last one,
    the head, is column-parallel and all_reduces the gradient of its input.
    """
    return first + last


@rule("megatron.mpu.layers.RowParallelLinear.forward; megatron.model.transformer.ParallelTransformerLayer.forward",
      GPT_NEOX)  # fmt: skip
def forward_all_reduces(job: Job, layers: int) -> int:
    """Return the number of all_reduces of layers' attention and MLP outputs; with gpt_j_residual both share one."""
    return layers * (1 if job.model.gpt_j_residual else 2)


@rule("megatron.mpu.layers.ColumnParallelLinear.forward (copy_to_model_parallel_region)", GPT_NEOX)
def backward_all_reduces(layers: int) -> int:
    """Return the number of all_reduces of the gradients of layers' attention and MLP inputs."""
    return layers * 2


@rule("torch.utils.checkpoint.CheckpointFunction; "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (early stop)", TORCH)  # fmt: skip
def recomputed_all_reduces(job: Job) -> int:
    """Return the number of all_reduces that recomputation repeats.

    Without reentrant autograd, recomputation stops as soon as it has what the backward pass needs: before the last
    all_reduce of each segment of layers, unless a dropout after that keeps a mask.
    """
    segments = recomputed_segments(job)
    count = forward_all_reduces(job, sum(segments))
    if job.model.checkpoint_reentrant or job.model.hidden_dropout:
        return count
    return count - len(segments)


@rule("megatron.model.utils.SequentialWrapper.forward, _is_checkpointable", GPT_NEOX)
def recomputed_segments(job: Job) -> list[int]:
    """Return the number of layers in each segment of the model that is recomputed.

    GPT-NeoX counts segments from the embedding and the function after it, and recomputes those that consist of layers
    only. The example counts from the first layer.
    """
    if not job.model.checkpoint_activations:
        return []
    before, after = (2, 3) if job.is_gpt_neox else (0, 0)
    is_layer = [False] * before + [True] * num_layers(job) + [False] * after
    return layer_segments(is_layer, job.model.checkpoint_num_layers)


def layer_segments(is_layer: Sequence[bool], interval: int) -> list[int]:
    """Split modules into segments of `interval`, and return the lengths of those that contain layers only."""
    segments = (is_layer[first : first + interval] for first in range(0, len(is_layer), interval))
    return [len(segment) for segment in segments if all(segment)]


@rule("deepspeed.runtime.activation_checkpointing.checkpointing.gather_partitioned_activations", DEEPSPEED)
def segment_all_gathers(job: Job, segments: int) -> list[ExpectedCall]:
    """Return the all_gathers of the inputs of recomputed segments, kept as shards (partition_activations)."""
    if not job.model.partition_activations or not segments:
        return []
    shards = job.tensor if job.model.sequence_parallel else 1
    payload = activation_elements(job) * job.parameter_size // shards
    return [ExpectedCall("all_gather", payload, SEGMENTS, segments, role=ROLE)]


@rule("megatron.mpu.cross_entropy._VocabParallelCrossEntropy.forward", GPT_NEOX)
def loss_all_reduces(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of the loss in fp32: each token's maximum logit, target logit and sum of exponentials."""
    batch, length, _ = batch_dimensions(job)
    return [ExpectedCall("all_reduce", batch * length * element_size("float32"), LOSS, 3, role=ROLE)]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._model_parallel_all_reduce", DEEPSPEED)
def model_parallel_all_reduces(job: Job) -> list[ExpectedCall]:
    """Return ZeRO's all_reduces for overflow check and norms in the model-parallel group, if it has several ranks."""
    if job.tensor == 1:
        return []
    return [replace(call, role=ROLE) for call in (*zero12.overflow_check(job), *zero12.norms(job))]


@rule("deepspeed.runtime.utils.CheckOverflow.has_overflow (with an mpu)", DEEPSPEED)
def fallback_overflow(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of the overflow check without ZeRO: one byte, in 16-bit precision only."""
    return [] if job.row.precision == "fp32" else [ExpectedCall("all_reduce", 1, OVERFLOW, role=ROLE)]


@rule("deepspeed.runtime.utils.clip_grad_norm_ (with an mpu); deepspeed.runtime.utils.get_weight_norm (with an mpu)",
      DEEPSPEED)  # fmt: skip
def fallback_norm(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of 32-bit norms without ZeRO: in fp32 one to clip, in 16 bits one per optimizer group."""
    if job.row.precision == "fp32":
        return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)] if job.row.gradient_clipping > 0 else []
    return [ExpectedCall("all_reduce", 4, NORM, len(job.groups), role=ROLE)]


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.step; deepspeed.runtime.utils.get_global_norm_of_tensors",
      DEEPSPEED)  # fmt: skip
def global_norm() -> list[ExpectedCall]:
    """Return the all_reduce of BF16_Optimizer's norm (32 bits) in the model-parallel group, even without clipping."""
    return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)]


@rule("examples.gpt_neox.tensor_parallel.clip_gradients", WORKLOAD)
def clipping(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of the squared norm of the shards (32 bits), if the program clips gradients under DDP."""
    return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)] if job.clips_gradients else []
