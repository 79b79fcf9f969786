"""Limits of `commtrace check` on exposed communication, overlap and waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from factory import LogFactory, record
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
