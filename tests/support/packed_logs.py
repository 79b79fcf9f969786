"""Packed logs, and the assertion that commands give the same results for them as for the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from commtrace.cli import main


def pack(log: Path, *options: str) -> Path:
    """Pack a log into a directory of the same name, because reports name the run after it."""
    out = log.parent / "packed" / log.name
    out.parent.mkdir(exist_ok=True)
    assert main(["pack", str(log), "--out", str(out), *options]) == 0
    return out


def results(command: Sequence[str | Path], capsys: pytest.CaptureFixture[str], log: Path) -> tuple[object, ...]:
    """Return the exit status, output and errors of a command, with LOG in place of the directory that it reads."""
    capsys.readouterr()
    status = main([str(word) for word in command])
    printed = capsys.readouterr()
    return status, *(text.replace(str(log), "LOG").replace("run=", "") for text in (printed.out, printed.err))


def assert_equal(log: Path, packed: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that commands give equal results for both, to the byte."""
    for command in (
        ("report", "LOG", "--json"), ("check", "LOG", "--width", "9999"), ("diff", "LOG", other, "--json"),
        ("scaling", "LOG", other, "--json"), ("whatif", "LOG", "--json"),
        ("export", "LOG", "--out", log.parent / "events.csv", "--force"),
    ):  # fmt: skip
        found, files = [], []
        for directory in (log, packed):
            words = [directory if word == "LOG" else word for word in command]
            # Notes name the files of the log, also for a packed one.
            found.append([str(part).replace(str(log), "LOG") for part in results(words, capsys, directory)])
            files.append((log.parent / "events.csv").read_bytes() if command[0] == "export" else b"")
        assert found[0] == found[1], command
        assert files[0] == files[1]
