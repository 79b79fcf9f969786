"""Megatron's sequence parallelism (arXiv 2205.05198): calls among the tensor-parallel ranks.

Each sum of activations becomes a reduce_scatter and an all_gather of the same b s h elements, of the same bytes: in
front of attention and MLP the parts of the sequence are gathered, behind them sums are scattered, and backward the
other way round. Ranks also add up the gradients of parameters that see a part of the sequence each, of h elements each,
and make the calls of tensor parallelism in the loss and the optimizer. Assumptions are those of `tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    others = cause_bars(own, job.tensor, tensor.ACTIVATIONS, prefix="sequence parallelism: ")
    bars = [*activation_bars(job, own), *others]
    form = WaterfallBar(tensor.FORM, tensor.form_bytes(job))
    return tensor.combine_predictions(job, data, own, form, bars, scheme)


def activation_calls(job: Job) -> list[ExpectedCall]:
    """Return what travels through the model in one step."""
    gathers = forward_gathers(job) + recomputed_gathers(job) + gathered_gradients(job)
    scatters = forward_scatters(job) + tensor.recomputed_sums(job) + scattered_gradients(job)
    segments = tensor.segment_gathers(job, len(tensor.recomputed_segments(job)))
    calls = [*_passes(job, gathers, scatters), *segments, *summed_gradients(job), *tensor.loss_sums(job)]
    return [call.times(job.micro_batches) for call in calls]


def evaluation_calls(job: Job) -> list[ExpectedCall]:
    """Return what travels through the model in a forward pass alone."""
    return [*_passes(job, forward_gathers(job), forward_scatters(job)), *tensor.loss_sums(job)]


def _passes(job: Job, gathers: int, scatters: int) -> list[ExpectedCall]:
    return [
        ExpectedCall("all_gather", gathered_bytes(job), tensor.ACTIVATIONS, gathers, role=tensor.ROLE),
        ExpectedCall("reduce_scatter", tensor.activation_bytes(job), tensor.ACTIVATIONS, scatters, role=tensor.ROLE),
        *summed_embedding(job),
    ]


def recomputed_gathers(job: Job) -> int:
    """Return the all_gathers of recomputation: both of each layer."""
    return 2 * sum(tensor.recomputed_segments(job))


def activation_bars(job: Job, own: Iterable[ExpectedCall]) -> list[WaterfallBar]:
    """Return the bars from equation 5 to the activations of a step."""
    kept = forward_gathers(job) + forward_scatters(job) + gathered_gradients(job) + scattered_gradients(job)
    kept += 2 * len(summed_embedding(job))  # an all_reduce is as much as two of the others
    recomputed = recomputed_gathers(job) + tensor.recomputed_sums(job)
    counts = {
        "in each layer four all_gathers and four reduce_scatters": 2 + 8 * tensor.num_layers(job),
        "attention and MLP side by side, scattered once": kept - 2,
        "activations recomputed": kept - 2 + recomputed,
        "the head's input": kept + recomputed,
    }
    return tensor.activation_bars(job, own, tensor.form_bytes(job), counts, "sequence", all_gather_volume)


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
    """Each layer scatters where tensor parallelism alone sums; the example's embedding scatters its output, too."""
    return (not job.is_gpt_neox) + tensor.forward_sums(job, tensor.num_layers(job))


@rule("megatron.model.word_embeddings.Embedding.forward; megatron.mpu.layers.VocabParallelEmbedding.forward", GPT_NEOX)
def summed_embedding(job: Job) -> list[ExpectedCall]:
    """The embedding's output is summed, and then each rank takes its part of the sequence."""
    call = ExpectedCall("all_reduce", tensor.activation_bytes(job), tensor.ACTIVATIONS, role=tensor.ROLE)
    return [call] if job.is_gpt_neox else []


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.backward", GPT_NEOX)
def scattered_gradients(job: Job) -> int:
    """The gradient of each gathered input is scattered, the head's included."""
    return tensor.backward_sums(tensor.num_layers(job)) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.backward", GPT_NEOX)
def gathered_gradients(job: Job) -> int:
    """The gradient of each scattered output is gathered, the embedding's included."""
    return 1 + tensor.forward_sums(job, tensor.num_layers(job))


def summed_gradients(job: Job) -> list[ExpectedCall]:
    """Return the sums of gradients of parameters that see a part of the sequence, one by one in every backward pass."""
    size = element_size("float32") if job.model("fp32_allreduce", False) else job.parameter_size
    elements = norm_gradients(job) if job.is_gpt_neox else example_gradients(job)
    return [ExpectedCall("all_reduce", count * size, PARTS, role=tensor.ROLE) for count in elements]


@rule("megatron.model.utils.mark_norms_for_sequence_parallel_grad_sync", GPT_NEOX)
def norm_gradients(job: Job) -> list[int]:
    """Gradients of norms are summed, those of the last norm twice: its wrapper NormPipe counts as a norm as well.

    Returned are their elements.
    """
    norms: dict[str, list[int]] = {}
    for parameter in job.parameters:
        module = parameter.name.rpartition(".")[0]
        last_part = module.rpartition(".")[2]
        # A vector of a layer of the pipeline, which has a number only, is the last norm's.
        if "norm" in last_part or (last_part.isdigit() and len(parameter.shape) == 1):
            norms.setdefault(module, []).append(parameter.elements)
    return [elements for norm in (*norms.values(), [*norms.values()][-1]) for elements in norm]


@rule("examples.gpt_neox.tensor_parallel.sum_gradients", WORKLOAD)
def example_gradients(job: Job) -> list[int]:
    """Weight and bias of each norm are summed, and the biases behind sums; returned are their elements."""
    norms, layers = 2, tensor.num_layers(job)
    return [int(job.model("hidden_size"))] * (norms * (2 * layers + 1) + 2 * layers)
