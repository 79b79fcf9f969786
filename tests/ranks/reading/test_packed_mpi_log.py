"""Commands give the same results for a log of every kind of mpi4py call and for its packed data set."""

from __future__ import annotations

from pathlib import Path

import mpi_launch
import processes
import pytest
from factory import training
from packed_logs import assert_equal, pack

pytest.importorskip("mpi4py")


@pytest.mark.long
def test_commands_give_equal_results_for_a_packed_log(
    mpi: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    mpi_launch.succeeds(mpi, "calls", tmp_path / "gave", log=log, limit=120)
    training(other, ranks=2)
    assert_equal(log, pack(log), other, capsys)
    processes.clean_shm(tmp_path)
