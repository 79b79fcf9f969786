"""Modes of the MPI encoder, what its ranks report, and the calls that the formulas expect."""

from __future__ import annotations

import functools
from typing import Any

import mpi_ranks

from commtrace.theory.expected_calls import ExpectedCall
from examples.mpi_common.expected_calls import model_parallel, pipeline, tensor_parallel

BATCH, SEQUENCE, MODEL, LAYERS, ELEMENT = 6, 5, 16, 4, 8


SIZES = ["--batch", "6", "--sequence", "5", "--model", "16", "--hidden", "24", "--layers", "4", "--classes", "3"]


COMMON = [*SIZES, "--dtype", "float64", "--check", "--dropout", "0.3", "--warmup", "1", "--iterations", "2"]


STEPS = 3


CASES = {
    "tensor": ["--parallel", "tensor", "--heads", "8"],
    "tensor, 3 micro-batches": ["--parallel", "tensor", "--heads", "4", "--micro-batches", "3"],
    "tensor, 2 heads": ["--parallel", "tensor", "--heads", "2"],
    "tensor, 1 head": ["--parallel", "tensor", "--heads", "1"],
    "tensor, forward": ["--parallel", "tensor", "--heads", "2", "--forward-only"],
    "tensor, gloo": ["--parallel", "tensor", "--heads", "2", "--transport", "gloo"],
    "model": ["--parallel", "model", "--heads", "8"],
    "model, 2 heads": ["--parallel", "model", "--heads", "2"],
    "model, forward": ["--parallel", "model", "--heads", "4", "--forward-only"],
    "gpipe": ["--parallel", "pipeline", "--heads", "4", "--micro-batches", "3"],
    "1f1b": ["--parallel", "pipeline", "--heads", "4", "--schedule", "1f1b", "--micro-batches", "3"],
    "1f1b, 6 micro-batches": [
        "--parallel", "pipeline", "--heads", "4", "--schedule", "1f1b", "--micro-batches", "6"
    ],
    "gpipe, forward": ["--parallel", "pipeline", "--heads", "4", "--micro-batches", "2", "--forward-only"],
    "1f1b, gloo": [
        "--parallel", "pipeline", "--heads", "4", "--schedule", "1f1b", "--micro-batches", "3", "--transport", "gloo"
    ],
}  # fmt: skip


def option(name: str, of: str, default: int = 1) -> int:
    """Return the number that an option of a case has."""
    arguments = CASES[of]
    return int(arguments[arguments.index(name) + 1]) if name in arguments else default


@functools.cache
def found(ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank reported for each case; all cases run in one start."""
    results = mpi_ranks.run_cases(
        ranks, [("mpi_encoder", [*COMMON, *arguments], False) for arguments in CASES.values()]
    )
    return dict(zip(CASES, results, strict=True))


def messages(case: str, ranks: int, rank: int) -> list[ExpectedCall]:
    """Return the expected calls of one step of a rank."""
    backward, micro_batches = "--forward-only" not in CASES[case], option("--micro-batches", case)
    if "pipeline" in CASES[case]:
        return pipeline(BATCH, SEQUENCE, MODEL, ELEMENT, ranks, rank, backward, micro_batches)
    formula = model_parallel if "model" in CASES[case] else tensor_parallel
    heads = option("--heads", case)
    return formula(LAYERS, BATCH, SEQUENCE, MODEL, heads, ELEMENT, ranks, backward, micro_batches)
