"""`commtrace diff` and `commtrace check` on real runs of a training and of changed versions, and on its dry run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import processes
import pytest

pytest.importorskip("torch")

from ranks import Nursery

from commtrace.cli import main

pytestmark = pytest.mark.long

PROGRAM = processes.PROGRAMS / "changed_training.py"
Captured = pytest.CaptureFixture[str]

CHANGES = {
    "bucket": ("data", "all_reduce"),
    "more": ("+ 1 all_reduce of 28 bytes",),
    "order": ("in another order",),
    "size": ("rank 1, step 1, self group of 1 rank", "+ 1 all_reduce of 48 bytes"),
}
"""Change of the training -> texts that the commands must print."""


@pytest.fixture(scope="module")
def logs(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a log of each change, and two logs without a change."""
    folder = tmp_path_factory.mktemp("logs")
    for name in ("none", "again", *CHANGES):
        statuses, outputs = nursery.run("changed_training", folder / name, 5, name if name in CHANGES else "none")
        assert statuses == [0, 0], outputs
    return folder


def run_command(capsys: Captured, *arguments: object) -> tuple[int, str]:
    """Run a command, and return its exit status and output."""
    status = main([*map(str, arguments), "--width", "160"])
    return status, capsys.readouterr().out


def test_two_runs_of_one_program_are_equal(logs: Path, tmp_path: Path, capsys: Captured) -> None:
    for command in (("diff", logs / "none", logs / "again"), ("check", logs / "again", "--against", logs / "none")):
        status, out = run_command(capsys, *command)
        assert status == 0, out
        assert "start-up and step 0-4 of rank 0-1" in out
    files = [tmp_path / name for name in ("none.txt", "again.txt")]
    for file in files:
        assert run_command(capsys, "check", logs / file.stem, "--update-baseline", file)[0] == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    assert run_command(capsys, "check", logs / "again", "--baseline", files[0])[0] == 0


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_found(change: str, logs: Path, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "calls.txt"
    run_command(capsys, "check", logs / "none", "--update-baseline", file)
    for command in (
        ("diff", logs / "none", logs / change),
        ("check", logs / change, "--against", logs / "none"),
        ("check", logs / change, "--baseline", file),
    ):
        status, out = run_command(capsys, *command)
        assert status == 1, out
        for text in CHANGES[change]:
            assert text in out


def test_a_run_without_one_of_its_ranks(logs: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(logs / "none", tmp_path / "cut")
    for path in (tmp_path / "cut").rglob("rank00001*"):
        path.unlink()
    status, out = run_command(capsys, "check", tmp_path / "cut", "--against", logs / "none")
    assert status == 1
    assert "rank 1: only in expected" in out


def test_rules_list_calls_of_the_program(logs: Path, capsys: Captured) -> None:
    status, out = run_command(capsys, "check", logs / "more")
    assert status == 0
    assert out.startswith("matches the rules; in addition, ")
    assert "calls_of_the_program: 22 all_reduce" in out
    assert run_command(capsys, "check", logs / "more", "--strict")[0] == 1
    assert run_command(capsys, "check", logs / "more", "--strict", "--own", "changed_training.py")[0] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("change", "expected"), [("none", 0), ("more", 1)])
def test_a_check_makes_the_dry_run_itself(change: str, expected: int, logs: Path, capsys: Captured) -> None:
    program = ("--dryrun", "--width", "160", "--", sys.executable, PROGRAM, "4", "none")
    status = main([*map(str, ("check", logs / change, *program))])
    assert status == expected, capsys.readouterr().out


def test_a_dry_run_is_the_reference(logs: Path, tmp_path: Path, capsys: Captured) -> None:
    """A dry run with fewer steps is enough, because steps repeat."""
    command = [sys.executable, "-m", "commtrace.cli", "dryrun", "--world-size", "2", "--ranks", "all", "--jobs", "2"]
    result = processes.run([*command, "--out", tmp_path / "dry", sys.executable, PROGRAM, "4", "none"], cwd=tmp_path)
    assert result.status == 0, result.err
    status, out = run_command(capsys, "check", logs / "none", "--against", tmp_path / "dry")
    assert status == 0, out
    assert out.startswith("matches the dry run ")
    assert run_command(capsys, "check", logs / "more", "--against", tmp_path / "dry")[0] == 1
