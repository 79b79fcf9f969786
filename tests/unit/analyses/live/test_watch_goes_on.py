"""`commtrace watch` and `top` when the log, its storage or standard output fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import damaged_logs
import pytest
from simulated_hangs import write_hang

from commtrace.analyses.live.followed_run import FollowedRun, LiveRun
from commtrace.cli import main
from commtrace.commands import log_reading, watch
from commtrace.commands.exit_status import AS_EXPECTED, FAILED, STUCK

LIMIT_SECONDS = 60


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    """The log of a job that hangs."""
    write_hang(tmp_path / "log", "lock", 8, 3)
    return tmp_path / "log"


def watch_into_full_disk(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commtrace.cli", "watch", *arguments]
    with open("/dev/full", "w") as full:
        return subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False
        )


def test_an_incident_is_delivered_though_it_cannot_be_printed(hung: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    ended = watch_into_full_disk(str(hung), "--on", "hang", "--run", f"cat > {kept}")
    assert ended.returncode == STUCK
    assert "Rank 3 made no progress" in kept.read_text()
    assert ended.stderr.splitlines() == [
        "commtrace: an incident was delivered, but not printed: [Errno 28] No space left on device"
    ]


def test_a_watch_that_can_tell_nobody_ends(hung: Path) -> None:
    ended = watch_into_full_disk(str(hung))
    assert ended.returncode == FAILED
    assert ended.stderr.splitlines() == ["commtrace: [Errno 28] No space left on device"]


def slowed(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], object]) -> None:
    """Let a reading wait until `answer` returns."""
    read = FollowedRun.read

    def slow(self: FollowedRun) -> LiveRun:
        answer()
        return read(self)

    monkeypatch.setattr(FollowedRun, "read", slow)
    for module in (log_reading, watch):
        monkeypatch.setattr(module, "SLOW_SECONDS", 0.1)


def test_storage_that_answers_late(
    hung: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slowed(monkeypatch, lambda: time.sleep(0.5))
    assert main(["watch", str(hung), "--on", "hang"]) == STUCK
    shown = capsys.readouterr()
    assert "its storage does not answer; waiting" in shown.err
    assert shown.out.startswith("hang: Rank 3 made no progress")


def test_storage_that_does_not_answer(
    hung: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = threading.Event()
    slowed(monkeypatch, lambda: answers.wait(LIMIT_SECONDS))
    assert main(["watch", str(hung), "--wait", "0.2"]) == FAILED
    answers.set()
    assert "its storage does not answer; gave up after 0.2 s (--wait)" in capsys.readouterr().err


def test_a_log_that_is_removed_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on in the first log; another one replaces it."""
    damaged_logs.unpack(tmp_path / "runs")
    log, statuses = tmp_path / "log", list[int]()
    write_hang(log, "lock", 8, 3)
    arguments = ["watch", str(log), "--on", "hang", "--interval", "0.1", "--linger", "60"]
    watching = threading.Thread(target=lambda: statuses.append(main(arguments)), daemon=True)
    watching.start()
    wait_for(lambda: "Rank 3 made no progress" in capsys.readouterr().out)
    shutil.rmtree(log)
    wait_for(lambda: f"waiting for a log: {log}: no such directory" in capsys.readouterr().err)
    shutil.copytree(tmp_path / "runs" / "ddp", log)
    watching.join(LIMIT_SECONDS)
    assert statuses == [AS_EXPECTED]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("where", ["log", "run", "host"])
def test_many_other_files(where: str, hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (host,) = hung.glob("*/*")
    folder = {"log": hung, "run": host.parent, "host": host}[where]
    for number in range(10_000):
        os.close(os.open(folder / f"note{number}.txt", os.O_CREAT | os.O_WRONLY))
    assert main(["watch", str(hung), "--on", "hang"]) == STUCK
    assert main(["top", str(hung), "--once"]) == STUCK
    assert "Rank 3 made no progress" in " ".join(capsys.readouterr().out.split())
