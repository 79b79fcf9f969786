"""Megatron's tensor parallelism (arXiv 1909.08053) within a data-parallel job: calls among ranks that share a model.

All of them are all_reduces: of activations (b s h elements: micro-batch, sequence, hidden size) where a layer's parts
add up, of one number a token in the loss, and of scalars in the optimizer. Counts are exact: they follow from the
architecture, not from the order of modules.

Assumptions, which no job row contains: every micro-batch has the configured size and length; ranks share the
vocabulary of embedding and loss as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from commtrace.theory.closed_forms import all_reduce, tensor_parallel
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, total_wire_bytes
from commtrace.theory.job import Job, element_size, refuse
from commtrace.theory.rules.deepspeed import zero12
from commtrace.theory.rules.deepspeed.engine import NORM, OVERFLOW
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, TORCH, WORKLOAD, rule
from commtrace.theory.waterfall import cause_bars, level_bars

ROLE: Final = "tensor"
ACTIVATIONS: Final = "activations of tensor-parallel layers"
SEGMENTS: Final = "inputs of recomputed layers"
LOSS: Final = "vocabulary-parallel loss"
FORM: Final = "equation 5: (12 L + 2) b s h (t-1)/t"


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """Add calls among ranks that share a model.

    Raise NotPredictedError if the job does not have the model's architecture, or has one without rules.
    """
    check(job)
    own = (*activation_calls(job), *optimizer_calls(job))
    scheme = f"{data.scheme}, tensor-parallel over {job.tensor}"
    return combine_predictions(job, data, own, WaterfallBar(FORM, form_bytes(job)), _bars(job, own), scheme)


def combine_predictions(
    job: Job,
    data: Prediction,
    own: tuple[ExpectedCall, ...],
    form: WaterfallBar,
    bars: list[WaterfallBar],
    scheme: str,
    others: Mapping[str, int] | None = None,
) -> Prediction:
    """Return the prediction of a job with another parallel dimension beside data parallelism.

    `data` is the prediction for ranks that reduce gradients together, `own` are the calls of a step in the other
    dimension. The waterfall `bars` lead from the closed form to `own`. `others` are the group sizes of other roles,
    where it is not the model that is shared.
    """
    return replace(
        data,
        scheme=scheme,
        start=alone_as_self(job, data.start),
        steps=tuple((*alone_as_self(job, step), *own) for step in data.steps),
        closed_form=WaterfallBar(f"{data.closed_form.label} + {form.label}", data.closed_form.bytes + form.bytes),
        bars=(*data.bars, *(bars if others else [replace(bar, role=ROLE) for bar in bars])),
        skipped=skipped_calls(job, data, own),
        others=others or {ROLE: job.tensor, "self": 1},
        forms=() if others else (data.closed_form, replace(form, role=ROLE)),
    )


def skipped_calls(job: Job, data: Prediction, own: Iterable[ExpectedCall]) -> tuple[tuple[ExpectedCall, ...], ...]:
    """Return `Prediction.skipped` with the norms in the other dimension, where it skips norms."""
    norms = [call for call in own if call.cause == NORM]
    return tuple(
        (*alone_as_self(job, calls), *(norms if any(call.cause == NORM for call in calls) else ()))
        for calls in data.skipped
    )


def check(job: Job) -> None:
    """Raise NotPredictedError for architectures that have no rules yet."""
    job.require_architecture(f"tensor parallelism over {job.tensor} ranks")
    size = job.model("model_parallel_size", 1)
    refuse(
        (size != job.tensor, f"the model is cut for {size} ranks and the engine for {job.tensor}"),
        (job.sequence > 1 or job.context > 1 or job.row.get("moe"),
         "tensor parallelism together with shared sequences or experts has no rules yet"),
        (job.row.get("optimizer") == "FP16_Optimizer",
         "tensor parallelism with DeepSpeed's fused 16-bit optimizer has no rules yet"),
    )  # fmt: skip


def alone_as_self(job: Job, calls: tuple[ExpectedCall, ...]) -> tuple[ExpectedCall, ...]:
    """Return calls with the role "self" where the data-parallel group has one rank: nothing leaves the rank."""
    return calls if job.ranks > 1 else tuple(replace(call, role="self") for call in calls)


def activation_calls(job: Job) -> list[ExpectedCall]:
    """Return what travels through the model in one step."""
    layers = num_layers(job)
    layer_sums = forward_sums(job, layers) + recomputed_sums(job) + backward_sums(layers)
    sums = ExpectedCall("all_reduce", activation_bytes(job), ACTIVATIONS, layer_sums + edge_sums(), role=ROLE)
    calls = [sums, *segment_gathers(job, len(recomputed_segments(job))), *loss_sums(job)]
    return [call.times(job.micro_batches) for call in calls]


def evaluation_calls(job: Job) -> list[ExpectedCall]:
    """Return what travels through the model in a forward pass alone."""
    sums = edge_sums(last=False) + forward_sums(job, num_layers(job))
    return [ExpectedCall("all_reduce", activation_bytes(job), ACTIVATIONS, sums, role=ROLE), *loss_sums(job)]


def optimizer_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of the optimizer in one step."""
    if job.row.get("source") == "ddp":
        return clipping(job)
    if job.row.get("optimizer") == "BF16_Optimizer":
        return global_norm()
    if int(job.fact("zero_stage")) == 0:
        return [*fallback_overflow(job), *fallback_norm(job)]
    return model_parallel_all_reduces(job)


def _bars(job: Job, own: tuple[ExpectedCall, ...]) -> list[WaterfallBar]:
    kept = forward_sums(job, num_layers(job)) + backward_sums(num_layers(job)) + edge_sums(last=False)
    recomputed = kept + recomputed_sums(job)
    sums = {
        "two forward and two backward in each layer": 1 + 4 * num_layers(job),
        "attention and MLP side by side, summed once": kept,
        "activations recomputed": recomputed,
        "the gradient of the head's input": recomputed + edge_sums(first=False),
    }
    bars = activation_bars(job, own, form_bytes(job), sums)
    return [*bars, *cause_bars(own, job.tensor, ACTIVATIONS, prefix="tensor parallelism: ")]


def activation_bars(
    job: Job,
    own: Iterable[ExpectedCall],
    form: Fraction,
    counts: Mapping[str, int],
    name: str = "tensor",
    volume: Callable[[int, int], Fraction] = all_reduce,
) -> list[WaterfallBar]:
    """Return the bars from the bytes of a closed form to the activations of a step.

    `counts` are the collective calls of a micro-batch up to each level, and `volume` is the closed form of such a call.
    """
    sent = volume(activation_elements(job), job.tensor) * job.parameter_size
    levels = {label: count * sent for label, count in counts.items()}
    levels[f"in each of {job.micro_batches} micro-batches"] = job.micro_batches * [*levels.values()][-1]
    levels["sums travel in fp32"] = total_wire_bytes(own, job.tensor, ACTIVATIONS)
    return level_bars(form, {f"{name} parallelism: {label}": level for label, level in levels.items()})


def num_layers(job: Job) -> int:
    """Return the number of transformer layers."""
    return int(job.model("num_layers"))


def form_bytes(job: Job, stages: int = 1) -> Fraction:
    """Return equation 5 in bytes of the parameters' type, for a stage's share of the layers."""
    batch, length, hidden = batch_dimensions(job)
    return tensor_parallel(batch, length, hidden, Fraction(num_layers(job), stages), job.tensor) * job.parameter_size


def batch_dimensions(job: Job) -> tuple[int, int, int]:
    """Return b, s and h: sequences of a micro-batch, their length, the hidden size."""
    names = ("train_micro_batch_size_per_gpu", "seq_length", "hidden_size")
    batch, length, hidden = (int(job.model(name)) for name in names)
    return batch, length, hidden


def activation_elements(job: Job) -> int:
    """Return the elements of one micro-batch's activations between two layers: b s h."""
    batch, length, hidden = batch_dimensions(job)
    return batch * length * hidden


@rule("megatron.mpu.mappings._reduce", GPT_NEOX)
def activation_bytes(job: Job) -> int:
    """A sum of activations has the parameters' type, or fp32 with fp32_allreduce; returned are its bytes."""
    is_wide = bool(job.model("fp32_allreduce", False))
    return activation_elements(job) * (element_size("float32") if is_wide else job.parameter_size)


@rule("megatron.mpu.layers.VocabParallelEmbedding.forward; megatron.model.transformer.ParallelLinear (the head)",
      GPT_NEOX)  # fmt: skip
def edge_sums(first: bool = True, last: bool = True) -> int:
    """The first layer, the embedding, sums once: each token's row comes from one rank.

    The last one, the head, is column-parallel as well: it sums the gradient of its input.
    """
    return first + last


@rule("megatron.mpu.layers.RowParallelLinear.forward; megatron.model.transformer.ParallelTransformerLayer.forward",
      GPT_NEOX)  # fmt: skip
def forward_sums(job: Job, layers: int) -> int:
    """Attention and MLP of each layer sum their outputs; once together where they are side by side (gpt_j_residual)."""
    return layers * (1 if job.model("gpt_j_residual", False) else 2)


@rule("megatron.mpu.layers.ColumnParallelLinear.forward (copy_to_model_parallel_region)", GPT_NEOX)
def backward_sums(layers: int) -> int:
    """Attention and MLP of each layer sum the gradients of their inputs."""
    return layers * 2


@rule("torch.utils.checkpoint.CheckpointFunction; "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (early stop)", TORCH)  # fmt: skip
def recomputed_sums(job: Job) -> int:
    """The second forward pass of the layers repeats their sums.

    Without reentrant autograd it stops as soon as it has what backward needs: before the last sum of each segment of
    layers, unless dropout behind that keeps a mask.
    """
    segments = recomputed_segments(job)
    sums = forward_sums(job, sum(segments))
    if job.model("checkpoint_reentrant", True) or float(job.model("hidden_dropout", 0.0)):
        return sums
    return sums - len(segments)


@rule("megatron.model.utils.SequentialWrapper.forward, _is_checkpointable", GPT_NEOX)
def recomputed_segments(job: Job) -> list[int]:
    """Return the number of layers in each segment of the model that is recomputed.

    GPT-NeoX counts segments from the embedding and the function behind it, and recomputes those of layers only; the
    example counts from the first layer.
    """
    if not job.model("checkpoint_activations", False):
        return []
    before, behind = (2, 3) if job.is_gpt_neox else (0, 0)
    is_layer = [False] * before + [True] * num_layers(job) + [False] * behind
    return layer_segments(is_layer, int(job.model("checkpoint_num_layers", 1)))


def layer_segments(is_layer: Sequence[bool], interval: int) -> list[int]:
    """Return the lengths of the segments of `interval` modules, cut from the first one on, that are all layers."""
    segments = (is_layer[first : first + interval] for first in range(0, len(is_layer), interval))
    return [len(segment) for segment in segments if all(segment)]


@rule("deepspeed.runtime.activation_checkpointing.checkpointing.gather_partitioned_activations", DEEPSPEED)
def segment_gathers(job: Job, segments: int) -> list[ExpectedCall]:
    """With partition_activations ranks keep a part each of the input of a recomputed segment, and gather it."""
    if not job.model("partition_activations", False) or not segments:
        return []
    parts = job.tensor if job.model("sequence_parallel", False) else 1
    payload = activation_elements(job) * job.parameter_size // parts
    return [ExpectedCall("all_gather", payload, SEGMENTS, segments, role=ROLE)]


@rule("megatron.mpu.cross_entropy._VocabParallelCrossEntropy.forward", GPT_NEOX)
def loss_sums(job: Job) -> list[ExpectedCall]:
    """The loss reduces each token's largest logit, its own, and the sum of exponentials, in fp32."""
    batch, length, _ = batch_dimensions(job)
    return [ExpectedCall("all_reduce", batch * length * element_size("float32"), LOSS, 3, role=ROLE)]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._model_parallel_all_reduce", DEEPSPEED)
def model_parallel_all_reduces(job: Job) -> list[ExpectedCall]:
    """ZeRO all_reduces overflow and norms once more, among the ranks that share a model, if these are several."""
    if job.tensor == 1:
        return []
    return [replace(call, role=ROLE) for call in (*zero12.overflow_check(job), *zero12.norms(job))]


@rule("deepspeed.runtime.utils.CheckOverflow.has_overflow (with an mpu)", DEEPSPEED)
def fallback_overflow(job: Job) -> list[ExpectedCall]:
    """Without ZeRO, the overflow check all_reduces a byte in 16 bits."""
    return [] if job.fact("precision") == "fp32" else [ExpectedCall("all_reduce", 1, OVERFLOW, role=ROLE)]


@rule("deepspeed.runtime.utils.clip_grad_norm_ (with an mpu); deepspeed.runtime.utils.get_weight_norm (with an mpu)",
      DEEPSPEED)  # fmt: skip
def fallback_norm(job: Job) -> list[ExpectedCall]:
    """Without ZeRO, clipping all_reduces a 32-bit number in fp32; in 16 bits each of the optimizer's groups has one."""
    if job.fact("precision") == "fp32":
        return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)] if float(job.fact("gradient_clipping")) > 0 else []
    return [ExpectedCall("all_reduce", 4, NORM, len(job.groups), role=ROLE)]


@rule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer.step; deepspeed.runtime.utils.get_global_norm_of_tensors",
      DEEPSPEED)  # fmt: skip
def global_norm() -> list[ExpectedCall]:
    """BF16_Optimizer all_reduces a 32-bit norm among the ranks that share a model, with or without clipping."""
    return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)]


@rule("examples.gpt_neox.tensor_parallel.clip_gradients", WORKLOAD)
def clipping(job: Job) -> list[ExpectedCall]:
    """Under DDP the program clips: it all_reduces the squared norms of the parts, one 32-bit number."""
    return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)] if job.clips_gradients else []
