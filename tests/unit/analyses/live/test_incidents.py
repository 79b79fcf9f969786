"""Incidents of runs with a known schedule: each is told once, and nothing else."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import damaged_logs
import pandas as pd
import pytest
from factory import WORLD, LogFactory, record
from simulated_steps import MS, PROGRAMS, Delay, Simulation

from commtrace.analyses.live.followed_run import FollowedRun
from commtrace.analyses.live.incidents import KINDS, Condition, Incident, Watcher
from commtrace.cli import main
from commtrace.commands.exit_status import AS_EXPECTED
from commtrace.schema import Phase, State

ALL = [Condition.parse(kind) for kind in KINDS]
SECOND = 10**9


def incidents(log: Path, *conditions: str) -> list[Incident]:
    """Return what a watch of a log tells; reading it again tells nothing."""
    followed, watcher = FollowedRun(log), Watcher([*map(Condition.parse, conditions)] or ALL)
    found = watcher.new_incidents(followed.read())
    assert watcher.new_incidents(followed.read()) == []
    for incident in found:
        document = json.loads(json.dumps(incident.document(followed.read()), allow_nan=False))
        assert document["kind"] == incident.kind
        assert document["tables"]
    return found


def late(delays: dict[tuple[int, int], int]) -> Delay:
    """Return delays in backward, ns, by rank and step."""
    return lambda rank, step, phase: delays.get((rank, step), 0) if phase is Phase.BACKWARD else 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_healthy_run_has_no_incident(program: str, tmp_path: Path) -> None:
    PROGRAMS[program](Simulation(4), 30).write(tmp_path)
    assert incidents(tmp_path) == []


def test_a_long_step_and_the_rank_that_made_it_long(tmp_path: Path) -> None:
    PROGRAMS["sharded"](Simulation(4, 0, late({(2, 12): 60 * MS, (2, 13): 60 * MS, (1, 20): 60 * MS})), 30).write(
        tmp_path
    )
    found = incidents(tmp_path, "step:2x")
    assert [(incident.step, [*incident.ranks]) for incident in found] == [(12, [2]), (20, [1])]
    assert "rank 2 computed" in found[0].text
    assert found[0].text.startswith("Step 12 took ")
    assert incidents(tmp_path, "step:9x") == []


def test_a_straggler_is_named_once_though_it_is_late_in_every_step(tmp_path: Path) -> None:
    PROGRAMS["data parallel"](Simulation(4, 0, late({(3, step): 15 * MS for step in range(30)})), 30).write(tmp_path)
    (found,) = incidents(tmp_path, "straggler:20%")
    assert [*found.ranks] == [3]
    assert "Rank 3 delays the job" in found.text
    assert incidents(tmp_path, "straggler:60%") == []


def hung_log(folder: Path, absent: int) -> None:
    """Write a log in which rank `absent` does not enter the last call; its processes died later."""
    log = LogFactory(folder)
    for rank in range(3):
        process = log.process(rank, pid=100 + rank, world_size=3, boot_id="a")
        done = [
            record(seq=n, t_begin=n * SECOND // 10 + 1, t_return=n * SECOND // 10 + 9, t_end=n * SECOND // 10 + 9,
                   t_wait=0, clock=1, state=State.COMPLETE, site=2)
            for n in range(10)
        ]  # fmt: skip
        if rank != absent:
            begun = {"t_begin": SECOND, "t_return": 0, "t_wait": 0, "t_end": 0, "clock": 0, "state": State.BEGUN}
            done.append(record(seq=10, site=2, **begun))
        process.known({WORLD: [0, 1, 2]}, {WORLD: "data"}).write(done)
        process.add("clock", mono_ns=30 * SECOND, unix_ns=30 * SECOND).add("salvage", records=0, host="h", unix_ns=0)


def test_a_hang_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    hung_log(tmp_path, absent=1)
    found = incidents(tmp_path, "hang")
    assert [[*incident.ranks] for incident in found] == [[1]]
    assert "rank 1 did not enter it" in found[0].text


def test_an_independent_hang_is_told_too(tmp_path: Path) -> None:
    """A second hang of other ranks is another incident; a rank that waits for those of the first is not."""
    hung_log(tmp_path, absent=1)
    live, watcher = FollowedRun(tmp_path).read(), Watcher([Condition.parse("hang")])
    known = {"thread": "MainThread", "is_main": True, "stalled_ns": 20 * SECOND, "since_ns": 10 * SECOND,
             "sampled_ns": 30 * SECOND, "in_call": False, "activity": "sleeping", "function": "f"}  # fmt: skip
    call, rank = live.tables["stuck_calls"].iloc[0], live.tables["stuck_ranks"]

    def told(*calls: tuple[str, str]) -> list[list[int]]:
        rows = [{**call, "waiting_ranks": waiting, "absent_ranks": absent, "group_ranks": f"{waiting},{absent}"}
                for waiting, absent in calls]  # fmt: skip
        stalls = [{"rank": int(absent), **known, "line": f"train.py:{absent}"} for _, absent in calls]
        tables = {"stuck_calls": pd.DataFrame(rows), "stuck_ranks": rank, "stalled_threads": pd.DataFrame(stalls)}
        found = watcher.new_incidents(replace(live, tables={**live.tables, **tables}))
        return [[*incident.ranks] for incident in found]

    assert told(("0", "1")) == [[1]]
    assert told(("0", "1"), ("2", "0")) == []
    assert told(("0", "1"), ("2", "0"), ("4", "5")) == [[1, 5]]
    assert told(("0", "1"), ("2", "0"), ("4", "5")) == []


def test_the_watch_goes_on_with_the_run_of_a_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung_log(tmp_path / "log", absent=1)
    statuses: list[int] = []
    arguments = ["watch", str(tmp_path / "log"), "--interval", "0.1", "--linger", "60"]
    watching = threading.Thread(target=lambda: statuses.append(main(arguments)), daemon=True)
    watching.start()
    watching.join(2)
    assert watching.is_alive()
    damaged_logs.unpack(tmp_path / "runs")
    shutil.copytree(tmp_path / "runs" / "ddp", tmp_path / "log", dirs_exist_ok=True)
    watching.join(60)
    assert statuses == [AS_EXPECTED]
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["hang", "end"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hangs", "is not a condition; choose from hang, end"),
        ("straggler:2x", "is not a condition such as straggler:20%"),
        ("step:1x", "must be above 1"),
        ("end:3s", "is not a condition such as end"),
        ("hang:", "is not a condition such as hang:60s"),
        ("", "is not a condition; choose"),
    ],
)
def test_a_condition_that_cannot_be_read(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Condition.parse(text)


def test_thresholds_have_units() -> None:
    assert Condition.parse("straggler:12.5%").threshold == 0.125
    assert Condition.parse("step:1.5x").threshold == 1.5
    assert Condition.parse("hang").threshold == 60
