"""Megatron's sequence parallelism (arXiv 2205.05198) among tensor-parallel ranks: what they send.

Each sum of activations becomes a reduce_scatter and an all_gather of the same b s h elements, of the same bytes: in
front of attention and MLP the parts of the sequence are gathered, behind them sums are scattered, and backward the
other way round. Beside them ranks add up the gradients of parameters that see a part of the sequence each, a few of h
elements, and what tensor parallelism sends in the loss and in the optimizer.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from commtrace.theory.closed_forms import all_gather_volume
from commtrace.theory.expected_calls import (
    ExpectedCall,
    Prediction,
    WaterfallBar,
    cause_bars,
    level_bars,
    total_wire_bytes,
)
from commtrace.theory.job import Job, element_size
from commtrace.theory.rules.deepspeed.engine import parameter_size
from commtrace.theory.rules.registry import GPT_NEOX, TORCH, WORKLOAD, rule

from .tensor_parallel import (
    ACTIVATIONS,
    FORM,
    ROLE,
    activation_bytes,
    activation_elements,
    backward_sums,
    check,
    combine_predictions,
    form_bytes,
    forward_sums,
    loss_sums,
    micro_batches,
    optimizer_calls,
    recomputed_sums,
)

PARTS: Final = "gradients of norms and biases, which see a part of the sequence"


def applies(job: Job) -> bool:
    """Whether the tensor-parallel ranks of a job share the sequence as well."""
    return job.tensor > 1 and bool(job.row.get("model", {}).get("sequence_parallel", False))


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """The prediction of a job, from what it does among ranks that hold the same part of the model.

    Raises NotPredictedError where the job does not have the model's architecture, or has one without rules.
    """
    check(job)
    own = (*activation_calls(job), *optimizer_calls(job))
    scheme = f"{data.scheme}, tensor- and sequence-parallel over {job.tensor}"
    return combine_predictions(job, data, own, WaterfallBar(FORM, form_bytes(job)), _bars(job, own), scheme)


def activation_calls(job: Job) -> list[ExpectedCall]:
    """What travels through the model in one step."""
    steps = micro_batches(job)
    gathers = forward_gathers(job) + recomputed_gathers(job) + gathered_gradients(job)
    scatters = forward_scatters(job) + recomputed_sums(job) + scattered_gradients(job)
    return [
        ExpectedCall("all_gather", gathered_bytes(job), ACTIVATIONS, gathers * steps, role=ROLE),
        ExpectedCall("reduce_scatter", activation_bytes(job), ACTIVATIONS, scatters * steps, role=ROLE),
        *(one.times(steps) for one in (*summed_gradients(job), *loss_sums(job))),
    ]


def _bars(job: Job, own: tuple[ExpectedCall, ...]) -> list[WaterfallBar]:
    layers, steps = int(job.model("num_layers")), micro_batches(job)
    kept = forward_gathers(job) + forward_scatters(job) + gathered_gradients(job) + scattered_gradients(job)
    again = recomputed_gathers(job) + recomputed_sums(job)

    def volume(count: int) -> Fraction:
        """Of so many all_gathers and reduce_scatters, two of which are an all_reduce."""
        return count * all_gather_volume(activation_elements(job), job.tensor) * parameter_size(job)

    levels = {
        "sequence parallelism: in each layer four all_gathers and four reduce_scatters": volume(2 + 8 * layers),
        "sequence parallelism: attention and MLP side by side, scattered once": volume(kept - 2),
        "sequence parallelism: activations recomputed": volume(kept - 2 + again),
        "sequence parallelism: the head's input": volume(kept + again),
        f"sequence parallelism: in each of {steps} micro-batches": steps * volume(kept + again),
        "sequence parallelism: sums travel in fp32": total_wire_bytes(
            (one for one in own if one.cause == ACTIVATIONS), job.tensor
        ),
    }
    rest = [one for one in own if one.cause != ACTIVATIONS]
    return [*level_bars(form_bytes(job), levels), *cause_bars(rest, job.tensor, "sequence parallelism: ")]


# --- rules ----------------------------------------------------------------------------------------------------------


@rule("megatron.mpu.mappings._gather_along_seq_dim", GPT_NEOX)
def gathered_bytes(job: Job) -> int:
    """Bytes of one gathered sequence, of the parameters' type: fp32_allreduce is of sums alone."""
    return activation_elements(job) * parameter_size(job)


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.forward", GPT_NEOX)
def forward_gathers(job: Job) -> int:
    """In front of attention and MLP of each layer, and of the head."""
    return 2 * int(job.model("num_layers")) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.forward", GPT_NEOX)
def forward_scatters(job: Job) -> int:
    """Behind the embedding, and where tensor parallelism alone sums."""
    return 1 + forward_sums(job)


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.backward", GPT_NEOX)
def scattered_gradients(job: Job) -> int:
    """A gathered input's gradient is scattered, the head's included."""
    return backward_sums(job) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.backward", GPT_NEOX)
def gathered_gradients(job: Job) -> int:
    """A scattered output's gradient is gathered, the embedding's included."""
    return forward_scatters(job)


@rule("torch.utils.checkpoint.CheckpointFunction (all_gathers); "
      "torch.utils.checkpoint._checkpoint_without_reentrant_generator (all_gathers)", TORCH)  # fmt: skip
def recomputed_gathers(job: Job) -> int:
    """Both of each layer, whichever way is taken: what is gathered is what backward needs."""
    return 2 * int(job.model("num_layers")) if job.model("checkpoint_activations", False) else 0


@rule("examples.gpt_neox.tensor_parallel.sum_gradients", WORKLOAD)
def summed_gradients(job: Job) -> list[ExpectedCall]:
    """In every backward pass: of weight and bias of each norm, and of the biases behind sums; each by itself."""
    norms, layers = 2, int(job.model("num_layers"))
    count = norms * (2 * layers + 1) + 2 * layers
    size = element_size("float32") if job.model("fp32_allreduce", False) else parameter_size(job)
    return [ExpectedCall("all_reduce", int(job.model("hidden_size")) * size, PARTS, count, role=ROLE)]
