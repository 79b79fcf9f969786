"""Traced MPI examples give bit-identical results, and their logs contain exactly the expected calls.

test_sequence_parallel.py and test_encoder.py compare the formulas with calls counted between example and MPI.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mpi_launch
import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import encoder_cases as encoder
import processes
import sequence_parallel_cases as sequence

from commtrace.schema import Flag
from commtrace.theory.expected_calls import ExpectedCall
from examples.mpi_common.expected_calls import model_parallel, pipeline, tensor_parallel

pytestmark = pytest.mark.long

Counts = Counter[tuple[str, int]]


class Case(NamedTuple):
    """Mode of a workload, and the calls of one rank in one iteration."""

    workload: str
    arguments: tuple[str, ...]
    iterations: int
    staged: bool
    messages: Callable[[int, int], list[ExpectedCall]]
    """(ranks, rank) -> calls."""

    def expected(self, ranks: int, rank: int) -> Counts:
        """Return the number of calls of the run by operation and payload in bytes."""
        counts: Counts = Counter()
        for message in self.messages(ranks, rank):
            counts[message.op, message.payload] += message.calls * self.iterations
        return counts


def encoder_mode(name: str) -> Case:
    """Return a mode of encoder_cases.py."""
    arguments = (*encoder.COMMON, *encoder.CASES[name])
    return Case("mpi_encoder", arguments, encoder.STEPS, False, partial(encoder.messages, name))


def layer_mode(case: sequence.Case) -> Case:
    """Return a mode of sequence_parallel_cases.py."""

    def messages(ranks: int, rank: int) -> list[ExpectedCall]:
        return [ExpectedCall(op, size, "", calls) for op, size, calls in sequence.expected(case, ranks)]

    return Case(
        "mpi_sequence_parallel", tuple(sequence.CASES[case]), sequence.ITERATIONS, "staged" in case[2], messages
    )


CASES = {
    **{f"encoder: {name}": encoder_mode(name) for name in encoder.CASES},
    **{f"sequence parallel: {case}": layer_mode(case) for case in sequence.CASES},
}


def wide_encoder(arguments: str, messages: Callable[[int], list[ExpectedCall]]) -> Case:
    """Return a mode of an encoder with one layer per rank; `messages` returns the calls of a rank."""
    options = (*encoder.COMMON, *arguments.split(), "--layers", "8")
    return Case("mpi_encoder", options, encoder.STEPS, False, lambda ranks, rank: messages(rank))


def wide_layer(attention: str) -> Case:
    """Return a mode of a layer with one head per rank."""
    case = layer_mode((attention, True, "mpi"))
    return case._replace(arguments=(*case.arguments, "--heads", "8"))


_SIZES = (8, encoder.BATCH, encoder.SEQUENCE, encoder.MODEL)
_STAGE = (encoder.BATCH, encoder.SEQUENCE, encoder.MODEL, encoder.ELEMENT, 8)
WIDE = {
    "tensor": wide_encoder(
        "--parallel tensor --heads 2", lambda rank: tensor_parallel(*_SIZES, 2, encoder.ELEMENT, 8, True)
    ),
    "model": wide_encoder(
        "--parallel model --heads 8", lambda rank: model_parallel(*_SIZES, 8, encoder.ELEMENT, 8, True)
    ),
    **{
        schedule: wide_encoder(
            f"--parallel pipeline --heads 2 --schedule {schedule} --micro-batches 6",
            lambda rank: pipeline(*_STAGE, rank, True, 6),
        )
        for schedule in ("gpipe", "1f1b")
    },
    **{attention: wide_layer(attention) for attention in ("all_gather", "ring", "ulysses")},
}


class ModeRun(NamedTuple):
    """Untraced and traced results of each rank, and each rank's log."""

    results: list[list[dict[str, Any]]]
    logs: list[processes.Left]


@functools.cache
def run_modes(mpi: str, ranks: int) -> dict[str, ModeRun]:
    """Run all modes in one launch, and return what each gave."""
    modes = CASES if ranks < 8 else WIDE
    cases = [(case.workload, case.arguments, case.staged) for case in modes.values()]
    with tempfile.TemporaryDirectory() as folder:
        result = mpi_launch.succeeds(mpi, "workloads", json.dumps(cases), folder, ranks=ranks, limit=280)
        results = [json.loads(line) for line in result.out.splitlines() if line.startswith("[")]
        logs = [processes.read_all(Path(folder, str(number))) for number in range(len(cases))]
    return {name: ModeRun(*run) for name, run in zip(modes, zip(results, logs, strict=True), strict=True)}


def communicated(log: processes.Left) -> Counts:
    """Count a log's calls by operation and payload, without barriers and objects, which the formulas leave out."""
    ops = {row["id"]: row["op"] for row in log.tables["kinds"]}
    tensors = log.records[log.records["flags"] & int(Flag.OBJECT) == 0]
    rows = ((ops[int(record["kind"])], int(record["payload"])) for record in tensors)
    return Counter(row for row in rows if row[0] != "barrier")


MODES = [
    *((name, 2) for name in CASES),
    *(pytest.param(name, 4, marks=pytest.mark.exhaustive) for name in CASES),
    *(pytest.param(name, 8, marks=pytest.mark.exhaustive) for name in WIDE),
]


@pytest.mark.parametrize(("name", "ranks"), MODES)
def test_results_are_those_without_tracing_bit_for_bit(mpi: str, name: str, ranks: int) -> None:
    for untraced, traced in run_modes(mpi, ranks)[name].results:
        assert traced["digest"] == untraced["digest"]
        assert traced["losses"] == untraced["losses"]


@pytest.mark.parametrize(("name", "ranks"), MODES)
def test_the_log_has_what_the_formula_says(mpi: str, name: str, ranks: int) -> None:
    case, logs = (CASES if ranks < 8 else WIDE)[name], run_modes(mpi, ranks)[name].logs
    assert sorted(log.tables["process"][0]["rank"] for log in logs) == list(range(ranks))
    for log in logs:
        assert log.stats["hook_errors"] == 0, log.stats["first_error"]
        assert log.stats["calls"] == len(log.records)
        assert communicated(log) == case.expected(ranks, log.tables["process"][0]["rank"])
