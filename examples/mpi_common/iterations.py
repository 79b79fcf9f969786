"""Iterations of an MPI example, their results, and the comparison with one process."""

from __future__ import annotations

import hashlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

import commtrace

from .transports import Transport

TOLERANCE: Final = {"float32": 1e-4, "float64": 1e-10}
"""Largest difference from one process, relative to the largest value of a tensor: the order of sums differs."""


@dataclass
class RankResult:
    """Results of one rank."""

    losses: list[str]
    """Loss of every iteration on this rank, as a hexadecimal float, which is exact."""
    digest: str
    """SHA-256 of the last iteration's results."""
    error: float | None = None
    """Largest relative difference from one process; None if it was not checked."""


def run_iterations(iterate: Callable[[int], torch.Tensor], transport: Transport, number: int) -> list[str]:
    """Run `iterate(step)`, which returns this rank's loss, for each step, and return the losses.

    Every iteration is a step of the trace and begins with a barrier, so that the log of a single rank has step times,
    too. One more step without work ends the last one.
    """
    losses = []
    for step in range(number):
        commtrace.step()
        transport.barrier()
        losses.append(float(iterate(step)).hex())
    commtrace.step()
    transport.barrier()
    return losses


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of tensors."""
    value = hashlib.sha256()
    for tensor in tensors:
        value.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return value.hexdigest()


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    scale = expected.abs().max().item() or 1.0
    return (actual - expected).abs().max().item() / scale


def report(comm: Any, own: RankResult, title: str, options: Namespace) -> int:
    """Print on rank 0 how the run ended.

    Returns:
        The exit status: 1 on rank 0 if the results were checked and differ from those of one process, else 0.
    """
    results: list[RankResult] | None = comm.gather(own)
    if results is None:
        return 0
    print(f"{title}, {len(results)} rank(s), {options.transport}: {options.iterations} iterations")
    errors = [result.error for result in results if result.error is not None]
    if not errors:
        return 0
    limit = TOLERANCE[options.dtype]
    print(f"largest difference from one process: {max(errors):.1e} of the tensor's largest value (limit {limit:.0e})")
    if max(errors) > limit:
        print(f"{title}: error: the results differ from those of one process", file=sys.stderr)
        return 1
    return 0
