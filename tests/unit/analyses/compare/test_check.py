"""`commtrace check` against rules: exit status 0 if equal, 1 for a difference, 3 if not all could be compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from expected_runs import (
    CHECKPOINT,
    PROGRAM,
    RANKS,
    SAVING,
    ZERO_1,
    call,
    calls,
    cut,
    every_step,
    in_other_pieces,
    run_of,
    with_call,
    without_a_check,
    without_optimizer,
)
from factory import ALONE

from commtrace.analyses.compare import verdict
from commtrace.analyses.compare.verdict_text import heading
from commtrace.cli import main
from commtrace.schema import Phase, Records
from commtrace.theory import ExpectedCall

Change = Callable[[list[Records]], list[Records]]
Captured = pytest.CaptureFixture[str]


def check(directory: Path, capsys: Captured, *options: str) -> tuple[int, str]:
    """Run `commtrace check` and return its exit status and output."""
    status = main(["check", str(directory), "--width", "200", *options])
    return status, capsys.readouterr().out


def test_as_expected(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path, every_step(), ZERO_1)
    text = "matches the rules\ncompared: start-up and step 0-2 of rank 0-2, 72 calls of 3.16 KiB\n"
    assert check(tmp_path, capsys) == (0, text)


def test_ranks_with_different_steps_are_not_compared(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "log", every_step(), ZERO_1)
    shutil.copytree(tmp_path / "log", tmp_path / "all")
    for rank, path in enumerate(sorted((tmp_path / "log").rglob("*.jsonl"))):
        lines = path.read_text().splitlines()
        first = json.dumps({**json.loads(lines[0]), "settings": {"steps": f"0-{rank}"}})
        path.write_text("\n".join([first, *lines[1:], ""]))
    for options in ((), ("--against", str(tmp_path / "all"))):
        status, out = check(tmp_path / "log", capsys, *options)
        assert status == 3
        assert "COMMTRACE_STEPS is not the same on all ranks" in out


DIFFERENCES = [
    cut,
    without_optimizer,
    without_a_check,
    with_call("broadcast", 700),
    with_call("all_reduce", 4, site=PROGRAM, phase=Phase.BACKWARD),
    with_call("all_reduce", 4, site=CHECKPOINT),
    lambda rows: [],
]

OWN_CALLS = [
    with_call("barrier", 0, site=PROGRAM),
    with_call("all_reduce", 4, site=PROGRAM, phase=Phase.OTHER),
    with_call("all_reduce", 4_000, group=ALONE),
    with_call("all_gather", 4_000, site=SAVING),
    with_call("all_gather", 4_000, phase=Phase.EVALUATION),
]
"""Calls that no rule predicts and no library with rules makes for training."""


def test_activities_are_listed_by_purpose(tmp_path: Path, capsys: Captured) -> None:
    """A missing call is no less missing for a checkpoint with the same call."""
    rows = every_step()
    lost = next(row for row in rows if row["step"][0] == 1 and row["payload"][0] == 72)
    saved = lost.copy()
    saved["site"] = SAVING
    run_of(tmp_path, [*(row for row in rows if row is not lost), saved], ZERO_1)
    status, out = check(tmp_path, capsys)
    assert status == 1
    assert "- 1 all_gather of 72 bytes" in out
    line = "deepspeed/runtime/engine.py:7 DeepSpeedEngine.save_checkpoint: 3 all_gather, 216 bytes, rank 0-2"
    assert out.splitlines()[-2] == "  checkpoint saved"
    assert out.splitlines()[-1].endswith(line)


@pytest.mark.parametrize("change", DIFFERENCES)
def test_every_difference_fails(change: Change, tmp_path: Path, capsys: Captured) -> None:
    """A difference fails the check whether all ranks have it or only one."""
    run_of(tmp_path / "all", change(every_step()), ZERO_1)
    run_of(tmp_path / "one", every_step(), ZERO_1, others={1: change(every_step())})
    assert check(tmp_path / "all", capsys)[0] == 1 or change is DIFFERENCES[-1]  # then no rank has a step
    status, out = check(tmp_path / "one", capsys)
    assert status == 1
    assert "rank 1, " in out
    assert "rank 0" not in out.replace("rank 0-2", "")


@pytest.mark.parametrize("change", OWN_CALLS)
def test_own_calls_fail_only_if_strict(change: Change, tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path, change(every_step()), ZERO_1)
    status, out = check(tmp_path, capsys)
    assert status == 0
    assert out.splitlines()[0].startswith("matches the rules; in addition, ")
    assert "3 calls" in out.splitlines()[0]
    assert check(tmp_path, capsys, "--strict")[0] == 1


def test_declared_calls_are_own_in_any_library(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path, with_call("all_reduce", 4, site=CHECKPOINT)(every_step()), ZERO_1)
    assert check(tmp_path, capsys)[0] == 1
    assert check(tmp_path, capsys, "--strict", "--own", "somewhere_else")[0] == 1
    status, out = check(tmp_path, capsys, "--strict", "--own", "engine.py*save_checkpoint")
    assert status == 0
    assert "engine.py:5 DeepSpeedEngine.save_checkpoint: 3 all_reduce, 12 bytes, rank 0-2" in out


def test_declared_calls_of_steps_that_are_not_compared_are_not_counted(tmp_path: Path, capsys: Captured) -> None:
    rows = [
        *calls(ZERO_1, range(-1, 10)),
        *(call(ExpectedCall("all_reduce", 4, ""), step, site=CHECKPOINT) for step in (0, 9)),
    ]
    run_of(tmp_path, sorted(rows, key=lambda row: int(row["step"][0])), ZERO_1, removed=1)
    _, out = check(tmp_path, capsys, "--own", "engine.py*save_checkpoint")
    assert "engine.py:5 DeepSpeedEngine.save_checkpoint: 3 all_reduce, 12 bytes, rank 0-2" in out


def test_a_shortage_is_not_explained_by_calls_of_the_program(tmp_path: Path, capsys: Captured) -> None:
    """A call of the program may replace a missing call of the same operation."""
    run_of(tmp_path, with_call("all_reduce", 4, site=PROGRAM)(without_a_check(every_step())), ZERO_1)
    assert check(tmp_path, capsys)[0] == 1
    moved = [*cut(every_step()), call(ExpectedCall("all_gather", 77, ""), 2, site=PROGRAM)]
    run_of(tmp_path / "moved", moved, ZERO_1)
    status, out = check(tmp_path / "moved", capsys)
    assert status == 1
    assert "own" not in out.splitlines()[0]


def test_own_calls_of_late_steps(tmp_path: Path, capsys: Captured) -> None:
    """From step 64 on, sizes are not kept, and the calls of libraries are compared by their sums."""
    rows = [*calls(ZERO_1, range(-1, 66)), call(ExpectedCall("all_reduce", 4, ""), 65, site=PROGRAM)]
    run_of(tmp_path, rows, ZERO_1)
    status, out = check(tmp_path, capsys)
    assert status == 0
    assert "project/train.py:9 main: 3 all_reduce, 12 bytes, rank 0-2" in out


def test_what_is_said_of_a_cell(tmp_path: Path, capsys: Captured) -> None:
    """Ranks and steps with the same difference are reported once."""
    change = with_call("all_reduce", 4, site=PROGRAM, phase=Phase.OTHER)
    run_of(tmp_path, change(every_step()), ZERO_1)
    _, out = check(tmp_path, capsys, "--strict")
    assert out.splitlines() == [
        "differs from the rules",
        "compared: start-up and step 0-2 of rank 0-2, calls 72 -> 75, payload 3,237 -> 3,249 bytes",
        "differing: step 1 of rank 0-2",
        "rank 0-2, step 1, data group of 3 ranks:",
        "  from project/train.py:9 main",
        "    + 1 all_reduce of 4 bytes, float16, in other",
    ]


def test_within_the_bounds_of_theory_pieces_may_differ(tmp_path: Path, capsys: Captured) -> None:
    """Without overlap_comm, the job determines the order in which ZeRO-1 reduces, so theory states no bound."""
    run_of(tmp_path / "bounded", in_other_pieces(every_step()), ZERO_1)
    assert check(tmp_path / "bounded", capsys)[0] == 0
    job = {**ZERO_1, "zero": {**ZERO_1["zero"], "overlap_comm": False}}
    rows = calls(job, range(-1, 3))
    run_of(tmp_path / "same", rows, job)
    run_of(tmp_path / "pieces", in_other_pieces(rows), job)
    assert check(tmp_path / "same", capsys)[0] == 0
    status, out = check(tmp_path / "pieces", capsys)
    assert status == 1
    differences = [line.strip() for line in out.splitlines() if line.startswith("    ")]
    pieces = [f"+ 1 all_reduce of {size} bytes, float16, in optimizer" for size in (68, 78)]
    assert differences == [*(f"- 1 all_reduce of {size} bytes" for size in (66, 80)), *pieces]


@pytest.mark.parametrize(("share", "status"), [("0", 1), ("0.025", 1), ("0.026", 0), ("1e-1", 0), ("4/155", 0)])
def test_tolerance(share: str, status: int, tmp_path: Path, capsys: Captured) -> None:
    """The difference is 4 of 155 bytes, or 2.58 %."""
    run_of(tmp_path, with_call("all_reduce", 4, site=PROGRAM)(every_step()), ZERO_1)
    assert check(tmp_path, capsys, "--strict", "--tolerance", share)[0] == status


@pytest.mark.parametrize("share", ["-1", "x", "nan", "1/0", "inf"])
def test_a_tolerance_that_is_no_share(share: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["check", str(tmp_path), f"--tolerance={share}"])
    assert exit_.value.code == 2


def test_expected_calls_that_an_incomplete_log_lacks_are_not_a_match() -> None:
    """A log that begins after start-up, and has no call of it, was not compared; one with nothing to record was."""
    ranks_and_steps, nothing = (frozenset({0}), frozenset({-1})), (frozenset[int](), frozenset[int]())
    table, volumes = pd.DataFrame(columns=[*verdict.COLUMNS]), ((16, 64), (0, 0))
    lost = verdict.Verdict(table, ranks_and_steps, nothing, volumes, ("rank 0: the log begins after start-up",), {})
    assert heading(lost, "equal", "different", "not compared") == "not compared"
    complete = verdict.Verdict(table, ranks_and_steps, nothing, ((0, 0), (0, 0)), (), {})
    assert heading(complete, "equal", "different", "not compared") == "equal"


def test_without_a_theory(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path, every_step())
    status, out = check(tmp_path, capsys)
    assert status == 3
    assert out.splitlines()[:2] == [
        "not compared with the rules",
        "not compared: rank 0-2: no job was captured.",
    ]
    assert f"commtrace check {tmp_path} --dryrun -- python train.py ..." in out
    assert f"commtrace check {tmp_path} --update-baseline FILE" in out


def test_a_rank_without_a_log(tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "equal", every_step(), ZERO_1, ranks=2)
    status, out = check(tmp_path / "equal", capsys)
    assert status == 3
    assert f"rank 2 of {RANKS}: no log" in out
    assert out.startswith("partly compared, matches the rules\n")
    assert "compared: start-up and step 0-2 of rank 0-1, 48 calls of 2.11 KiB\n" in out
    run_of(tmp_path / "different", cut(every_step()), ZERO_1, ranks=2)
    assert check(tmp_path / "different", capsys)[0] == 1


@pytest.mark.parametrize("stats", [{"hook_errors": 1}, {"unrecorded": 3}])
def test_losses_of_recording_fail_although_nothing_differs(stats: Any, tmp_path: Path, capsys: Captured) -> None:
    run_of(tmp_path / "a", every_step(), ZERO_1, **stats)
    run_of(tmp_path / "b", every_step(), ZERO_1)
    status, out = check(tmp_path / "a", capsys)
    assert status == 3
    assert out.count("not compared: rank ") == RANKS
    for command in ("diff", "check --against"):
        name, *option = command.split()
        assert main([name, str(tmp_path / "a"), *option, str(tmp_path / "b")]) == 3


def test_no_log_is_an_error(tmp_path: Path, capsys: Captured) -> None:
    assert main(["check", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"commtrace: {tmp_path / 'none'}: no such directory; ")


def test_many_differences_are_cut(tmp_path: Path, capsys: Captured) -> None:
    rows = every_step()
    for size in range(700, 760):
        rows.append(call(ExpectedCall("broadcast", size, ""), size))
    run_of(tmp_path, rows, ZERO_1)
    status, out = check(tmp_path, capsys)
    assert status == 1
    assert "more; all are in" in out
    assert len(out.splitlines()) < 600


def test_shares_are_exact() -> None:
    from commtrace.commands.option_types import exact_fraction

    assert exact_fraction("0.1") == Fraction(1, 10)


def test_against_a_configuration(tmp_path: Path, capsys: Captured) -> None:
    """A run matches its own configuration, and differs from one with other settings."""
    pytest.importorskip("yaml")
    from commtrace.theory.forecast import PlanOptions, forecast

    row = forecast(["tiny"], RANKS, PlanOptions(zero_stage=1)).plan.row.to_json()
    run_of(tmp_path, calls(row, range(-1, 3)))
    assert check(tmp_path, capsys)[0] == 3
    assert check(tmp_path, capsys, "--config", "tiny")[0] == 0
    status, out = check(tmp_path, capsys, "--config", "tiny", "--zero-stage", "2", "--gradient-accumulation", "2")
    assert status == 1
    assert "data group of 3 ranks:" in out
    assert main(["check", str(tmp_path), "--config", "nowhere.yml"]) == 2
    assert "nowhere.yml: no such file" in capsys.readouterr().err
