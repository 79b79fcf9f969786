"""Closed forms: communication volumes from the literature, as published.

Equations 1 to 5 are those of "Demystifying the Communication Characteristics for Distributed
Transformer Models" (arXiv 2408.10197, section III); docs/explanation/theory.md lists where frameworks differ from them.
`hybrid_sharded` names its own source.

Volumes are in elements, for the algorithm that sends least (a ring, or point-to-point). They are exact `Fraction`s,
because a parallel degree need not divide the sizes. The equations have different scopes, which the paper does not
state: 2, 3 and 5 count what one rank sends, 4 is the sum over all stages; 2 and 3 count one optimizer step (with one
micro-batch), 4 and 5 one micro-batch. d, p and t are the numbers of data-parallel ranks, pipeline stages and
tensor-parallel ranks.
"""

from __future__ import annotations

from fractions import Fraction


def parameter_count(vocabulary: int, hidden: int, layers: int, sequence: int) -> int:
    """Return equation 1: the number of parameters of a GPT with untied embeddings and learned positions."""
    return 2 * vocabulary * hidden + sequence * hidden + layers * (12 * hidden**2 + 8 * hidden) + 2 * hidden


def all_reduce(elements: int, ranks: int) -> Fraction:
    """Return the elements that one rank sends in an all_reduce: 2m(d-1)/d for m elements on d ranks."""
    return 2 * all_gather_volume(elements, ranks)


def all_gather_volume(elements: int, ranks: int) -> Fraction:
    """Return the elements that one rank sends in an all_gather, reduce_scatter or reduce: m(d-1)/d."""
    return Fraction(elements * (ranks - 1), ranks)


def data_parallel(parameters: int, ranks: int) -> Fraction:
    """Return equation 2: elements per rank and step under DDP, ZeRO-1 and ZeRO-2.

    The volume of one all_reduce of the gradients: 2P(d-1)/d.
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

    Six all_reduces per layer (two forward, two recomputed, two backward) and one at the embedding.
    """
    return (12 * Fraction(layers) + 2) * batch * sequence * hidden * Fraction(ranks - 1, ranks)


def hybrid_sharded(parameters: int, shards: int, replicas: int) -> Fraction:
    """Return the elements per rank and micro-batch under HSDP (arXiv 2304.11277) with F shards and R replicas.

    3P(F-1)/F within the sharding group, and an all_reduce of P/F gradients among replicas, 2(P/F)(R-1)/R.
    """
    return zero_3(parameters, shards) + Fraction(2 * parameters * (replicas - 1), shards * replicas)
