"""Tensor parallelism (Megatron's, arXiv 1909.08053) within a data-parallel job: what ranks that share a model send.

All of it is all_reduces: of activations (b s h elements, micro-batch by sequence by hidden size) where a layer's parts
add up, of one number a token in the loss, and of scalars in the optimizer. The counts are exact: they follow from the
architecture, not from the order of modules.

Assumed, as the job cannot say it: every micro-batch has the configured size and length; ranks share the vocabulary of
embedding and loss as GPT-NeoX does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Final

from commtrace.theory.closed_forms import all_reduce, tensor_parallel
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, NotPredictedError, element_size
from commtrace.theory.rules.deepspeed.engine import NORM, OVERFLOW, parameter_size
from commtrace.theory.rules.registry import DEEPSPEED, GPT_NEOX, TORCH, WORKLOAD, rule

ROLE: Final = "tensor"
ACTIVATIONS: Final = "activations of tensor-parallel layers"
LOSS: Final = "vocabulary-parallel loss"
FORM: Final = "equation 5: (12 L + 2) b s h (t-1)/t"


def applies(job: Job) -> bool:
    """Whether ranks share a model."""
    return job.tensor > 1


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """The prediction of a tensor-parallel job, from what it does among ranks that hold the same part of the model.

    Raises NotPredictedError where the job does not have the model's architecture, or has one without rules.
    """
    check(job)
    own = (*activation_calls(job), *optimizer_calls(job))
    return combine_predictions(job, data, own, *_bars(job, own), f"{data.scheme}, tensor-parallel over {job.tensor}")


def combine_predictions(
    job: Job,
    data: Prediction,
    own: tuple[ExpectedCall, ...],
    form: WaterfallBar,
    bars: list[WaterfallBar],
    scheme: str,
    others: Mapping[str, int] | None = None,
) -> Prediction:
    """What ranks send that reduce gradients together, and what those send that share a model or a sequence (`own`).

    `others`: sizes of the groups of other roles, if it is not the model that is shared.
    """
    whole = WaterfallBar(f"{data.closed_form.label} + {form.label}", data.closed_form.bytes + form.bytes)
    norms = tuple(one for one in own if one.cause == NORM)
    skipped = tuple(
        (*_of_data(job, messages), *(norms if any(one.cause == NORM for one in messages) else ()))
        for messages in data.skipped
    )
    return replace(
        data,
        scheme=scheme,
        start=_of_data(job, data.start),
        steps=tuple((*_of_data(job, step), *own) for step in data.steps),
        closed_form=whole,
        bars=(*data.bars, *(bars if others else [replace(bar, role=ROLE) for bar in bars])),
        skipped=skipped,
        others=others or {ROLE: job.tensor, "self": 1},
        forms=() if others else (data.closed_form, replace(form, role=ROLE)),
    )


def check(job: Job) -> None:
    """Raise NotPredictedError for architectures that have no rules yet."""
    if "model" not in job.row:
        raise NotPredictedError(
            f"tensor parallelism over {job.tensor} ranks of a model that does not say its architecture (neox_args)"
        )
    if job.model("model_parallel_size", 1) != job.tensor:
        raise NotPredictedError(
            f"the model is cut for {job.model('model_parallel_size', 1)} ranks and the engine for {job.tensor}"
        )
    if job.sequence > 1 or job.context > 1 or job.row.get("moe"):
        raise NotPredictedError("tensor parallelism together with shared sequences or experts has no rules yet")
    if job.row.get("optimizer") == "FP16_Optimizer":
        raise NotPredictedError("tensor parallelism with DeepSpeed's fused 16-bit optimizer has no rules yet")


def _of_data(job: Job, messages: tuple[ExpectedCall, ...]) -> tuple[ExpectedCall, ...]:
    """Of a group with one member the role is `self`: calls are made, and nothing leaves the rank."""
    return messages if job.ranks > 1 else tuple(replace(one, role="self") for one in messages)


def activation_calls(job: Job) -> list[ExpectedCall]:
    """What travels through the model in one step."""
    passes = embedding_sums() + forward_sums(job) + recomputed_sums(job) + backward_sums(job) + head_sums()
    return [
        ExpectedCall("all_reduce", activation_bytes(job), ACTIVATIONS, passes, role=ROLE).times(micro_batches(job)),
        *(one.times(micro_batches(job)) for one in loss_sums(job)),
    ]


def optimizer_calls(job: Job) -> list[ExpectedCall]:
    """What the optimizer compares, in a step."""
    if job.row.get("source") == "ddp":
        return clipping(job)
    if int(job.fact("zero_stage")) == 0:
        return [*fallback_overflow(job), *fallback_norm(job)]
    return [*overflow_checks(job), *norms(job)]


def _bars(job: Job, own: tuple[ExpectedCall, ...]) -> tuple[WaterfallBar, list[WaterfallBar]]:
    layers, steps, form = int(job.model("num_layers")), micro_batches(job), form_bytes(job)

    def volume(count: int) -> Fraction:
        return count * all_reduce(activation_elements(job), job.tensor) * parameter_size(job)

    kept = forward_sums(job) + backward_sums(job) + embedding_sums()
    levels = {
        "tensor parallelism: two forward and two backward in each layer": volume(1 + 4 * layers),
        "tensor parallelism: attention and MLP side by side, summed once": volume(kept),
        "tensor parallelism: activations recomputed": volume(kept + recomputed_sums(job)),
        "tensor parallelism: the gradient of the head's input": volume(kept + recomputed_sums(job) + head_sums()),
        f"tensor parallelism: in each of {steps} micro-batches": steps
        * volume(kept + recomputed_sums(job) + head_sums()),
        "tensor parallelism: sums travel in fp32": total_wire_bytes(
            (one for one in own if one.cause == ACTIVATIONS), job.tensor
        ),
    }
    rest = [one for one in own if one.cause != ACTIVATIONS]
    bars = [*level_bars(form, levels), *cause_bars(rest, job.tensor, "tensor parallelism: ")]
    return WaterfallBar(FORM, form), bars


def form_bytes(job: Job) -> Fraction:
    """Equation 5 in bytes of the parameters' type."""
    batch, length, hidden = batch_dimensions(job)
    return tensor_parallel(batch, length, hidden, int(job.model("num_layers")), job.tensor) * parameter_size(job)


def batch_dimensions(job: Job) -> tuple[int, int, int]:
    """b, s, h: sequences of a micro-batch, their length, the hidden size."""
    names = ("train_micro_batch_size_per_gpu", "seq_length", "hidden_size")
    batch, length, hidden = (int(job.model(name)) for name in names)
    return batch, length, hidden


def activation_elements(job: Job) -> int:
    """Of the activations of one micro-batch between two layers: b s h."""
    batch, length, hidden = batch_dimensions(job)
    return batch * length * hidden


def micro_batches(job: Job) -> int:
    """Of one step; DDP itself does not know."""
    return int(job.model("gradient_accumulation_steps"))


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("megatron.mpu.mappings._reduce", GPT_NEOX)
def activation_bytes(job: Job) -> int:
    """Bytes of one sum of activations, which are of the parameters' type; in fp32 with fp32_allreduce."""
    wide = bool(job.model("fp32_allreduce", False))
    return activation_elements(job) * (element_size("float32") if wide else parameter_size(job))


@rule("megatron.mpu.layers.VocabParallelEmbedding.forward", GPT_NEOX)
def embedding_sums() -> int:
    """Each token's row comes from one rank."""
    return 1


@rule("megatron.mpu.layers.RowParallelLinear.forward; megatron.model.transformer.ParallelTransformerLayer.forward",
      GPT_NEOX)  # fmt: skip
def forward_sums(job: Job) -> int:
    """Behind attention and MLP of each layer; once behind both where they are side by side (gpt_j_residual)."""
    return int(job.model("num_layers")) * (1 if job.model("gpt_j_residual", False) else 2)


@rule("megatron.mpu.layers.ColumnParallelLinear.forward (copy_to_model_parallel_region)", GPT_NEOX)
def backward_sums(job: Job) -> int:
    """Gradients in front of attention and MLP of each layer."""
    return int(job.model("num_layers")) * 2


@rule("megatron.model.transformer.ParallelLinear (the head)", GPT_NEOX)
def head_sums() -> int:
    """The gradient of the head's input: the head is column-parallel as well."""
    return 1


@rule("torch.utils.checkpoint.CheckpointFunction; "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (early stop)", TORCH)  # fmt: skip
def recomputed_sums(job: Job) -> int:
    """Those of the second forward pass of the layers.

    Without reentrant autograd it stops as soon as it has what backward needs: before the last sum of each stretch of
    layers, unless dropout behind that keeps a mask.
    """
    if not job.model("checkpoint_activations", False):
        return 0
    if job.model("checkpoint_reentrant", True) or float(job.model("hidden_dropout", 0.0)):
        return forward_sums(job)
    stretches = ceil(int(job.model("num_layers")) / int(job.model("checkpoint_num_layers", 1)))
    return forward_sums(job) - stretches


@rule("megatron.mpu.cross_entropy._VocabParallelCrossEntropy.forward", GPT_NEOX)
def loss_sums(job: Job) -> list[ExpectedCall]:
    """Of each token the largest logit, its own, and the sum of exponentials, in fp32."""
    batch, length, _ = batch_dimensions(job)
    return [ExpectedCall("all_reduce", batch * length * element_size("float32"), LOSS, 3, role=ROLE)]


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.has_overflow, _model_parallel_all_reduce", DEEPSPEED)
def overflow_checks(job: Job) -> list[ExpectedCall]:
    """The byte once more, among the ranks that share a model."""
    return [ExpectedCall("all_reduce", 1, OVERFLOW, role=ROLE)] if job.fact("check_grad_overflow") else []


@rule("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.get_grad_norm_direct, _model_parallel_all_reduce",
      DEEPSPEED)  # fmt: skip
def norms(job: Job) -> list[ExpectedCall]:
    """The 32-bit number of each of the optimizer's groups once more."""
    return [ExpectedCall("all_reduce", 4, NORM, len(job.groups), role=ROLE)] if job.zero("compute_grad_norm") else []


@rule("deepspeed.runtime.utils.CheckOverflow.has_overflow (with an mpu)", DEEPSPEED)
def fallback_overflow(job: Job) -> list[ExpectedCall]:
    """Without ZeRO a byte, in 16 bits."""
    return [] if job.fact("precision") == "fp32" else [ExpectedCall("all_reduce", 1, OVERFLOW, role=ROLE)]


@rule("deepspeed.runtime.utils.clip_grad_norm_ (with an mpu); deepspeed.runtime.utils.get_weight_norm (with an mpu)",
      DEEPSPEED)  # fmt: skip
def fallback_norm(job: Job) -> list[ExpectedCall]:
    """Without ZeRO a 32-bit number: in fp32 where gradients are clipped, in 16 bits for each group of the optimizer."""
    if job.fact("precision") == "fp32":
        return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)] if float(job.fact("gradient_clipping")) > 0 else []
    return [ExpectedCall("all_reduce", 4, NORM, len(job.groups), role=ROLE)]


@rule("examples.gpt_neox.tensor_parallel.clip_gradients", WORKLOAD)
def clipping(job: Job) -> list[ExpectedCall]:
    """Under DDP the program clips: the squares of the parts, one 32-bit number."""
    return [ExpectedCall("all_reduce", 4, NORM, role=ROLE)] if float(job.model("gradient_clipping", 0.0)) > 0 else []
