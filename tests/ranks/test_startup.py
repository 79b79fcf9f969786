"""Switching on: what an interpreter imports, writes and prints at its start; following imports; start and stop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import python
from ranks import Nursery

import commtrace
from commtrace import startup
from commtrace.recording.session import session

# Standard modules that take milliseconds to import, and third-party libraries.
HEAVY = ("numpy", "torch", "pandas", "rich", "dataclasses", "inspect", "json", "mmap", "socket", "logging", "asyncio")
SHOW = (
    f"import sys; print([name for name in {HEAVY} if name in sys.modules]); print('commtrace.startup' in sys.modules)"
)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_nothing_of_it_is_imported(value: str | None, tmp_path: Path) -> None:
    variables: dict[str, Any] = {} if value is None else {"COMMTRACE": value}
    result = python(SHOW, cwd=tmp_path, **variables)
    assert result == (0, "[]\nFalse\n", "")
    assert list(tmp_path.iterdir()) == []


def test_on_little_is_imported_and_nothing_written(tmp_path: Path) -> None:
    # -S: start-up files of other installed libraries import such modules themselves.
    code = f"import sys; sys.path[:0] = [{str(Path(commtrace.__file__).parents[1])!r}]; import commtrace.startup; "
    result = processes.run([sys.executable, "-S", "-c", code + SHOW], COMMTRACE=tmp_path / "log", cwd=tmp_path)
    assert result == (0, "[]\nTrue\n", "")
    assert list(tmp_path.iterdir()) == []
    assert not processes.rings(tmp_path / "log")


def test_processes_that_never_communicate_leave_nothing(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, subprocess, sys, os\n"
        "subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait()\n"
        "process = multiprocessing.get_context('fork').Process(target=print)\n"
        "process.start(); process.join()\n"
    )
    result = python(code, COMMTRACE="log", cwd=tmp_path)
    assert result == (0, "\n", "")
    assert list(tmp_path.iterdir()) == []
    assert not processes.rings(tmp_path / "log")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"COMMTRACE": "log", "COMMTRACE_DRAIN_MS": "fast"}, ["COMMTRACE_DRAIN_MS=fast", "give a whole number"]),
        ({"COMMTRACE": "log", "COMMTRACE_SIDES": "1"}, ["COMMTRACE_SIDES=1", "no such setting", "COMMTRACE_SITES"]),
        ({"COMMTRACE": "/dev/null"}, ["COMMTRACE=/dev/null", "not a directory", "give a directory"]),
        ({"COMMTRACE": "/dev/null/below"}, ["COMMTRACE=/dev/null/below", "not a directory"]),
    ],
)
def test_wrong_settings_are_one_line(variables: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from commtrace.recording.session import session\n"
        "print('out'); sys.exit(7 if session.settings is None else 8)"
    )
    result = python(code, cwd=tmp_path, **variables)
    assert result.status == 7
    assert result.out == "out\n"
    assert result.err.startswith("commtrace: ")
    assert result.err.endswith(". The program goes on untraced.\n")
    assert result.err.count("\n") == 1
    assert all(word in result.err for word in words)
    assert list(tmp_path.iterdir()) == []


BEGIN = (
    "import os, sys; from commtrace.identity import RankIdentity; from commtrace.recording.session import session\n"
    "recorder = session.begin(lambda: RankIdentity(0, 1), blind_spots=['none'])\n"
    "recorder.begin(1, 1, 0, 8, 0, -1, -1, 0, -1, -1, 0, 0, 0)\n"
)


def test_a_relative_directory_is_the_first_working_directorys(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    result = python("import os; os.chdir('elsewhere')\n" + BEGIN, COMMTRACE="1", cwd=tmp_path)
    assert result == (0, "", "")
    left = processes.read_one(tmp_path / "commtrace-logs")
    assert len(left.records) == 1
    assert left.tables["process"][0]["settings"]["directory"] == str(tmp_path / "commtrace-logs")
    assert left.tables["process"][0]["blind_spots"] == ["none"]
    assert left.tables["end"][0]["reason"] == "exit"


def test_a_directory_that_turns_out_to_be_unwritable(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    spoil = "os.rmdir('log'); open('log', 'w').close(); "
    result = python("import os\n" + BEGIN + spoil + "sys.exit(5)", COMMTRACE="log", cwd=tmp_path)
    assert result.status == 5
    lines = result.err.splitlines()
    assert "cannot write the log: " in lines[0]
    assert "could not be written" in lines[-1]
    assert len(lines) == 2
    assert len(processes.rings(tmp_path / "log")) == 1
    processes.clean_shm(tmp_path / "log")


def test_a_recorder_that_cannot_begin(tmp_path: Path) -> None:
    code = (
        "from commtrace.recording.session import session\n"
        "def member(): raise RuntimeError('no store')\n"
        "print([session.begin(member, blind_spots=[]) for _ in range(3)])\n"
    )
    result = python(code, COMMTRACE="log", cwd=tmp_path)
    assert (result.status, result.out) == (0, "[None, None, None]\n")
    assert result.err == "commtrace: cannot record: RuntimeError: no store. The program goes on untraced.\n"


# ---- following imports -----------------------------------------------------------------------------------------------


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with libraries `lib_a` and `lib_b`, and hooks `hook_a` and `hook_b` that list their own events."""
    for name in ("a", "b"):
        (tmp_path / f"lib_{name}.py").write_text("VALUE = 1\n")
        (tmp_path / f"hook_{name}.py").write_text(
            f"import sys\nEVENTS = []\n"
            f"def install(): EVENTS.append(('install', sys.modules['lib_{name}'].VALUE))\n"
            f"def uninstall(): EVENTS.append('uninstall')\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(startup, "HOOKS", {"lib_a": "hook_a", "lib_b": "hook_b"})
    yield tmp_path
    commtrace.stop()
    for name in ("lib_a", "lib_b", "hook_a", "hook_b"):
        sys.modules.pop(name, None)
    startup._warned.clear()


def events(name: str) -> list[Any]:
    return list(getattr(sys.modules.get(name), "EVENTS", ()))


def test_a_hook_is_put_in_when_its_library_is_complete(libraries: Path) -> None:
    commtrace.start(libraries / "log")
    assert "hook_a" not in sys.modules
    __import__("lib_a")
    assert events("hook_a") == [("install", 1)]
    assert "hook_b" not in sys.modules
    commtrace.stop()
    assert events("hook_a")[1:] == ["uninstall"]
    assert startup._follower not in sys.meta_path
    __import__("lib_b")
    assert "hook_b" not in sys.modules
    commtrace.start(libraries / "log")  # both libraries are imported already
    assert events("hook_a")[2:] == [("install", 1)]
    assert events("hook_b") == [("install", 1)]
    assert not (libraries / "log").exists()


def test_a_library_keeps_its_loader(libraries: Path) -> None:
    commtrace.start(libraries / "log")
    module = __import__("lib_a")
    loader: Any = module.__loader__
    assert type(loader).__name__ == "SourceFileLoader"
    assert loader.get_source("lib_a") == "VALUE = 1\n"


def test_an_import_that_fails_first(libraries: Path) -> None:
    (libraries / "lib_a.py").write_text("raise ImportError('not yet')\n")
    commtrace.start(libraries / "log")
    with pytest.raises(ImportError, match="not yet"):
        __import__("lib_a")
    (libraries / "lib_a.py").write_text("VALUE = 22\n")
    __import__("lib_a")
    assert events("hook_a") == [("install", 22)]


def test_a_hook_that_fails(libraries: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (libraries / "hook_a.py").write_text("def install(): raise KeyError('gone')\n")
    commtrace.start(libraries / "log")
    assert __import__("lib_a").VALUE == 1
    assert __import__("lib_b").VALUE == 1
    assert capfd.readouterr().err == "commtrace: cannot hook lib_a: KeyError: 'gone'. Its calls are not traced.\n"
    assert events("hook_b") == [("install", 1)]


def test_a_library_that_is_not_there(libraries: Path) -> None:
    (libraries / "lib_a.py").unlink()
    commtrace.start(libraries / "log")
    with pytest.raises(ModuleNotFoundError):
        __import__("lib_a")


def test_started_twice(libraries: Path) -> None:
    commtrace.start(libraries / "log")
    with pytest.raises(commtrace.CommtraceError, match=r"tracing is already on \(.*log\); call commtrace.stop\(\)"):
        commtrace.start(libraries / "other")
    commtrace.stop()
    commtrace.stop()
    assert session.settings is None


def test_a_setting_that_makes_no_sense_is_raised_to_who_calls(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMTRACE_DRAIN_MS", "x")
    with pytest.raises(commtrace.CommtraceError, match="COMMTRACE_DRAIN_MS=x"):
        commtrace.start(libraries / "log")
    assert session.settings is None


def test_start_and_stop_around_real_calls(nursery: Nursery, tmp_path: Path) -> None:
    """Each recording of a process is a run of its own, and no hooks are left between and after recordings."""
    statuses, outputs = nursery.run("starting", tmp_path / "untraced", tmp_path / "log", ranks=1, traced=False)
    assert statuses == [0], outputs
    first, second, third = processes.read_all(tmp_path / "log")
    runs = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert len(runs) == 3
    for left, calls in zip(sorted((first, second, third), key=lambda left: len(left.records)), (2, 3, 4), strict=True):
        assert len(left.records) == left.stats["calls"] == calls
        assert left.tables["process"][0]["recorder"] == nursery.recorder
        assert left.tables["end"][0]["reason"] == "stop"
        assert left.stats["hook_errors"] == 0
    assert not (tmp_path / "untraced").exists()
