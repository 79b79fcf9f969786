"""Limits of `commtrace check` on exposed communication, overlap and waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from factory import LogFactory, overlapping_training, record
from kineto_traces import KinetoFactory

from commtrace.cli import main


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Return the traces of two ranks: 25 % of the step is exposed, and 50 % of the all_reduce hidden."""
    for rank in range(2):
        trace = KinetoFactory(rank).step(0, 0, 100).call(10, 20, kernels=((250, 100),))
        trace.kernel(200, 100, "gemm", launched=5).kernel(350, 50, "gemm", launched=90)
        trace.write(tmp_path / f"rank{rank}.json")
    return tmp_path


def status_of(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as error:  # from argparse
        return int(str(error.code))


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--max-exposed", "25%"], 0),
        (["--max-exposed", "24.9%"], 1),
        (["--min-overlap", "all_reduce:50%"], 0),
        (["--min-overlap", "all_reduce:50.1%"], 1),
        (["--min-overlap", "all_gather:1%"], 3),
        (["--max-exposed", "30%", "--min-overlap", "all_reduce:60%"], 1),
        (["--max-exposed", "25"], 2),
        (["--max-exposed", "125%"], 2),
        (["--min-overlap", "sum:60%"], 2),
        (["--max-exposed", "25%", "--strict"], 2),
    ],
)
def test_exit_status(traces: Path, options: list[str], status: int) -> None:
    assert status_of(["check", str(traces), *options]) == status


def test_a_log_without_device_times_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LogFactory(tmp_path).process(rank=0).known().write([record()]).stats().add("end", reason="exit")
    assert main(["check", str(tmp_path), "--max-exposed", "20%"]) == 3
    assert "not compared: max-exposed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--max-exposed", "11%"], 0),
        (["--max-exposed", "10.9%"], 1),
        (["--min-overlap", "all_reduce:72.5%"], 0),
        (["--min-overlap", "all_reduce:73%"], 1),
    ],
)
def test_limits_on_a_recorded_log(options: list[str], status: int, tmp_path: Path) -> None:
    overlapping_training(tmp_path, steps=6, waits_after=300)
    assert status_of(["check", str(tmp_path), *options]) == status


@pytest.mark.parametrize(
    ("waits_after", "steps", "status"),
    [
        (300, 20, 0),
        (280, 20, 0),  # 29.7 instead of 32.6 % of the computation can hide it
        (200, 20, 1),  # 19.2 %
        (0, 20, 1),
        (300, 8, 3),  # too few steps
    ],
)
def test_lost_overlap(waits_after: int, steps: int, status: int, tmp_path: Path) -> None:
    overlapping_training(tmp_path / "accepted", steps=20, waits_after=300)
    overlapping_training(tmp_path / "new", steps=steps, waits_after=waits_after)
    accepted = ["--overlap-as", str(tmp_path / "accepted")]
    assert status_of(["check", str(tmp_path / "new"), *accepted]) == status
    assert status_of(["check", str(tmp_path / "new"), *accepted, *accepted]) == status


def test_a_trace_of_one_step_is_not_compared(
    traces: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    overlapping_training(accepted := tmp_path_factory.mktemp("accepted"), steps=20, waits_after=300)
    assert main(["check", str(traces), "--overlap-as", str(accepted)]) == 3
    assert "fewer than 16 steps of this run" in " ".join(capsys.readouterr().out.split())
