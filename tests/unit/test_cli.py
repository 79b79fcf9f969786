"""The command line: help, errors, exit status."""

from __future__ import annotations

import inspect
import io
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from factory import UNIX_NS, LogFactory, record, training

from commtrace.cli import COMMANDS, main
from commtrace.schema import VERSION


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_says_what_their_help_says(name: str) -> None:
    assert (inspect.getdoc(import_module(f"commtrace.commands.{name}")) or "").splitlines()[0] == COMMANDS[name]


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "usage: commtrace" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("commtrace ")


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["report"], ["report", "x", "--sites", "-1"], ["report", "x", "--width", "3"], ["export", "x"]],
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: commtrace" in capsys.readouterr().err


def test_an_error_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    message = "no such directory; pass the directory that COMMTRACE was set to, or the folder of a run in it"
    hint = "`commtrace doctor` shows which calls create it"
    assert err == f"commtrace: {tmp_path / 'none'}: {message}; {hint}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["report"],
        ["scaling", "."],
        ["check"],
        ["diff", "."],
        ["export", "--out", "e.csv"],
        ["pack"],
        ["recover"],
        ["whatif"],
    ],
)
def test_a_missing_directory_is_a_failure(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "none"]) == 2
    assert "none: no such directory" in capsys.readouterr().err


def test_a_fault_of_the_program_is_not_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training(tmp_path)
    monkeypatch.setattr("commtrace.commands.check.run", lambda arguments: 1 // 0)
    assert main(["check", str(tmp_path)]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--dryrun"], ["--", "python"], ["--against", ".", "--", "python"]])
def test_a_program_is_only_for_a_dry_run(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path)
    assert main(["check", str(tmp_path), *arguments]) == 2
    assert "give both: commtrace check" in capsys.readouterr().err


def test_a_newer_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LogFactory(tmp_path).process(version=VERSION + 1)
    assert main(["report", str(tmp_path)]) == 2
    assert "upgrade commtrace" in capsys.readouterr().err


def test_a_partial_log_is_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LogFactory(tmp_path).process(0, world_size=8).known().write(record())
    assert main(["report", str(tmp_path)]) == 0
    assert "missing: 1-7" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    training(tmp_path / "log", run="old", unix_ns=UNIX_NS - 1)
    training(tmp_path / "log")
    out = tmp_path / f"events.{form}"
    assert main(["export", str(tmp_path / "log"), "--out", str(out)]) == 0
    assert main(["export", str(tmp_path / "log"), "--out", str(out)]) == 2
    assert main(["export", str(tmp_path / "log"), "--out", str(out), "--force", "--format", form]) == 0
    text, err = capsys.readouterr()
    assert "14 calls" in text
    assert "already exists" in err
    assert "commtrace report" in err  # the note on the other run


def test_export_needs_a_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training(tmp_path / "log")
    assert main(["export", str(tmp_path / "log"), "--out", str(tmp_path / "events")]) == 2
    assert "--format" in capsys.readouterr().err


def python(code: str, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new process."""
    # Not in the checkout, whose folder `commtrace` is only a part of the package.
    where: dict[str, Any] = {"cwd": tempfile.gettempdir(), "env": {**os.environ, **options}, "timeout": 120}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, **where
    )


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    """Where the command did not come to its own status, it has that of a program that SIGPIPE ended."""
    training(tmp_path, steps=300)
    code = (
        "import subprocess, sys\n"
        "report = [sys.executable, '-m', 'commtrace.cli', 'report', sys.argv[1], '--json']\n"
        "with subprocess.Popen(report, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:\n"
        "    one.stdout.read(10); one.stdout.close(); error = one.stderr.read()\n"
        "print(one.returncode, error)\n"
    )
    assert python(code, str(tmp_path)).stdout in ("0 b''\n", "141 b''\n")  # the pipe may hold all of it


def test_a_verdict_that_nobody_reads_is_still_the_status(tmp_path: Path) -> None:
    for name, payload in (("a", 64), ("b", 72)):
        LogFactory(tmp_path / name).process().known().write([record(payload=payload)]).end()
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "commtrace.cli", "diff", str(tmp_path / "a"), str(tmp_path / "b")]
        assert subprocess.run(command, stdout=closed, check=False, timeout=120).returncode == 1


def test_a_full_disk_is_an_error_in_a_line(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    training(tmp_path)
    code = (
        "import sys; from commtrace.cli import main\n"
        "sys.stdout = open('/dev/full', 'w')\n"
        "sys.exit(main(['report', sys.argv[1]]))\n"
    )
    done = python(code, str(tmp_path))
    assert (done.returncode, done.stderr) == (2, "commtrace: [Errno 28] No space left on device\n")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from commtrace.cli import main\n"
        "try: main(['report', '--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('pandas', 'torch', 'rich', 'numpy') if name in sys.modules], file=sys.stderr)\n"
    )
    assert python(code).stderr == "[]\n"


def test_a_terminal_of_few_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training(tmp_path)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["report", str(tmp_path)]) == 0
    terminal.seek(0)
    text = terminal.read()
    assert text
    assert "?" not in text
    assert capsys.readouterr().err == ""
