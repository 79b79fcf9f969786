"""Closed forms: communication volumes from the literature, as published.

Equations 1 to 5 and the 3D rule are those of "Demystifying the Communication Characteristics for Distributed
Transformer Models" (arXiv 2408.10197, section III); docs/explanation/theory.md lists where frameworks differ from them.
The other forms name their sources.

Volumes are elements, unless the function's name ends in `_bytes`, for the algorithms that send least (a ring, or
point-to-point). They are exact `Fraction`s, because no parallel degree has to divide anything. Scopes of the paper's
equations differ, which the paper does not state: 2, 3 and 5 count what one rank sends, 4 is the sum over all stages; 2
and 3 count one optimizer step (with one micro-batch), 4 and 5 one micro-batch. d is the number of data-parallel ranks,
p of pipeline stages, t of tensor-parallel ranks.
"""

from __future__ import annotations

from fractions import Fraction


def parameter_count(vocabulary: int, hidden: int, layers: int, sequence: int) -> int:
    """Return equation 1: parameters (elements) of a GPT with untied embeddings and learned positions."""
    return 2 * vocabulary * hidden + sequence * hidden + layers * (12 * hidden**2 + 8 * hidden) + 2 * hidden


def all_reduce(elements: int, ranks: int) -> Fraction:
    """Return the elements that one rank sends in an all_reduce: 2m(d-1)/d for m elements on d ranks."""
    return 2 * all_gather_volume(elements, ranks)


def all_gather_volume(elements: int, ranks: int) -> Fraction:
    """Return the elements that one rank sends in an all_gather, reduce_scatter or reduce: m(d-1)/d."""
    return Fraction(elements * (ranks - 1), ranks)


def data_parallel(parameters: int, ranks: int) -> Fraction:
    """Return equation 2: elements per rank and step under DDP, ZeRO-1 and ZeRO-2.

    One all_reduce of the parameters' gradients, or the same volume: 2P(d-1)/d.
    """
    return 2 * all_gather_volume(parameters, ranks)


def zero_3(parameters: int, ranks: int) -> Fraction:
    """Return equation 3: elements per rank and step under ZeRO-3.

    Two all_gathers of the parameters and one reduce_scatter of their gradients: 3P(d-1)/d.
    """
    return 3 * all_gather_volume(parameters, ranks)


def pipeline(batch: int, sequence: int, hidden: int, stages: int) -> int:
    """Return equation 4: elements that all stages of a pipeline send together for one micro-batch.

    Activations go forward and their gradients back over each of the p-1 boundaries between stages: 2bsh(p-1).
    """
    return 2 * batch * sequence * hidden * (stages - 1)


def tensor_parallel(batch: int, sequence: int, hidden: int, layers: Fraction | int, ranks: int) -> Fraction:
    """Return equation 5: elements per rank and micro-batch with recomputed activations, (12L+2) bsh (t-1)/t.

    Six all_reduces a layer (two forward, two recomputed, two backward) and one at the embedding.
    """
    return (12 * Fraction(layers) + 2) * batch * sequence * hidden * Fraction(ranks - 1, ranks)


def three_dimensional(
    parameters: int, batch: int, sequence: int, hidden: int, layers: int, degrees: tuple[int, int, int]
) -> Fraction:
    """Return the 3D rule: equations 2, 4 and 5 with L/p layers, added up; degrees are (data, pipeline, tensor).

    Elements, for one micro-batch a step; as the paper adds them, although its parts have different scopes: equation 2
    of all parameters and equation 5 are of one rank, equation 4 is of all stages. docs/explanation/theory.md says what
    a rank really holds (P/(tp) parameters) and sends.
    """
    data, stages, tensor = degrees
    return (
        data_parallel(parameters, data)
        + pipeline(batch, sequence, hidden, stages)
        + tensor_parallel(batch, sequence, hidden, Fraction(layers, stages), tensor)
    )


# --- further schemes ---


def zero_1_bytes(gradient_bytes: int, parameter_bytes: int, ranks: int) -> Fraction:
    """Return bytes per rank and step under ZeRO-1 (arXiv 1910.02054): reduce_scatter, then all_gather."""
    return all_gather_volume(gradient_bytes, ranks) + all_gather_volume(parameter_bytes, ranks)


def zero_2_bytes(gradient_bytes: int, parameter_bytes: int, ranks: int, micro_batches: int) -> Fraction:
    """Return bytes per rank and step under ZeRO-2: as ZeRO-1, with the reduce_scatter in each of m micro-batches."""
    return micro_batches * all_gather_volume(gradient_bytes, ranks) + all_gather_volume(parameter_bytes, ranks)


def fully_sharded(parameters: int, ranks: int, *, kept: bool = False) -> Fraction:
    """Return elements per rank and micro-batch under ZeRO-3 or FSDP (arXiv 1910.02054).

    Two all_gathers and a reduce_scatter, 3P(n-1)/n; one all_gather less where parameters are `kept` from forward to
    backward.
    """
    return (2 if kept else 3) * all_gather_volume(parameters, ranks)


def hybrid_sharded(parameters: int, shards: int, replicas: int) -> Fraction:
    """Return elements per rank and micro-batch under HSDP (arXiv 2304.11277): F shards, R replicas.

    3P(F-1)/F within the group of shards, and an all_reduce of P/F gradients among replicas, 2(P/F)(R-1)/R.
    """
    return fully_sharded(parameters, shards) + Fraction(2 * parameters * (replicas - 1), shards * replicas)


def zero_plus_plus_bytes(parameters: int, size: int, ranks: int, node: int) -> dict[str, Fraction]:
    """Return bytes per rank and micro-batch of each part of ZeRO++ (arXiv 2306.10209), without quantization scales.

    "qwZ": the forward all_gather in INT8. "hpZ": the backward all_gather within a node of `node` ranks, at full
    precision. "qgZ": gradients in INT4 by all_to_all: within the node, then between nodes. `size`: bytes of a
    parameter's element.
    """
    nodes = Fraction(ranks, node)
    within = all_gather_volume(parameters, node) / 2
    between = Fraction(parameters, node) * (nodes - 1) / nodes / 2
    return {
        "qwZ": all_gather_volume(parameters, ranks),
        "hpZ": all_gather_volume(parameters * size, node),
        "qgZ": within + between,
    }


def tensor_layer(activation: int, ranks: int, *, recomputed: bool) -> Fraction:
    """Return elements per rank, layer and micro-batch of Megatron's tensor parallelism (arXiv 1909.08053).

    `activation`: elements of b s h. Two all_reduces forward and two backward, 8S(t-1)/t; two more where activations are
    recomputed, 12S(t-1)/t.
    """
    return (6 if recomputed else 4) * all_reduce(activation, ranks)


def vocabulary_loss_bytes(batch: int, sequence: int, ranks: int) -> Fraction:
    """Return bytes per rank and micro-batch of Megatron's vocabulary-parallel loss: three all_reduces of b s fp32."""
    return 3 * all_reduce(4 * batch * sequence, ranks)


def sequence_layer(activation: int, ranks: int, *, recomputed: bool, gathered_again: bool) -> Fraction:
    """Return elements per rank, layer and micro-batch of Megatron's sequence parallelism (arXiv 2205.05198).

    Each all_reduce of tensor parallelism becomes a reduce_scatter and an all_gather, the same elements; where the
    gathered inputs of the two column-parallel matrices are not kept for backward, two all_gathers more.
    """
    again = 2 * all_gather_volume(activation, ranks) if gathered_again else Fraction(0)
    return tensor_layer(activation, ranks, recomputed=recomputed) + again


def pipeline_stage(activation: int, *, micro_batches: int, chunks: int = 1, tensor: int = 1) -> Fraction:
    """Return elements per rank and step of an inner stage of a pipeline (arXiv 2104.04473).

    It sends m activations forward and as many gradients back, v times as many with v chunks of the model a stage; a
    t-th of each where the message is scattered over the tensor-parallel ranks and gathered on arrival.
    """
    return Fraction(2 * micro_batches * chunks * activation, tensor)


def ring_attention(batch: int, sequence: int, width: int, ranks: int, *, wide_gradients: bool = False) -> Fraction:
    """Return elements per rank, layer and micro-batch of ring attention (arXiv 2310.01889).

    `width`: of keys (key-value heads times the head's size). A block of keys and values is 2b(s/c)h_kv: c-1 blocks are
    passed on forward, c-1 again backward, beside as many of their gradients; twice those where gradients are
    accumulated in elements of twice the size (`wide_gradients`). Some implementations return gradients to their
    owner in a c-th step: up to one block more.
    """
    block = Fraction(2 * batch * sequence * width, ranks)
    return (4 if wide_gradients else 3) * block * (ranks - 1)


def ulysses_layer(batch: int, sequence: int, hidden: int, ranks: int, *, key_share: Fraction = Fraction(1)) -> Fraction:
    """Return elements per rank, layer and micro-batch of DeepSpeed Ulysses, forward and backward (arXiv 2309.14509).

    all_to_all of queries, keys, values and the output, of b(s/n)h each, forward and again backward. `key_share`:
    key-value heads by heads, 1 without grouped queries.
    """
    tensors = 2 + 2 * key_share
    return 2 * tensors * Fraction(batch * sequence * hidden, ranks) * Fraction(ranks - 1, ranks)


def expert_layer(tokens: int, hidden: int, chosen: int, ranks: int) -> Fraction:
    """Return elements per rank, layer and micro-batch of DeepSpeed's mixture of experts, over E ranks.

    Four all_to_alls (dispatch and combine, forward and backward) of k T h each: T tokens of this rank, k experts for
    each, evenly routed. Where experts have a capacity, what it pads counts.
    """
    return 4 * all_gather_volume(chosen * tokens * hidden, ranks)


def gathered_keys(batch: int, sequence: int, hidden: int, ranks: int) -> Fraction:
    """Return elements per rank and layer, forward, of sequence parallelism that gathers keys and values."""
    return 2 * all_gather_volume(batch * sequence * hidden, ranks)
