"""What the MPI workloads share: dropout, tables, and the command that measures scaling."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mpi_ranks
import processes
import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import torch

from examples.mpi_common import ExampleError, TransportError, tables
from examples.mpi_common.dropout import Place, dropout
from examples.mpi_common.options import make_transport
from examples.mpi_common.outcome import Outcome, RankOutcome

pytestmark = mpi_ranks.needs_mpiexec


def test_dropout_does_not_depend_on_the_division() -> None:
    x = torch.ones(4, 6, 10)
    whole = dropout(x, 0.4, 7, Place(0, 0, 6))
    for row in range(4):
        for token in (0, 3):
            part = dropout(x[row : row + 1, token : token + 3], 0.4, 7, Place(row, token, 6))
            assert torch.equal(part, whole[row : row + 1, token : token + 3])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_scales_the_rest(rate: float) -> None:
    x = torch.ones(10, 100, 100)
    kept = dropout(x, rate, 1, Place(0, 0, 100))
    assert (kept == 0).float().mean().item() == pytest.approx(rate, abs=0.01)
    assert kept.max().item() == pytest.approx(1 / (1 - rate))
    # Neither neighbours nor keys depend on each other.
    zero = (kept == 0).flatten().float() - rate
    assert abs((zero[:-1] * zero[1:]).mean().item()) < 0.01
    other = (dropout(x, rate, 2, Place(0, 0, 100)) == 0).flatten().float() - rate
    assert abs((zero * other).mean().item()) < 0.01


@pytest.mark.parametrize("name", ["nccl", "mpi-cuda-aware"])
def test_what_needs_a_gpu_is_refused_without(name: str) -> None:
    with pytest.raises(TransportError, match="on a GPU"):
        make_transport(name, None, torch.device("cpu"))


def outcome(ranks: int, seconds: float, communication: float, cores: int = 8, cpu: float = 1.0) -> Outcome:
    """A run that was not made."""
    parts = {"compute": seconds - communication, "communication": communication}
    traffic = [("all_gather", 1024, 2)] if ranks > 1 else []
    one = RankOutcome("host", cores, seconds, parts, traffic, cpu, [], "")
    return Outcome("test", "all_gather", {"threads": 1, "transport": "mpi"}, 1000, [one] * ranks)


RUNS = [outcome(1, 1.0, 0.0), outcome(2, 0.8, 0.3), outcome(4, 1.25, 1.0)]


def test_the_table_of_scaling() -> None:
    rows = [line.split() for line in tables.scaling(RUNS).splitlines()[1:]]
    assert [row[:5] for row in rows] == [
        ["1", "1.0000", "1.00x", "100%", "1,000"],
        ["2", "0.8000", "1.25x", "62%", "1,250"],
        ["4", "1.2500", "0.80x", "20%", "800"],
    ]
    assert [row[5:] for row in rows][2] == ["0.2500", "1.0000", "0.0000", "2", "KiB"]


def test_where_the_time_went_is_said() -> None:
    two, four = tables.losses_to(RUNS)
    assert two.startswith("2 ranks: 0.3000 s over a perfect division of the work: 0.3000 s communication and waiting.")
    assert "80% of the iteration" in four
    growth = tables.growth(RUNS)
    assert "payload an iteration stays at 2 KiB, while its share of the work falls by a factor of 2" in growth
    assert growth.endswith("grows 2 times.")


def test_shared_cores_are_said() -> None:
    assert tables.taken_cores(RUNS) == []
    (warning,) = tables.taken_cores([outcome(4, 1.0, 0.0, cores=2)])
    assert warning.startswith("4 ranks on one host share 2 cores")


def test_a_busy_machine_is_said() -> None:
    """Unless the transport sleeps while it waits."""
    busy = outcome(1, 1.0, 0.0, cpu=0.6)
    (warning,) = tables.taken_cores([busy])
    assert warning.startswith("1 rank had a core 60% of the time only")
    busy.settings["transport"] = "gloo"
    assert tables.taken_cores([busy]) == []


def test_an_outcome_comes_back_from_its_file(tmp_path: Path) -> None:
    RUNS[1].write(str(tmp_path / "run.json"))
    back = Outcome.read(tmp_path / "run.json")
    assert json.dumps(back.ranks[0].parts) == json.dumps(RUNS[1].ranks[0].parts)
    assert back.tokens == 1000


def test_a_file_that_is_no_outcome_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ExampleError, match=r"run\.json is not what a run writes"):
        Outcome.read(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("workload", "options", "shown"),
    [
        ("mpi_sequence_parallel", ["--sequence", "16", "--hidden", "16", "--heads", "2"], ["0.947", "16,218"]),
        (
            "mpi_encoder",
            ["--batch", "2", "--sequence", "4", "--model", "16", "--hidden", "16", "--heads", "2", "--layers", "2"],
            ["feed-forward"],
        ),
    ],
)
def test_scaling_makes_the_table(workload: str, options: list[str], shown: list[str]) -> None:
    """From nothing but one command."""
    arguments = ["--ranks", "1", "2", "--iterations", "1", "--check", "--dtype", "float64", *options]
    result = processes.run([sys.executable, "-m", f"examples.{workload}.scaling", *arguments], limit=mpi_ranks.LIMIT_S)
    assert result.status == 0, result.out + result.err
    table = result.out.partition("Here (")[2]
    assert [line.split()[0] for line in table.splitlines() if line[:1].isdigit()][:2] == ["1", "2"]
    assert all(text in result.out for text in shown)
