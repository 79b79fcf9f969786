"""Equations 1 to 3 of "Demystifying the Communication Characteristics for Distributed Transformer Models"
(arXiv 2408.10197, section III), as they stand. Where they part from what frameworks do is said in docs/theory.md.

Volumes are elements that one rank sends in one optimizer step, by the algorithms that send least; the paper counts one
micro-batch a step. d is the number of data-parallel ranks. `Fraction` keeps them exact: d need not divide anything.
"""

from __future__ import annotations

from fractions import Fraction


def parameter_count(vocabulary: int, hidden: int, layers: int, sequence: int) -> int:
    """Equation 1: parameters (elements) of a GPT with untied embeddings and learned positions."""
    return 2 * vocabulary * hidden + sequence * hidden + layers * (12 * hidden**2 + 8 * hidden) + 2 * hidden


def all_reduce(elements: int, ranks: int) -> Fraction:
    """Elements that one rank sends in an all_reduce of so many."""
    return 2 * shared(elements, ranks)


def shared(elements: int, ranks: int) -> Fraction:
    """Elements that one rank sends in an all_gather, reduce_scatter or reduce of so many (the paper's m(d-1)/d)."""
    return Fraction(elements * (ranks - 1), ranks)


def data_parallel(parameters: int, ranks: int) -> Fraction:
    """Equation 2: elements per rank and step under DDP, ZeRO-1 and ZeRO-2: one all_reduce, or what is equal to it."""
    return 2 * shared(parameters, ranks)


def zero_3(parameters: int, ranks: int) -> Fraction:
    """Equation 3: elements per rank and step under ZeRO-3: two all_gathers of the parameters, one reduce_scatter."""
    return 3 * shared(parameters, ranks)
