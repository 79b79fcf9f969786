"""Closed forms of the literature: equations 1 to 5 of arXiv 2408.10197, section III.

The paper is "Demystifying the Communication Characteristics for Distributed Transformer Models".
docs/explanation/theory.md says where they differ from what frameworks do.

Volumes are elements, by the algorithms that send least; the paper counts one micro-batch a step. Their scopes differ,
which the paper does not say: equations 2, 3 and 5 are what one rank sends, equation 4 is the sum over all stages; 2
and 3 are of one optimizer step, 4 and 5 of one micro-batch. d is the number of data-parallel ranks, p of pipeline
stages, t of tensor-parallel ranks. `Fraction` keeps them exact: d need not divide anything.
"""

from __future__ import annotations

from fractions import Fraction


def parameter_count(vocabulary: int, hidden: int, layers: int, sequence: int) -> int:
    """Equation 1: parameters (elements) of a GPT with untied embeddings and learned positions."""
    return 2 * vocabulary * hidden + sequence * hidden + layers * (12 * hidden**2 + 8 * hidden) + 2 * hidden


def all_reduce(elements: int, ranks: int) -> Fraction:
    """Elements that one rank sends in an all_reduce of so many."""
    return 2 * all_gather_volume(elements, ranks)


def all_gather_volume(elements: int, ranks: int) -> Fraction:
    """Elements that one rank sends in an all_gather, reduce_scatter or reduce of so many (the paper's m(d-1)/d)."""
    return Fraction(elements * (ranks - 1), ranks)


def data_parallel(parameters: int, ranks: int) -> Fraction:
    """Equation 2: elements per rank and step under DDP, ZeRO-1 and ZeRO-2: one all_reduce, or what is equal to it."""
    return 2 * all_gather_volume(parameters, ranks)


def zero_3(parameters: int, ranks: int) -> Fraction:
    """Equation 3: elements per rank and step under ZeRO-3: two all_gathers of the parameters, one reduce_scatter."""
    return 3 * all_gather_volume(parameters, ranks)


def pipeline(batch: int, sequence: int, hidden: int, stages: int) -> int:
    """Equation 4: elements that all stages of one pipeline send together for one micro-batch.

    Activations go forward and their gradients back over each of the p-1 boundaries between stages: 2bsh(p-1).
    """
    return 2 * batch * sequence * hidden * (stages - 1)


def tensor_parallel(batch: int, sequence: int, hidden: int, layers: Fraction | int, ranks: int) -> Fraction:
    """Equation 5: elements that one rank sends for one micro-batch, with recomputed activations: (12L+2) bsh (t-1)/t.

    Six all_reduces a layer (two forward, two recomputed, two backward) and one at the embedding.
    """
    return (12 * Fraction(layers) + 2) * batch * sequence * hidden * Fraction(ranks - 1, ranks)


def three_dimensional(
    parameters: int, batch: int, sequence: int, hidden: int, layers: int, degrees: tuple[int, int, int]
) -> Fraction:
    """The 3D rule: equation 5 with L/p layers, and the parts add up. `degrees`: data, pipeline, tensor (d, p, t).

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
