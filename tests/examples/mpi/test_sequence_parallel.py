"""The sequence-parallel layer is correct for any ranks and attention, and communicates what the formulas predict."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mpi_ranks
import pytest
from sequence_parallel_cases import (
    BATCH,
    CASES,
    FEED_FORWARD,
    HIDDEN,
    ITERATIONS,
    SEQUENCE,
    Case,
    expected,
    found,
)

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

from commtrace.theory.expected_calls import total_wire_bytes
from examples.mpi_common.expected_calls import layer_parameters, sequence_parallel
from examples.mpi_sequence_parallel.layer import SequenceShape

pytestmark = mpi_ranks.needs_mpiexec

FOUR = pytest.param(4, marks=pytest.mark.exhaustive)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, FOUR])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_one_process(case: Case, ranks: int) -> None:
    """Output and gradients of input and parameters, dropout included, equal those of torch's own layer."""
    for rank in found(ranks)[case]:
        assert rank["error"] < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, FOUR])
@pytest.mark.parametrize("case", [case for case in CASES if case[2] != "gloo"], ids=str)
def test_calls_and_bytes_are_those_of_the_formula(case: Case, ranks: int) -> None:
    """All calls between the example and MPI are counted; test_traced.py checks those of gloo."""
    for rank in found(ranks)[case]:
        calls = [(op, payload, calls * ITERATIONS) for op, payload, calls in expected(case, ranks)]
        assert [tuple(row) for row in rank["counted"]] == calls


@pytest.mark.parametrize("ranks", [2, FOUR])
@pytest.mark.parametrize("attention", ["all_gather", "ring", "ulysses"])
def test_copies_through_host_memory_change_nothing(attention: str, ranks: int) -> None:
    """Without a GPU nothing is copied, but the code path is the same."""
    runs = found(ranks)
    for staged, direct in zip(runs[attention, True, "staged mpi"], runs[attention, True, "mpi"], strict=True):
        assert staged["digest"] == direct["digest"]


def losses_of(ranks: list[dict[str, Any]]) -> list[float]:
    """Return the loss of each iteration, summed over all ranks."""
    return [sum(map(float.fromhex, losses)) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_losses_add_up_to_that_of_one_rank(ranks: int) -> None:
    """This holds in every iteration, and each iteration has its own dropout."""
    for case in CASES:
        alone = losses_of(found(1)[case])
        assert losses_of(found(ranks)[case]) == pytest.approx(alone, rel=1e-12)
        assert len(set(alone)) == ITERATIONS


def test_closed_forms() -> None:
    """Wire bytes of the attention equal the formulas in docs/mpi-workloads.md."""
    b, s, h, e = BATCH, SEQUENCE, HIDDEN, 8
    for n in (2, 4, 8):
        gradients = 2 * layer_parameters(h, FEED_FORWARD) * e * (n - 1) / n
        for attention, forward, both in (
            ("all_gather", 2 * b * s * h * e * (n - 1) / n, 4 * b * s * h * e * (n - 1) / n),
            ("ulysses", 4 * b * s * h * e * (n - 1) / n**2, 8 * b * s * h * e * (n - 1) / n**2),
            ("ring", 2 * b * s * h * e * (n - 1) / n, 6 * b * s * h * e * (n - 1) / n),
        ):
            sizes = (attention, b, s, h, FEED_FORWARD, e, n)
            assert total_wire_bytes(sequence_parallel(*sizes, False), n) == pytest.approx(forward)
            assert total_wire_bytes(sequence_parallel(*sizes, True), n) == pytest.approx(both + gradients)


@pytest.mark.parametrize(
    ("attention", "mebibytes"),
    [("all_gather", (320, 480, 560)), ("ring", (320, 480, 560)), ("ulysses", (320, 240, 140))],
)
def test_what_the_original_configuration_sends(attention: str, mebibytes: tuple[int, ...]) -> None:
    """The sizes are those of the table in docs/mpi-workloads.md."""
    for ranks, size in zip((2, 4, 8), mebibytes, strict=True):
        calls = sequence_parallel(attention, 4, 4096, 5120, 4 * 5120, 4, ranks, backward=False)
        assert total_wire_bytes(calls, ranks) == size * 2**20


def test_parameters_are_counted_right() -> None:
    assert layer_parameters(64, 256) == 12 * 64**2 + 13 * 64


@pytest.mark.parametrize(
    ("shape", "ranks", "attention", "message"),
    [
        (SequenceShape(2, 10, 16, 4, 64), 4, "all_gather", r"--sequence \(10\) .* the ranks \(4\)"),
        (SequenceShape(2, 12, 16, 4, 64), 3, "ulysses", r"--heads \(4\) .* the ranks \(3\); --attention ring"),
        (SequenceShape(2, 12, 18, 4, 64), 1, "ring", r"--hidden \(18\) .* --heads \(4\)"),
    ],
)
def test_what_does_not_divide_is_said(shape: SequenceShape, ranks: int, attention: str, message: str) -> None:
    from examples.mpi_common import ShapeError

    with pytest.raises(ShapeError, match=message):
        shape.check(ranks, attention)


def test_one_rank_says_what_is_impossible() -> None:
    """Wrong sizes and wrong options are reported once, and all ranks exit with a nonzero status."""
    code = (
        "import sys; from examples.mpi_sequence_parallel.__main__ import main\n"
        "statuses = [main(arguments.split()) for arguments in ('--sequence 7', '--attention none')]\n"
        "sys.exit(statuses[0] if statuses == [2, 2] else 1)"
    )
    result = mpi_ranks.mpiexec(2, "-c", code)
    assert result.status == 2, result.err
    assert result.err.count("error: ") == 2


def test_an_exception_on_one_rank_ends_all() -> None:
    code = (
        "import sys; from examples.mpi_common import program\n"
        "def work(argv, comm):\n"
        "    if comm.Get_rank() == 1: raise KeyError('only here')\n"
        "    comm.Barrier()\n"
        "sys.exit(program.run('test', work, []))"
    )
    result = mpi_ranks.mpiexec(2, "-c", code)
    assert result.status not in (0, None)
    assert "only here" in result.err


@pytest.mark.long
def test_counter_is_not_empty() -> None:
    """The runs compared above made calls of every kind."""
    counts = Counter(op for case in CASES for op, _, _ in found(4)[case][0]["counted"])
    assert set(counts) == {"all_gather", "reduce_scatter", "all_to_all", "all_reduce", "send", "recv"}
