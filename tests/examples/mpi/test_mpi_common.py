"""Shared code of the MPI examples: dropout, transports, and the scaling command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mpi_ranks
import processes
import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import torch

import commtrace
from commtrace.analyses.scaling.scaling_tables import scaling
from examples.mpi_common import TransportError
from examples.mpi_common.dropout import Place, dropout
from examples.mpi_common.options import make_transport

pytestmark = mpi_ranks.needs_mpiexec


def test_dropout_does_not_depend_on_the_division() -> None:
    x = torch.ones(4, 6, 10)
    full = dropout(x, 0.4, 7, Place(0, 0, 6))
    for row in range(4):
        for token in (0, 3):
            slice_ = dropout(x[row : row + 1, token : token + 3], 0.4, 7, Place(row, token, 6))
            assert torch.equal(slice_, full[row : row + 1, token : token + 3])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_scales_the_rest(rate: float) -> None:
    x = torch.ones(10, 100, 100)
    kept = dropout(x, rate, 1, Place(0, 0, 100))
    assert (kept == 0).float().mean().item() == pytest.approx(rate, abs=0.01)
    assert kept.max().item() == pytest.approx(1 / (1 - rate))
    # Neighbouring elements are uncorrelated, and so are different keys.
    zero = (kept == 0).flatten().float() - rate
    assert abs((zero[:-1] * zero[1:]).mean().item()) < 0.01
    other = (dropout(x, rate, 2, Place(0, 0, 100)) == 0).flatten().float() - rate
    assert abs((zero * other).mean().item()) < 0.01


@pytest.mark.parametrize("name", ["nccl", "mpi-cuda-aware"])
def test_what_needs_a_gpu_is_refused_without(name: str) -> None:
    with pytest.raises(TransportError, match="on a GPU"):
        make_transport(name, None, torch.device("cpu"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("example", "options", "published"),
    [
        ("mpi_sequence_parallel", ["--sequence", "16", "--hidden", "16", "--heads", "2"], "16,218"),
        (
            "mpi_encoder",
            ["--batch", "2", "--sequence", "8", "--model", "16", "--hidden", "16", "--heads", "2", "--layers", "2"],
            "8 heads",
        ),
    ],
)
def test_scaling_compares_traced_runs(example: str, options: list[str], published: str, tmp_path: Path) -> None:
    arguments = ["--nproc", "1", "2", "--iterations", "2", "--check", "--dtype", "float64", "--out", str(tmp_path)]
    program = [sys.executable, "-m", f"examples.{example}.scaling", *arguments, *options]
    result = processes.run(program, limit=mpi_ranks.LIMIT_S)
    assert result.status == 0, result.out + result.err
    assert published in result.out
    assert result.out.count("largest difference from one process") == 2
    runs = {name: commtrace.open(tmp_path / name) for name in ("ranks-1", "ranks-2")}
    table: Any = scaling(runs, [16])["scaling"].set_index("ranks")
    assert table["steps"].tolist() == [2, 2], "warm-up and the end are left out"
    assert table.loc[1, "payload_bytes"] == 0
    assert table.loc[2, "payload_bytes"] > 0
    assert table["tokens_per_s"].gt(0).all()


@pytest.mark.exhaustive
def test_a_run_that_fails_gives_its_status() -> None:
    program = [sys.executable, "-m", "examples.mpi_encoder.scaling", "--nproc", "2", "--hidden", "25"]
    result = processes.run(program, limit=mpi_ranks.LIMIT_S)
    assert result.status == 2
    assert "--hidden (25) cannot be divided equally among the ranks (2)" in result.err
