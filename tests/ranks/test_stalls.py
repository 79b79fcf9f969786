"""What ranks do that make no progress: real jobs with gloo."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import frozen_storage
import pandas as pd
import processes
import pytest

pytest.importorskip("torch")

from ranks import Nursery
from stalled_ranks import KINDS, assert_two_culprits, places_of
from stuck_jobs import stuck_calls_of, wait_for_stuck_calls

from commtrace.analyses.across_ranks import stalls
from commtrace.analyses.across_ranks.culprits import find_culprits
from commtrace.cli import main
from commtrace.errors import LogError
from commtrace.reading import live_processes
from commtrace.run import Run, open_run

DEFAULT = ("lock", "all")

pytestmark = pytest.mark.usefixtures("short_waits")


def stalled(log: Path) -> pd.DataFrame:
    """Return the main threads without progress; none before there is a log."""
    try:
        table = open_run(log).table("stalled_threads")
    except LogError:
        return pd.DataFrame()
    return table[table["is_main"]].set_index("rank")


def wait_for(log: Path, ranks: set[int], limit: float = 60) -> Any:
    """Return the row of rank 1 as soon as these ranks have one."""
    deadline = time.monotonic() + limit
    while not ranks <= {*(table := stalled(log)).index}:
        assert time.monotonic() < deadline, table.to_string()
        time.sleep(0.3)
    return table.loc[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS]
)
def test_a_rank_that_makes_no_progress(
    kind: str, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_processes, "SILENT_NS", 10**9)
    log = tmp_path / "log"
    ranks = nursery.start("stalled", log, kind, ranks=2, stall_seconds=0.5)
    row = wait_for(log, {0, 1} if kind == "all" else {1})
    activity, function = KINDS[kind]
    assert row["activity"] == activity
    if not (places := places_of(kind)):
        assert pd.isna(row["line"])
    else:
        assert row["line"] in places
        assert row["function"].rpartition(" ")[2].rpartition(".")[2] == function
        assert not row["in_call"]
    main(["report", str(log)])
    assert activity in " ".join(capsys.readouterr().out.split())
    if kind != "all":
        wait_for_stuck_calls(log)
    ranks.kill(0, 1)
    ranks.wait()
    if function is not None:
        main(["recover", str(log)])
        assert stalled(log).loc[1, "line"] in places
    assert len(stuck_calls_of(log)) == (kind != "all")


@pytest.mark.long
def test_two_hangs_of_one_job(nursery: Nursery, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report begins with the rank that stopped first, and names the other one, too."""
    log = tmp_path / "log"
    ranks = nursery.start("stalled", log, "sleep,lock", ranks=4, stall_seconds=0.5)
    processes.wait_for(lambda: {1, 3} <= {*stalled(log).index} and len(stuck_calls_of(log)) == 2, 60)
    run = open_run(log)
    tables = {name: run.table(name) for name in ("stuck_calls", "stuck_ranks", "stalled_threads")}
    main(["check", str(log)])
    ranks.kill(*range(4))
    ranks.wait()
    assert_two_culprits(find_culprits(tables))
    shown = " ".join(capsys.readouterr().out.split())
    assert re.match(r"Rank [13] made no progress for .* Independently, rank [13] made no progress for ", shown)


@pytest.mark.long
def test_a_job_that_is_suspended(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on, no reading says anything but that ranks were stopped."""
    monkeypatch.setattr(live_processes, "SILENT_NS", 10**9)
    log = tmp_path / "log"
    ranks = nursery.start("stuck", log, "train", ranks=3, stall_seconds=0.5)
    processes.wait_for(lambda: log.exists() and len(open_run(log).events()) > 0, 40)
    told: list[str] = []
    for _ in range(3):
        ranks.kill(0, 1, 2, signal_=signal.SIGSTOP)
        processes.wait_for(lambda: {*stalled(log)["activity"]} == {stalls.STOPPED}, 20)
        time.sleep(2)
        going_on = threading.Timer(random.random(), ranks.kill, (0, 1, 2), {"signal_": int(signal.SIGCONT)})
        going_on.start()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            run = open_run(log)
            told += [*run.table("stalled_threads")["activity"], *run.table("stuck_calls")["op"]]
        going_on.join()
        assert not len(stalled(log))
        assert all(process.live_late_turn_ns for process in open_run(log).processes)
    ranks.kill(0, 1, 2)
    ranks.wait()
    assert {*told} <= {stalls.STOPPED}


@pytest.mark.exhaustive
def test_a_rank_whose_storage_does_not_answer(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with frozen_storage.mounted(tmp_path) as mount:
        (mount / "file").touch()
        with frozen_storage.frozen(mount):
            ranks = nursery.start("stalled", log, "storage", 1, "torch", mount / "file", ranks=2, stall_seconds=0.5)
            row = wait_for(log, {1})
            wait_for_stuck_calls(log)
        ranks.kill(0, 1)
        ranks.wait()
    assert (row["activity"], row["line"]) == (stalls.STORAGE, places_of("storage")[0])


@pytest.mark.exhaustive
def test_a_hang_while_the_disk_is_full(nursery: Nursery, tmp_path: Path) -> None:
    """Not even the folder of the run can be made: what is known is in memory, for readers on the same host."""
    log = tmp_path / "log"
    with frozen_storage.mounted(tmp_path) as mount:
        (mount / "log").mkdir()
        log.symlink_to(mount / "log")
        frozen_storage.fill(mount)
        ranks = nursery.start("stalled", log, "lock", ranks=2, stall_seconds=0.5)
        row = wait_for(log, {1})
        (call,) = wait_for_stuck_calls(log).itertuples()
        ranks.kill(0, 1)
        ranks.wait()
    assert (row["activity"], row["line"]) == (KINDS["lock"][0], places_of("lock")[0])
    assert (call.waiting_ranks, call.absent_ranks) == ("0", "1")


@pytest.mark.exhaustive
def test_the_storage_of_the_log_does_not_answer(nursery: Nursery, tmp_path: Path) -> None:
    """The training goes on, and nobody says that it does not."""
    with frozen_storage.mounted(tmp_path) as mount:
        log = mount / "log"
        ranks = nursery.start("stuck", log, "train", ranks=2, stall_seconds=0.5)
        processes.wait_for(lambda: log.exists() and len(open_run(log).events()) > 0, 40)
        with frozen_storage.frozen(mount):
            processes.wait_for(lambda: ranks_without_storage(open_run(log)) == 2, 30)
            run = open_run(log)
            before = count_calls(run)
            assert not len(stalled(log))
            assert not len(run.table("stuck_calls"))
            assert ranks_without_storage(run) == 2
            time.sleep(1)
            assert (count_calls(open_run(log)) > before).all()
        processes.wait_for(lambda: not open_run(log).notes, 40)
        ranks.kill(0, 1)
        ranks.wait()
        main(["recover", str(log)])
        run = open_run(log)
        assert [process.lost_records for process in run.processes] == [0, 0]
        assert (count_calls(run) > before).all()


def ranks_without_storage(run: Run) -> int:
    """Return how many ranks the notes of a run say to wait for the storage of the log."""
    return len([note for note in run.notes if "for the storage of the log" in note.what])


def count_calls(run: Run) -> pd.Series:
    """Return how many calls each rank has made."""
    return run.events().groupby("rank").size()


@pytest.mark.exhaustive
def test_none_of_a_job_that_trains(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = nursery.start("stuck", log, "train", ranks=2, stall_seconds=0.5)
    processes.wait_for(lambda: log.exists() and len(stuck_calls_of(log)) == 0, 40)
    time.sleep(3)
    ranks.kill(0, 1)
    ranks.wait()
    assert not len(stalled(log))
