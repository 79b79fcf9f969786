"""Imports of mpiP's reports: calls and sizes by call site and rank, and what a report does not state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpip_reports import mpip_report

import commtrace
from commtrace.errors import ImportFileError
from commtrace.importing.import_run import import_files


def imported(tmp_path: Path, text: str) -> commtrace.Run:
    path = tmp_path / "program.2.4711.1.mpiP"
    path.write_text(text)
    import_files([path], tmp_path / "log", force=True)
    return commtrace.open(tmp_path / "log")


def volumes(run: commtrace.Run) -> dict[str, tuple[int, float]]:
    """Return the number of calls and the payload by operation."""
    rows: Any = run.table("volume_by_operation").itertuples()
    return {row.op: (row.calls, row.payload_bytes) for row in rows}


def blind_spots(run: commtrace.Run) -> str:
    return "\n".join(run.table("blind_spots")["blind_spot"])


def test_calls_and_sizes_of_all_ranks(tmp_path: Path) -> None:
    calls = [("Allreduce", 1, 0, 10, (8, 8, 80)), ("Allreduce", 1, 1, 10, (8, 8, 80)), ("Isend", 2, 1, 3, (9, 1, 12))]
    run = imported(tmp_path, mpip_report(calls))
    assert volumes(run) == {"all_reduce": (20, 160), "send": (3, 12)}
    assert (run.ranks, run.world_size) == ([0, 1], 2)
    assert run.table("message_sizes")[["op", "payload_bytes", "calls"]].to_numpy().tolist() == [["all_reduce", 8, 20]]
    assert run.source == "mpiP (mpip)"
    assert len(run.table("host_time")) == 0
    assert "maximum, mean and minimum" in blind_spots(run)


def test_call_sites(tmp_path: Path) -> None:
    calls = [("Allreduce", 1, 0, 10, (8, 8, 80)), ("Isend", 2, 0, 3, (1, 1, 3))]
    run = imported(tmp_path, mpip_report(calls))
    assert run.table("volume_by_site")["site"].tolist() == ["sweep-mpi.c:24 main", "0x405c08"]


def test_rounded_sizes_are_means(tmp_path: Path) -> None:
    run = imported(tmp_path, mpip_report([("Bcast", 1, 0, 4, ("1.049e+06", "1.049e+06", "4.194e+06"))]))
    assert volumes(run) == {"broadcast": (4, 4_194_000)}
    assert len(run.table("message_sizes")) == 0


@pytest.mark.parametrize("name", ["Allgather", "Alltoallv", "Reduce_scatter", "Igather", "Allgatherv", "Recv"])
def test_bytes_that_are_no_payload_are_missing(tmp_path: Path, name: str) -> None:
    ((calls, payload),) = volumes(imported(tmp_path, mpip_report([(name, 1, 0, 4, (8, 8, 32))]))).values()
    assert (calls, np.isnan(payload)) == (4, True)


def test_barriers_have_no_bytes_and_waits_are_no_calls(tmp_path: Path) -> None:
    run = imported(tmp_path, mpip_report([("Barrier", 1, 0, 4, None), ("Waitall", 2, 0, 9, None)]))
    assert volumes(run) == {"barrier": (4, 0)}
    assert "its calls of Waitall" in blind_spots(run)


def test_impossible_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    text = mpip_report([("Barrier", 1, 0, 4, None), ("Allreduce", 1, 1, 2, (8, 8, "1e99")), ("Bcast", 1, 0, 0, None)])
    run = imported(tmp_path, text)
    assert {op: calls for op, (calls, _) in volumes(run).items()} == {"barrier": 4, "all_reduce": 2}
    assert any("2 lines of its tables" in note.text for note in run.notes)


@pytest.mark.parametrize("text", ["@ mpiP\n", mpip_report([]), "@ mpiP\n@--- Callsites: 1 ---\n x\n"])
def test_a_report_without_statistics_of_ranks_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ImportFileError, match=r"program\.2\.4711\.1\.mpiP.*without -c"):
        imported(tmp_path, text)


def test_calls_without_a_size_have_none(tmp_path: Path) -> None:
    run = imported(tmp_path, mpip_report([("Allreduce", 1, 0, 10, None), ("Allreduce", 2, 0, 5, (8, 8, 40))]))
    ((calls, payload),) = volumes(run).values()
    assert (calls, np.isnan(payload)) == (15, True)
    assert run.table("message_sizes")[["payload_bytes", "calls"]].to_numpy().tolist() == [[8, 5]]
