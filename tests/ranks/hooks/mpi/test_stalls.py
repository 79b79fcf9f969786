"""What ranks of mpi4py programs do that make no progress: their lines, and the calls in which others wait for them."""

from __future__ import annotations

from pathlib import Path

import mpi_launch
import pandas as pd
import processes
import pytest
from stalled_ranks import KINDS, assert_two_culprits, places_of

from commtrace.analyses.across_ranks.culprits import find_culprits
from commtrace.analyses.across_ranks.stuck_calls_section import diagnosis
from commtrace.cli import main
from commtrace.errors import LogError
from commtrace.reading import live_processes
from commtrace.run import open_run

DEFAULT = ("lock", "stopped")

pytestmark = pytest.mark.usefixtures("short_waits")


def hang_tables(log: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of hangs; none before there is a log."""
    try:
        run = open_run(log)
    except LogError:
        return {}
    return {name: run.table(name) for name in ("stuck_calls", "stuck_ranks", "stalled_threads")}


def is_named(kind: str, size: int, tables: dict[str, pd.DataFrame]) -> bool:
    """Return whether it is known what rank 1 does, at which line, and the call in which the others wait for it."""
    try:
        assert_named(kind, size, tables)
    except (AssertionError, KeyError, ValueError):
        return False
    return True


def assert_named(kind: str, size: int, tables: dict[str, pd.DataFrame]) -> None:
    threads = tables["stalled_threads"]
    main_threads = threads[threads["is_main"]].set_index("rank")
    activity, function = KINDS[kind]
    row = main_threads.loc[1]
    assert row["activity"] == activity
    if places := places_of(kind):
        assert row["line"] in places
        assert not row["in_call"]
        assert row["function"].rpartition(" ")[2].rpartition(".")[2] == function
    if kind == "all":
        assert [*main_threads.index] == [*range(size)]
        assert not len(tables["stuck_calls"])
        return
    (call,) = tables["stuck_calls"].itertuples()
    assert (call.op, call.seq, call.absent_ranks) == ("all_reduce", 5, "1")
    text = " ".join(diagnosis(tables))
    assert "rank 1 did not enter it" in text
    assert activity in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=() if kind in DEFAULT and size == 2 else pytest.mark.exhaustive)
        for kind in KINDS
        for size in (2, 5)
    ],
)
def test_a_rank_that_makes_no_progress(
    kind: str, size: int, mpi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_processes, "SILENT_NS", 10**9)
    log, program = tmp_path / "log", processes.PROGRAMS / "stalled.py"
    with mpi_launch.started(mpi, program, kind, 1, "mpi", ranks=size, log=log, COMMTRACE_STALL_SECONDS=0.5):
        processes.wait_for(lambda: is_named(kind, size, hang_tables(log)), 60)
        main(["check", str(log)])
    out = " ".join(capsys.readouterr().out.split())
    assert KINDS[kind][0] in out
    assert ("IndexError" in out) == (kind == "crashed")


@pytest.mark.exhaustive
def test_two_hangs_of_one_job(mpi: str, tmp_path: Path) -> None:
    log, program = tmp_path / "log", processes.PROGRAMS / "stalled.py"
    with mpi_launch.started(mpi, program, "sleep,lock", 1, "mpi", ranks=4, log=log, COMMTRACE_STALL_SECONDS=0.5):
        processes.wait_for(lambda: len((tables := hang_tables(log)).get("stuck_calls", ())) == 2
                           and {1, 3} <= {*tables["stalled_threads"]["rank"]}, 60)  # fmt: skip
        assert_two_culprits(find_culprits(hang_tables(log)))
