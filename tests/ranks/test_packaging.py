"""Plain, editable and sdist installations are complete, and their start-up line switches tracing on."""

from __future__ import annotations

import configparser
import functools
import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import processes
import pytest
import recorders
from processes import ROOT, Result

from commtrace.hooks.native import libraries

FOLDERS = ("commtrace", "commtrace/hooks", "commtrace/analyses")
"""The folders of the package; the last two are links, which `rglob` does not follow."""
SOURCES = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "commtrace", "hooks", "analyses")
STATE = (
    "import sys; on = 'commtrace.startup' in sys.modules\n"
    "print(on and sys.modules['commtrace.recording.session'].session.settings.directory)"
)

# Not with find_spec: looking for pip stops setuptools from replacing distutils, and then torch's cpp_extension, which
# another test imports later, fails.
pytestmark = pytest.mark.skipif(
    not {"pip", "setuptools"} <= {distribution.name for distribution in metadata.distributions()},
    reason="pip and setuptools are not installed",
)


def copy_sources(to: Path) -> Path:
    """Copy the files of the checkout from which packages are built."""
    to.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, to / name)
    return to


def build(source: Path, what: str, to: Path, **variables: Any) -> Path:
    """Call the build backend as pip does, offline."""
    to.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; import sys; name = build_meta.{what}({str(to)!r}); print(name)"
    result = processes.run([sys.executable, "-W", "ignore", "-c", code], cwd=source, **variables)
    assert result.status == 0, result.err
    return to / result.out.split()[-1]


class Wheels:
    """Wheels by build method; each is built at its first use."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._source = folder, copy_sources(folder / "source")

    @functools.cached_property
    def _unpacked(self) -> Path:
        sdist = build(self._source, "build_sdist", self._folder / "sdist")
        shutil.unpack_archive(sdist, self._folder / "unpacked")
        (unpacked,) = (self._folder / "unpacked").iterdir()
        return unpacked

    @functools.cache  # noqa: B019  (one object per module)
    def __getitem__(self, way: str) -> Path:
        source = self._unpacked if way == "sdist" else self._source
        return build(source, "build_editable" if way == "editable" else "build_wheel", self._folder / way)


def build_with_libraries(folder: Path) -> Path:
    """Return a wheel that ships the libraries of this environment, as wheels/build_wheels.py makes it."""
    compiled, suffix = folder / "compiled", sysconfig.get_config_var("EXT_SUFFIX")
    compiled.mkdir()
    shutil.copy(libraries.MPI.build(), compiled / f"{libraries.MPI.name}{suffix}")
    tag = libraries.TorchBuild.of_this_environment().tag
    shutil.copy(libraries.TORCH.build(), compiled / f"{libraries.TORCH.name}{tag}{suffix}")
    source = copy_sources(folder / "source")
    return build(source, "build_wheel", folder / "binary", COMMTRACE_LIBRARIES=compiled)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"))


def test_two_source_distributions_of_equal_files_are_equal(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("archives", ROOT / "wheels/archives.py")
    assert spec is not None
    assert spec.loader is not None
    archives = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(archives)
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    (source / "link").symlink_to("folder/file")
    packed = []
    for name, seconds in (("first", 1_000.25), ("second", 2_000.5)):
        (source / "folder" / "file").write_text("text")
        os.utime(source / "folder" / "file", (seconds, seconds))
        archive = Path(shutil.make_archive(str(tmp_path / name), "gztar", source))
        archives.repack(archive, tmp_path / f"{name}-repacked.tar.gz", 3_000)
        packed.append((archive.read_bytes(), (tmp_path / f"{name}-repacked.tar.gz").read_bytes()))
    (first, repacked), (second, again) = packed
    assert first != second
    assert repacked == again
    shutil.unpack_archive(tmp_path / "first-repacked.tar.gz", tmp_path / "unpacked", filter="data")
    assert (tmp_path / "unpacked" / "link").read_text() == "text"


class Environment:
    """Virtual environment that contains only what is installed from a wheel."""

    def __init__(self, path: Path) -> None:
        venv.create(path, symlinks=True)
        self.path = path
        self.python = path / "bin" / "python"
        (self.site,) = path.glob("lib/*/site-packages")

    def pip(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python)]
        subprocess.run([*pip, *map(str, arguments)], check=True, capture_output=True, timeout=60)

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "--no-compile", wheel)

    def run(self, code: str = STATE, cwd: Path | None = None, **variables: Any) -> Result:
        return processes.run([self.python, "-c", code], cwd=cwd, PYTHONPATH="", **variables)


@pytest.fixture(scope="module")
def environment(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """Return a function that returns the environment in which a wheel is installed."""
    made: dict[str, Environment] = {}

    def make(way: str) -> Environment:
        if way not in made:
            made[way] = Environment(tmp_path_factory.mktemp(way) / "venv")
            made[way].install(wheels[way])
        return made[way]

    return make


SDIST, EDITABLE = (pytest.param(way, marks=pytest.mark.exhaustive) for way in ("sdist", "editable"))


def test_every_package_is_listed() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    existing = set()
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("__init__.py"):
            existing.add(".".join(file.parent.relative_to(ROOT).parts))
    assert listed == existing
    for folder in FOLDERS:  # a module in a folder that is not a package would be left out silently
        for file in (ROOT / folder).rglob("*.py"):
            assert (file.parent / "__init__.py").exists() or file.parent.name == "bootstrap", file


@pytest.mark.parametrize("way", ["plain", SDIST])
def test_every_module_is_in_the_wheel(way: str, wheels: Wheels) -> None:
    names = set(zipfile.ZipFile(wheels[way]).namelist())
    expected = {"commtrace.pth", "commtrace.start", "commtrace/py.typed"}
    for folder in FOLDERS:
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yml", ".html", ".css", ".js", ".json"):
                expected.add(str(file.relative_to(ROOT)))
    assert {name for name in names if ".dist-info/" not in name} >= expected
    assert not [name for name in names if name.split("/")[0] not in ("commtrace", "commtrace.pth", "commtrace.start")
                and ".dist-info/" not in name]  # fmt: skip


@pytest.mark.parametrize("way", ["plain", SDIST, EDITABLE])
def test_the_variable_switches_on(way: str, environment: Callable[[str], Environment], tmp_path: Path) -> None:
    installed = environment(way)
    assert (installed.site / "commtrace.pth").exists()
    assert installed.run() == (0, "False\n", "")
    assert installed.run(COMMTRACE="0") == (0, "False\n", "")
    assert installed.run(COMMTRACE="log", cwd=tmp_path) == (0, f"{tmp_path / 'log'}\n", "")
    for module in ("commtrace.hooks", "commtrace.analyses", "commtrace.commands.run"):
        assert installed.run(f"import importlib.util; assert importlib.util.find_spec({module!r})").status == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_line_twice_is_harmless(wheels: Wheels, tmp_path: Path) -> None:
    installed = Environment(tmp_path / "venv")
    installed.install(wheels["plain"])
    shutil.copy(installed.site / "commtrace.pth", installed.site / "another.pth")
    assert installed.run(COMMTRACE="log", cwd=tmp_path) == (0, f"{tmp_path / 'log'}\n", "")
    count = "import sys; print(sum(type(finder).__name__ == '_ImportFollower' for finder in sys.meta_path))"
    assert installed.run(count, COMMTRACE="log").out == "1\n"
    wrong = installed.run("pass", COMMTRACE="log", COMMTRACE_DRAIN_MS="x")
    assert wrong.err.count("\n") == 1


@pytest.mark.parametrize("way", ["plain", EDITABLE])
def test_uninstalling_takes_the_line_away(way: str, wheels: Wheels, tmp_path: Path) -> None:
    installed = Environment(tmp_path / "venv")
    installed.install(wheels[way])
    assert (installed.site / "commtrace.pth").exists()
    installed.pip("uninstall", "--yes", "commtrace")
    assert list(installed.path.rglob("*commtrace*")) == []
    assert installed.run(COMMTRACE="log") == (0, "False\n", "")


@pytest.mark.long
def test_a_wheel_with_libraries_records_without_a_compiler(tmp_path: Path) -> None:
    recorders.needs("native")
    wheel = build_with_libraries(tmp_path)
    assert not wheel.name.endswith("-none-any.whl")  # pip installs it only where its libraries are usable
    installed = Environment(tmp_path / "venv")
    installed.install(wheel)
    (installed.site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    program = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
dist.all_reduce(torch.ones(3))
"""
    bare: dict[str, Any] = {"PATH": tmp_path, "CXX": "none", "XDG_CACHE_HOME": tmp_path / "empty"}
    result = installed.run(program, COMMTRACE=tmp_path / "log", COMMTRACE_RECORDER="auto", **bare)
    assert result.status == 0, result.err
    log = processes.read_one(tmp_path / "log")
    assert log.tables["process"][0]["recorder"] == "native"
    assert len(log.records) == 1
    command = processes.run([installed.path / "bin/commtrace", "build"], PYTHONPATH="", **bare)
    assert command.status == 0, command.err
    shipped = installed.site / "commtrace/hooks/native/shipped"
    assert command.out.splitlines() == [str(path) for path in sorted(shipped.iterdir())]
    assert not (tmp_path / "empty").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("way", "builds"), [("plain", 20), ("sdist", 1)])
def test_interrupted_and_simultaneous_builds_leave_one_library_each(
    way: str, builds: int, environment: Callable[[str], Environment], tmp_path: Path
) -> None:
    """The real compiler builds what a wheel installs, with this environment's torch."""
    recorders.needs("native")
    installed, cache, compiler = environment(way), tmp_path / "cache", tmp_path / "compiler"
    (installed.site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    compiler.write_text('#!/bin/sh\necho >> "$0.calls"\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    variables = processes.environment(XDG_CACHE_HOME=cache, CXX=compiler, PYTHONPATH="")

    def start() -> subprocess.Popen[bytes]:
        command = [str(installed.path / "bin" / "commtrace"), "build"]
        return subprocess.Popen(command, env=variables, cwd=tmp_path, start_new_session=True, stderr=subprocess.DEVNULL)

    delays = random.Random(7)
    for number in range(builds):
        with start() as build:
            try:
                assert build.wait(delays.uniform(0.5, 12)) == 0  # a fast machine may finish the build
            except subprocess.TimeoutExpired:
                if number % 2:
                    build.kill()  # its compilers keep running
                else:
                    os.killpg(build.pid, signal.SIGINT)  # as Ctrl-C does
    calls = Path(f"{compiler}.calls")
    before, begin = len(calls.read_text()), time.monotonic()
    running = [start() for _ in range(builds)]
    assert [build.wait(1200) for build in running] == [0] * builds
    print(f"{way}: {builds} builds at once in {time.monotonic() - begin:.0f} s")  # read with `pytest -s`

    both = (libraries.MPI, libraries.TORCH)
    assert len(calls.read_text()) - before <= sum(len(library.sources) + 1 for library in both)  # each once at most
    files = sorted(str(path.relative_to(cache)) for path in cache.rglob("*"))
    assert [re.sub("-[0-9a-f]{20}", "", path) for path in files] == [
        "commtrace",
        *(
            path
            for library in both
            for path in (f"commtrace/{library.name}", f"commtrace/{library.name}/{library.name}.so")
        ),
    ]
    load = "from commtrace.hooks.native.libraries import MPI, TORCH; print(MPI.load().__file__, TORCH.load().__file__)"
    loaded = installed.run(load, XDG_CACHE_HOME=cache)
    assert loaded.status == 0, loaded.err
    assert all(path.startswith(str(cache)) for path in loaded.out.split())


@pytest.mark.long
@pytest.mark.parametrize("damage", ["removed", "broken"])
def test_a_package_that_is_damaged_stops_no_program(damage: str, wheels: Wheels, tmp_path: Path) -> None:
    installed = Environment(tmp_path / "venv")
    installed.install(wheels["plain"])
    if damage == "removed":
        shutil.rmtree(installed.site / "commtrace")
    else:
        (installed.site / "commtrace" / "startup.py").write_text("this is not Python")
    program = "import sys; print('out'); sys.exit(3)"
    assert installed.run(program) == (3, "out\n", "")
    traced = installed.run(program, COMMTRACE="log")
    assert (traced.status, traced.out) == (3, "out\n")
    assert "commtrace.pth" in traced.err  # Python names the start-up file that failed, and continues
