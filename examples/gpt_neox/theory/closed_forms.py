"""Closed forms of further schemes: communication volumes from the literature, as published; each names its source.

Conventions are those of `commtrace.theory.closed_forms`: elements, unless the function's name ends in `_bytes`, for the
algorithms that send the fewest bytes. Only the examples' own predictions and tests read them: the rules of
`commtrace.theory` have their own.
"""

from __future__ import annotations

from fractions import Fraction

from commtrace.theory.closed_forms import all_gather_volume, all_reduce


def zero_1_bytes(gradient_bytes: int, parameter_bytes: int, ranks: int) -> Fraction:
    """Return bytes per rank and step under ZeRO-1 (arXiv 1910.02054): reduce_scatter, then all_gather."""
    return all_gather_volume(gradient_bytes, ranks) + all_gather_volume(parameter_bytes, ranks)


def zero_2_bytes(gradient_bytes: int, parameter_bytes: int, ranks: int, micro_batches: int) -> Fraction:
    """Return bytes per rank and step under ZeRO-2: as ZeRO-1, with the reduce_scatter in each of m micro-batches."""
    return micro_batches * all_gather_volume(gradient_bytes, ranks) + all_gather_volume(parameter_bytes, ranks)


def fully_sharded(parameters: int, ranks: int, *, kept: bool = False) -> Fraction:
    """Return elements per rank and micro-batch under ZeRO-3 or FSDP (arXiv 1910.02054).

    Two all_gathers and a reduce_scatter, 3P(n-1)/n; one all_gather fewer if parameters are `kept` from forward to
    backward.
    """
    return (2 if kept else 3) * all_gather_volume(parameters, ranks)


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

    `activation`: S = b s h elements. Two all_reduces forward and two backward, 8S(t-1)/t; two more if activations are
    recomputed, 12S(t-1)/t.
    """
    return (6 if recomputed else 4) * all_reduce(activation, ranks)


def vocabulary_loss_bytes(batch: int, sequence: int, ranks: int) -> Fraction:
    """Return bytes per rank and micro-batch of Megatron's vocabulary-parallel loss: three all_reduces of b s fp32."""
    return 3 * all_reduce(4 * batch * sequence, ranks)


def sequence_layer(activation: int, ranks: int, *, recomputed: bool, gathered_again: bool) -> Fraction:
    """Return elements per rank, layer and micro-batch of Megatron's sequence parallelism (arXiv 2205.05198).

    Each all_reduce of tensor parallelism becomes a reduce_scatter and an all_gather of the same elements; two
    all_gathers more if the gathered inputs of the two column-parallel matrices are not kept for backward.
    """
    again = 2 * all_gather_volume(activation, ranks) if gathered_again else Fraction(0)
    return tensor_layer(activation, ranks, recomputed=recomputed) + again


def pipeline_stage(activation: int, *, micro_batches: int, chunks: int = 1, tensor: int = 1) -> Fraction:
    """Return elements per rank and step of an inner stage of a pipeline (arXiv 2104.04473).

    It sends m activations forward and m gradients back, or v m of each with v chunks of the model per stage; a t-th of
    each if messages are scattered over the tensor-parallel ranks and gathered on arrival.
    """
    return Fraction(2 * micro_batches * chunks * activation, tensor)


def ring_attention(batch: int, sequence: int, width: int, ranks: int, *, wide_gradients: bool = False) -> Fraction:
    """Return elements per rank, layer and micro-batch of ring attention (arXiv 2310.01889).

    `width`: h_kv, key-value heads times head size. A block of keys and values has 2b(s/c)h_kv elements. A rank sends
    c-1 blocks in forward, c-1 in backward, and c-1 of gradients, which count twice if they are accumulated in elements
    of twice the size (`wide_gradients`). Some implementations return gradients to their owner in a c-th step: up to one
    block more.
    """
    block = Fraction(2 * batch * sequence * width, ranks)
    return (4 if wide_gradients else 3) * block * (ranks - 1)


def ulysses_layer(batch: int, sequence: int, hidden: int, ranks: int, *, key_share: Fraction = Fraction(1)) -> Fraction:
    """Return elements per rank, layer and micro-batch of DeepSpeed Ulysses, forward and backward (arXiv 2309.14509).

    One all_to_all each of queries, keys, values and the output, b(s/n)h elements, in forward and again in backward.
    `key_share`: key-value heads / heads, 1 without grouped queries.
    """
    tensors = 2 + 2 * key_share
    return 2 * tensors * Fraction(batch * sequence * hidden, ranks) * Fraction(ranks - 1, ranks)


def expert_layer(tokens: int, hidden: int, chosen: int, ranks: int) -> Fraction:
    """Return elements per rank, layer and micro-batch of DeepSpeed's mixture of experts, over E ranks.

    Four all_to_alls (dispatch and combine, forward and backward) of k T h each: T tokens of this rank, k experts for
    each, evenly routed. If experts have a capacity, padding counts.
    """
    return 4 * all_gather_volume(chosen * tokens * hidden, ranks)


def gathered_keys(batch: int, sequence: int, hidden: int, ranks: int) -> Fraction:
    """Return elements per rank and layer, forward, of sequence parallelism that gathers keys and values."""
    return 2 * all_gather_volume(batch * sequence * hidden, ranks)
