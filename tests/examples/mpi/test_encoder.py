"""The encoder is correct for any number of ranks and any division, and communicates what the formulas predict."""

from __future__ import annotations

import mpi_ranks
import pytest
from encoder_cases import BATCH, CASES, COMMON, ELEMENT, LAYERS, MODEL, SEQUENCE, STEPS, found, messages

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

from commtrace.theory.expected_calls import sorted_calls, total_wire_bytes
from examples.mpi_common import ShapeError
from examples.mpi_common.expected_calls import model_parallel, pipeline, shared_heads, tensor_parallel
from examples.mpi_encoder.layers import EncoderShape
from examples.mpi_encoder.schedules import SCHEDULES, Task

pytestmark = [pytest.mark.long, mpi_ranks.needs_mpiexec]

FOUR = pytest.param(4, marks=pytest.mark.exhaustive)
"""Four ranks, so that cases have several heads per rank or several ranks per head."""


@pytest.mark.parametrize("ranks", [1, 2, FOUR])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_one_process(case: str, ranks: int) -> None:
    """Logits, input gradient, parameters and their gradients after three steps equal those of torch's own layers."""
    for rank in found(ranks)[case]:
        assert rank["error"] < 1e-11


@pytest.mark.parametrize("ranks", [1, 2, FOUR])
@pytest.mark.parametrize("case", [case for case in CASES if "gloo" not in case])
def test_calls_and_bytes_are_those_of_the_formula(case: str, ranks: int) -> None:
    """All calls between the example and MPI are counted; test_traced.py checks those of gloo."""
    for number, rank in enumerate(found(ranks)[case]):
        expected = sorted_calls(messages(case, ranks, number))
        assert [tuple(row) for row in rank["counted"]] == [(op, size, n * STEPS) for op, size, n in expected]


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_losses_are_those_of_one_rank_and_fall(ranks: int) -> None:
    for case in CASES:
        alone = [float.fromhex(loss) for loss in found(1)[case][0]["losses"]]
        if "forward" not in case:
            assert alone[-1] < alone[0]
        last = [float.fromhex(loss) for loss in found(ranks)[case][-1]["losses"]]
        assert last == pytest.approx(alone, rel=1e-11)


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_schedules_make_no_difference_to_the_result(ranks: int) -> None:
    """The 1f1b schedule gives bit-identical results over MPI and over gloo."""
    for rank in range(ranks):
        assert found(ranks)["1f1b"][rank]["digest"] == found(ranks)["1f1b, gloo"][rank]["digest"]


def test_closed_forms() -> None:
    """Wire bytes equal the formulas in docs/mpi-workloads.md; the next test covers ranks that share heads."""
    size = BATCH * SEQUENCE * MODEL * ELEMENT
    sizes = (LAYERS, BATCH, SEQUENCE, MODEL, 8, ELEMENT)
    for n in (2, 4, 8):
        assert total_wire_bytes(tensor_parallel(*sizes, n, True), n) == pytest.approx(8 * size * (n - 1) / n * LAYERS)
        assert total_wire_bytes(model_parallel(*sizes, n, False), n) == total_wire_bytes(
            tensor_parallel(*sizes, n, False), n
        )
        assert total_wire_bytes(model_parallel(*sizes, n, True), n) == pytest.approx(9 * size * (n - 1) / n * LAYERS)
        stages = [pipeline(BATCH, SEQUENCE, MODEL, ELEMENT, n, stage, True, 3) for stage in range(n)]
        assert sum(total_wire_bytes(stage, n) for stage in stages) == 2 * size * (n - 1)


def test_ranks_beyond_the_heads_add_up_scores() -> None:
    assert shared_heads(LAYERS, BATCH, SEQUENCE, 4, ELEMENT, 4, True) == []
    scores = shared_heads(LAYERS, BATCH, SEQUENCE, 4, ELEMENT, 8, True)
    assert sorted_calls(scores) == [("all_reduce", BATCH * SEQUENCE**2 * ELEMENT, 2 * LAYERS)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 4), (4, 1), (4, 2), (4, 8), (8, 5)])
def test_every_micro_batch_goes_forward_and_back_once(schedule: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        tasks = SCHEDULES[schedule](stage, stages, micro_batches)
        assert sorted(tasks) == sorted(Task(way, number) for way in (True, False) for number in range(micro_batches))
        for number in range(micro_batches):
            assert tasks.index(Task(True, number)) < tasks.index(Task(False, number))


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 2), (4, 8), (8, 5)])
def test_1f1b_keeps_few_activations(stages: int, micro_batches: int) -> None:
    """1f1b keeps one micro-batch per stage from this one to the last; gpipe keeps all."""
    for stage in range(stages):
        assert most_kept(SCHEDULES["1f1b"](stage, stages, micro_batches)) == min(stages - stage, micro_batches)
        assert most_kept(SCHEDULES["gpipe"](stage, stages, micro_batches)) == micro_batches


def most_kept(tasks: list[Task]) -> int:
    """Return the largest number of micro-batches that wait for their backward pass."""
    kept = [sum(1 if task.forward else -1 for task in tasks[: end + 1]) for end in range(len(tasks))]
    return max(kept)


@pytest.mark.parametrize(
    ("changes", "parallel", "ranks", "message"),
    [
        ({}, "tensor", 3, r"--heads \(4\) .* the ranks \(3\)"),
        ({}, "model", 6, r"the ranks \(6\) .* the heads \(4\)"),
        ({"model": 20}, "tensor", 8, r"--model \(20\) .* the ranks \(8\)"),
        ({"hidden": 25}, "tensor", 2, r"--hidden \(25\) .* the ranks \(2\)"),
        ({"heads": 3}, "pipeline", 1, r"--model \(16\) .* the heads \(3\)"),
        ({}, "pipeline", 3, r"--layers \(4\) .* the ranks \(3\)"),
        ({"micro_batches": 4}, "pipeline", 2, r"--batch \(6\) .* the micro-batches \(4\)"),
    ],
)
def test_what_does_not_divide_is_said(changes: dict[str, int], parallel: str, ranks: int, message: str) -> None:
    sizes = {"batch": 6, "sequence": 5, "model": 16, "hidden": 24, "heads": 4, "layers": 4, "classes": 3}
    with pytest.raises(ShapeError, match=message):
        EncoderShape(**{**sizes, "micro_batches": 1, **changes}).check(parallel, ranks)


@pytest.mark.exhaustive
def test_eight_ranks() -> None:
    """Results are correct with four ranks per head, one rank per head, and one layer per pipeline stage."""
    cases = [
        ["--parallel", "tensor", "--heads", "2", "--layers", "8"],
        ["--parallel", "model", "--heads", "8", "--layers", "8"],
        ["--parallel", "pipeline", "--heads", "2", "--schedule", "1f1b", "--micro-batches", "6", "--layers", "8"],
    ]
    for ranks in mpi_ranks.run_cases(8, [("mpi_encoder", [*COMMON, *case], False) for case in cases]):
        assert max(rank["error"] for rank in ranks) < 1e-11
