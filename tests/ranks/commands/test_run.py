"""`commtrace run` does the same as the variable, also where Python does not read start-up files."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import venv
from pathlib import Path
from typing import Any

import processes
import pytest
from processes import ROOT, Result

from commtrace.commands import run

MAIN = "import sys; from commtrace.cli import main; sys.exit(main())"
STATE = (
    "import sys; on = 'commtrace.startup' in sys.modules\n"
    "print(on and sys.modules['commtrace.recording.session'].session.settings.directory)"
)


def commtrace_run(*arguments: object, cwd: Path, **variables: Any) -> Result:
    """Run `commtrace run` from the installation under test."""
    return processes.run([sys.executable, "-c", MAIN, "run", *map(str, arguments)], cwd=cwd, **variables)


def test_the_program_is_traced(tmp_path: Path) -> None:
    for arguments, directory in ((["--out", "a"], "a"), ([], "commtrace-logs"), (["--"], "commtrace-logs")):
        result = commtrace_run(*arguments, sys.executable, "-c", STATE, cwd=tmp_path)
        assert result == (0, f"{tmp_path / directory}\n", "")
    assert commtrace_run(sys.executable, "-c", STATE, cwd=tmp_path, COMMTRACE="b").out == f"{tmp_path / 'b'}\n"
    both = commtrace_run("--out", "c", sys.executable, "-c", STATE, cwd=tmp_path, COMMTRACE="b")
    assert both.out == f"{tmp_path / 'c'}\n"


def test_status_signals_and_arguments_are_the_programs(tmp_path: Path) -> None:
    assert commtrace_run("sh", "-c", "exit 7", cwd=tmp_path).status == 7
    assert commtrace_run("sh", "-c", "kill -TERM $$", cwd=tmp_path).status == -signal.SIGTERM
    show = "import sys; print(sys.argv[1:])"
    result = commtrace_run(sys.executable, "-c", show, "--out", "x", "--", "-h", cwd=tmp_path)
    assert result.out == "['--out', 'x', '--', '-h']\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "no program given"),
        (["no-such-program"], {}, "no-such-program: no such program on PATH"),
        (["--out", "/dev/null", "true"], {}, "COMMTRACE=/dev/null"),
        (["true"], {"COMMTRACE_DRAIN_MS": "x"}, "COMMTRACE_DRAIN_MS=x"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], variables: dict[str, Any], message: str, tmp_path: Path) -> None:
    result = commtrace_run(*arguments, cwd=tmp_path, **variables)
    assert result.status != 0
    assert message in result.err
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err


# ---- a module tree that is only on PYTHONPATH ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a module tree as Spack and EasyBuild install it, where Python does not read start-up files."""
    folder = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "commtrace", folder / "commtrace", ignore=ignore)
    (folder / "commtrace.pth").write_text(
        "import os; os.environ.get('COMMTRACE') and __import__('commtrace.startup')\n"
    )
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an interpreter without commtrace."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def run_in_tree(python: Path, tree: Path, code: str, *path: Path, cwd: Path, **variables: Any) -> Result:
    command: list[str | Path] = [python, "-c", MAIN, "run", "--out", "log", python, "-c", code]
    return processes.run(command, cwd=cwd, PYTHONPATH=os.pathsep.join(map(str, (tree, *path))), **variables)


def test_a_module_tree_is_traced(python: Path, tree: Path, tmp_path: Path) -> None:
    plain = processes.run([str(python), "-c", STATE], cwd=tmp_path, PYTHONPATH=tree, COMMTRACE="log")
    assert plain.out == "False\n", "the variable alone suffices: this test proves nothing"
    assert run_in_tree(python, tree, STATE, cwd=tmp_path) == (0, f"{tmp_path / 'log'}\n", "")
    find = "import commtrace.hooks, commtrace.analyses; print(commtrace.hooks.__file__)"
    assert run_in_tree(python, tree, find, cwd=tmp_path).out == f"{tree / 'commtrace/hooks/__init__.py'}\n"


def test_children_of_the_program_are_traced_too(python: Path, tree: Path, tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STATE!r}])"
    assert run_in_tree(python, tree, code, cwd=tmp_path).out == f"{tmp_path / 'log'}\n"


def test_the_programs_own_sitecustomize_runs(python: Path, tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("VALUE = 5\nprint('mine', __name__, __file__)\n")
    code = STATE + "\nimport sitecustomize; print(sitecustomize.VALUE)"
    result = run_in_tree(python, tree, code, folder, cwd=tmp_path)
    assert result.out.count("mine sitecustomize") == 2, "once in each of the two interpreters"
    assert result.out.splitlines()[1:] == [
        f"mine sitecustomize {folder / 'sitecustomize.py'}",
        str(tmp_path / "log"),
        "5",
    ]
    assert result.err == ""


def test_the_programs_own_sitecustomize_fails(python: Path, tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("raise KeyError('mine')\n")
    result = run_in_tree(python, tree, STATE, folder, cwd=tmp_path)
    assert (result.status, result.out) == (0, f"{tmp_path / 'log'}\n")
    assert result.err.count("Error in sitecustomize") == 2  # Python's own message, once in each interpreter
    assert "KeyError: 'mine'" in result.err


def test_a_tree_that_is_broken_stops_no_program(python: Path, tree: Path, tmp_path: Path) -> None:
    broken = tmp_path / "tree"
    shutil.copytree(tree, broken)
    (broken / "commtrace" / "startup.py").write_text("this is not Python")
    path = os.pathsep.join(map(str, (broken / "commtrace" / "bootstrap", broken)))
    program: list[str | Path] = [python, "-c", "print('out'); raise SystemExit(3)"]
    result = processes.run(program, cwd=tmp_path, PYTHONPATH=path, COMMTRACE="log")
    assert (result.status, result.out) == (3, "out\n")
    assert result.err.startswith("commtrace: cannot start: ")
    assert result.err.count("\n") == 1
    assert processes.run(program, cwd=tmp_path, PYTHONPATH=path).err == ""


def test_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_has_startup_file", lambda: True)
    given = {"PATH": "/bin", "PYTHONPATH": "/a"}
    assert run.traced(given, None) == {**given, "COMMTRACE": str(tmp_path / "commtrace-logs")}
    monkeypatch.setattr(run, "_has_startup_file", lambda: False)
    bootstrap = str(Path(run.__file__).parents[1] / "bootstrap")
    assert run.traced({}, "x") == {"COMMTRACE": str(tmp_path / "x"), "PYTHONPATH": bootstrap}
    assert run.traced(given, "x")["PYTHONPATH"] == f"{bootstrap}:/a"
