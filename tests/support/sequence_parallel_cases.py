"""Modes of the sequence-parallel layer, what its ranks report, and the calls that the formulas expect."""

from __future__ import annotations

import functools
from typing import Any

import mpi_ranks

from commtrace.theory.expected_calls import sorted_calls
from examples.mpi_common.expected_calls import sequence_parallel

BATCH, SEQUENCE, HIDDEN, HEADS, FEED_FORWARD = 2, 24, 16, 8, 40


SIZES = ["--batch", "2", "--sequence", "24", "--hidden", "16", "--heads", "8", "--feed-forward", "40"]


COMMON = [*SIZES, "--dtype", "float64", "--check", "--dropout", "0.3", "--warmup", "1", "--iterations", "2"]


ITERATIONS = 3


CASES = {
    (attention, backward, transport): [
        *COMMON, "--attention", attention, "--transport", transport.removeprefix("staged "),
        *([] if backward else ["--forward-only"]),
    ]
    for attention in ("all_gather", "ring", "ulysses")
    for backward, transport in ((True, "mpi"), (False, "mpi"), (True, "staged mpi"), (True, "gloo"))
}  # fmt: skip


Case = tuple[str, bool, str]


@functools.cache
def found(ranks: int) -> dict[Case, list[dict[str, Any]]]:
    """Return what each rank reported for each case; all cases run in one start."""
    cases = [("mpi_sequence_parallel", arguments, "staged" in case[2]) for case, arguments in CASES.items()]
    results = mpi_ranks.run_cases(ranks, cases)
    return dict(zip(CASES, results, strict=True))


def expected(case: Case, ranks: int) -> list[tuple[str, int, int]]:
    """Return the expected calls of one iteration."""
    attention, backward, _ = case
    return sorted_calls(
        sequence_parallel(attention, BATCH, SEQUENCE, HIDDEN, FEED_FORWARD, 8, ranks, backward)
    )  # fmt: skip
