"""Megatron's sequence parallelism (arXiv 2205.05198): calls among the tensor-parallel ranks.

Each sum of activations becomes a reduce_scatter and an all_gather of the same b s h elements, of the same bytes: in
front of attention and MLP the parts of the sequence are gathered, behind them sums are scattered, and backward the
other way round. Ranks also add up the gradients of parameters that see a part of the sequence each, of h elements each,
and make the calls of tensor parallelism in the loss and the optimizer.

Assumed, as for tensor parallelism: every micro-batch has the configured size and length.
"""

from __future__ import annotations

from typing import Final

from commtrace.theory.closed_forms import all_gather_volume
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar
from commtrace.theory.job import Job, element_size
from commtrace.theory.rules.registry import GPT_NEOX, WORKLOAD, rule
from commtrace.theory.waterfall import cause_bars

from . import tensor_parallel as tensor

PARTS: Final = "gradients of norms and biases, which see a part of the sequence"


def extend_prediction(job: Job, data: Prediction) -> Prediction:
    """Add calls among ranks that share a model and the sequence; arguments as in `tensor_parallel`."""
    tensor.check(job)
    own = (*activation_calls(job), *tensor.optimizer_calls(job))
    scheme = f"{data.scheme}, tensor- and sequence-parallel over {job.tensor}"
    return tensor.combine_predictions(
        job, data, own, WaterfallBar(tensor.FORM, tensor.form_bytes(job)), _bars(job, own), scheme
    )


def activation_calls(job: Job) -> list[ExpectedCall]:
    """Return what travels through the model in one step."""
    gathers = forward_gathers(job) + recomputed_gathers(job) + gathered_gradients(job)
    scatters = forward_scatters(job) + tensor.recomputed_sums(job) + scattered_gradients(job)
    calls = [
        ExpectedCall("all_gather", gathered_bytes(job), tensor.ACTIVATIONS, gathers, role=tensor.ROLE),
        ExpectedCall("reduce_scatter", tensor.activation_bytes(job), tensor.ACTIVATIONS, scatters, role=tensor.ROLE),
        *summed_gradients(job),
        *tensor.loss_sums(job),
    ]
    return [call.times(job.micro_batches) for call in calls]


def recomputed_gathers(job: Job) -> int:
    """Return the all_gathers of recomputation: both of each layer."""
    return 2 * tensor.num_layers(job) * tensor.recomputed_passes(job)


def _bars(job: Job, own: tuple[ExpectedCall, ...]) -> list[WaterfallBar]:
    kept = forward_gathers(job) + forward_scatters(job) + gathered_gradients(job) + scattered_gradients(job)
    recomputed = recomputed_gathers(job) + tensor.recomputed_sums(job)
    counts = {
        "in each layer four all_gathers and four reduce_scatters": 2 + 8 * tensor.num_layers(job),
        "attention and MLP side by side, scattered once": kept - 2,
        "activations recomputed": kept - 2 + recomputed,
        "the head's input": kept + recomputed,
    }
    bars = tensor.activation_bars(job, own, tensor.form_bytes(job), counts, "sequence", all_gather_volume)
    return [*bars, *cause_bars(own, job.tensor, tensor.ACTIVATIONS, prefix="sequence parallelism: ")]


@rule("megatron.mpu.mappings._gather_along_seq_dim", GPT_NEOX)
def gathered_bytes(job: Job) -> int:
    """A gathered sequence has the parameters' type, because fp32_allreduce is of sums only; returned are its bytes."""
    return tensor.activation_elements(job) * job.parameter_size


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.forward", GPT_NEOX)
def forward_gathers(job: Job) -> int:
    """Attention and MLP of each layer gather their inputs, and so does the head."""
    return 2 * tensor.num_layers(job) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.forward", GPT_NEOX)
def forward_scatters(job: Job) -> int:
    """The embedding scatters its output, and so does each layer where tensor parallelism alone sums."""
    return 1 + tensor.forward_sums(job, tensor.num_layers(job))


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.backward", GPT_NEOX)
def scattered_gradients(job: Job) -> int:
    """The gradient of each gathered input is scattered, the head's included."""
    return tensor.backward_sums(tensor.num_layers(job)) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.backward", GPT_NEOX)
def gathered_gradients(job: Job) -> int:
    """The gradient of each scattered output is gathered, the embedding's included."""
    return forward_scatters(job)


@rule("examples.gpt_neox.tensor_parallel.sum_gradients", WORKLOAD)
def summed_gradients(job: Job) -> list[ExpectedCall]:
    """Every backward pass sums gradients one by one: weight and bias of each norm, and the biases behind sums."""
    norms, layers = 2, tensor.num_layers(job)
    count = norms * (2 * layers + 1) + 2 * layers
    size = element_size("float32") if job.model("fp32_allreduce", False) else job.parameter_size
    return [ExpectedCall("all_reduce", int(job.model("hidden_size")) * size, PARTS, count, role=tensor.ROLE)]
