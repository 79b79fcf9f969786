"""Megatron's sequence parallelism (arXiv 2205.05198): calls of the tensor-parallel group.

Each all_reduce of activations becomes a reduce_scatter and an all_gather of the same b s h elements, with the same wire
bytes in total. In the forward pass, the sequence is all_gathered before attention and before the MLP, and their outputs
are reduce_scattered. In the backward pass, the two operations are swapped. Gradients of parameters that are applied to
a sequence shard (h elements each) are all_reduced. Loss, optimizer and assumptions are those of `tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from commtrace.theory.closed_forms import all_gather_volume
from commtrace.theory.expected_calls import ExpectedCall, Prediction, WaterfallBar, cause_bars
from commtrace.theory.job import Job, element_size
from commtrace.theory.rules.registry import GPT_NEOX, WORKLOAD, rule

from . import tensor_parallel
from .tensor_parallel import ACTIVATIONS, ROLE, loss_all_reduces, num_layers, recomputed_all_reduces

SHARD_GRADIENTS: Final = "gradients of norms and biases, which see a part of the sequence"


def extend_prediction(job: Job, prediction: Prediction) -> Prediction:
    """Add the calls of tensor and sequence parallelism to a prediction. Raise errors as `tensor_parallel` does."""
    tensor_parallel.check(job)
    tensor_calls = (*activation_calls(job), *tensor_parallel.optimizer_calls(job))
    scheme = f"{prediction.scheme}, tensor- and sequence-parallel over {job.tensor}"
    others = cause_bars(tensor_calls, job.tensor, ACTIVATIONS, prefix="sequence parallelism: ")
    bars = [*activation_bars(job, tensor_calls), *others]
    form = WaterfallBar(tensor_parallel.FORM, tensor_parallel.form_bytes(job))
    return tensor_parallel.combine_predictions(job, prediction, tensor_calls, form, bars, scheme)


def activation_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of the model's forward and backward passes in one step."""
    all_gathers = forward_all_gathers(job) + recomputed_all_gathers(job) + backward_all_gathers(job)
    reduce_scatters = forward_reduce_scatters(job) + recomputed_all_reduces(job) + backward_reduce_scatters(job)
    passes = _activation_collectives(job, all_gathers, reduce_scatters)
    segments = tensor_parallel.segment_all_gathers(job, len(tensor_parallel.recomputed_segments(job)))
    calls = [*passes, *segments, *gradient_all_reduces(job), *loss_all_reduces(job)]
    return [call.times(job.micro_batches) for call in calls]


def evaluation_calls(job: Job) -> list[ExpectedCall]:
    """Return the calls of one forward pass without a backward pass."""
    forward = _activation_collectives(job, forward_all_gathers(job), forward_reduce_scatters(job))
    return [*forward, *loss_all_reduces(job)]


def _activation_collectives(job: Job, all_gathers: int, reduce_scatters: int) -> list[ExpectedCall]:
    return [
        ExpectedCall("all_gather", all_gather_bytes(job), ACTIVATIONS, all_gathers, role=ROLE),
        ExpectedCall("reduce_scatter", tensor_parallel.activation_bytes(job), ACTIVATIONS, reduce_scatters, role=ROLE),
        *embedding_all_reduce(job),
    ]


def recomputed_all_gathers(job: Job) -> int:
    """Return the number of all_gathers that recomputation repeats: two in each recomputed layer."""
    return 2 * sum(tensor_parallel.recomputed_segments(job))


def activation_bars(job: Job, tensor_calls: Iterable[ExpectedCall]) -> list[WaterfallBar]:
    """Return the waterfall bars from equation 5 to the wire bytes of a step's activations."""
    without_recomputation = forward_all_gathers(job) + forward_reduce_scatters(job)
    without_recomputation += backward_all_gathers(job) + backward_reduce_scatters(job)
    without_recomputation += 2 * len(embedding_all_reduce(job))  # wire bytes of an all_gather and a reduce_scatter
    recomputed = recomputed_all_gathers(job) + recomputed_all_reduces(job)
    counts = {
        "in each layer four all_gathers and four reduce_scatters": 2 + 8 * num_layers(job),
        "attention and MLP side by side, scattered once": without_recomputation - 2,
        "activations recomputed": without_recomputation - 2 + recomputed,
        "the head's input": without_recomputation + recomputed,
    }
    form = tensor_parallel.form_bytes(job)
    return tensor_parallel.activation_bars(job, tensor_calls, form, counts, "sequence", all_gather_volume)


@rule("megatron.mpu.mappings._gather_along_seq_dim", GPT_NEOX)
def all_gather_bytes(job: Job) -> int:
    """Return the bytes of an all_gather of activations, in the parameters' dtype even with fp32_allreduce."""
    return tensor_parallel.activation_elements(job) * job.parameter_size


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.forward", GPT_NEOX)
def forward_all_gathers(job: Job) -> int:
    """Return the number of all_gathers in a forward pass: of the inputs of attention, MLP and head."""
    return 2 * num_layers(job) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.forward", GPT_NEOX)
def forward_reduce_scatters(job: Job) -> int:
    """Return the number of reduce_scatters in a forward pass: of layer outputs, and of the example's embedding."""
    return (not job.is_gpt_neox) + tensor_parallel.forward_all_reduces(job, num_layers(job))


@rule("megatron.model.word_embeddings.Embedding.forward; megatron.mpu.layers.VocabParallelEmbedding.forward", GPT_NEOX)
def embedding_all_reduce(job: Job) -> list[ExpectedCall]:
    """Return the all_reduce of the embedding's output in GPT-NeoX, after which each rank keeps its sequence shard."""
    call = ExpectedCall("all_reduce", tensor_parallel.activation_bytes(job), ACTIVATIONS, role=ROLE)
    return [call] if job.is_gpt_neox else []


@rule("megatron.mpu.mappings._GatherFromSequenceParallelRegion.backward", GPT_NEOX)
def backward_reduce_scatters(job: Job) -> int:
    """Return the number of reduce_scatters in a backward pass: one for the gradient of each all_gathered input."""
    return tensor_parallel.backward_all_reduces(num_layers(job)) + 1


@rule("megatron.mpu.mappings._ReduceScatterToSequenceParallelRegion.backward", GPT_NEOX)
def backward_all_gathers(job: Job) -> int:
    """Return the number of all_gathers in a backward pass: one for the gradient of each layer or embedding output."""
    return 1 + tensor_parallel.forward_all_reduces(job, num_layers(job))


def gradient_all_reduces(job: Job) -> list[ExpectedCall]:
    """Return the all_reduces of gradients of parameters applied to a sequence shard: one each in a backward pass."""
    size = element_size("float32") if job.model.fp32_allreduce else job.parameter_size
    elements = norm_gradients(job) if job.is_gpt_neox else example_gradients(job)
    return [ExpectedCall("all_reduce", count * size, SHARD_GRADIENTS, role=ROLE) for count in elements]


@rule("megatron.model.utils.mark_norms_for_sequence_parallel_grad_sync", GPT_NEOX)
def norm_gradients(job: Job) -> list[int]:
    """Return the number of elements of each norm gradient that GPT-NeoX all_reduces.

    Those of the last norm appear twice, because its wrapper NormPipe is marked as a norm too.
    """
    norms: dict[str, list[int]] = {}
    for parameter in job.parameters:
        module = parameter.name.rpartition(".")[0]
        last_component = module.rpartition(".")[2]
        # A 1-D parameter of a module named by a number only (a pipeline layer) belongs to the final norm.
        if "norm" in last_component or (last_component.isdigit() and len(parameter.shape) == 1):
            norms.setdefault(module, []).append(parameter.elements)
    return [elements for norm in (*norms.values(), [*norms.values()][-1]) for elements in norm]


@rule("examples.gpt_neox.tensor_parallel.sum_gradients", WORKLOAD)
def example_gradients(job: Job) -> list[int]:
    """Return the number of elements of each gradient that the example all_reduces: norms and row-parallel biases."""
    vectors_per_norm, layers = 2, num_layers(job)
    return [job.model.hidden_size] * (vectors_per_norm * (2 * layers + 1) + 2 * layers)
