"""python newest.py FOLDER: what breaks with the newest release of every library, as tests/versions/newest.json.

Installs what the registries have today (torch, DeepSpeed, transformers, accelerate, Lightning, mpi4py and the tools of
the tests, without constraints.txt) into FOLDER, then runs the default tests, and the programs of the frameworks. The
status is 1 if anything fails. `python tests/support/version_results.py` then writes the table in docs/versions.md.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).parents[1] / "support"))

import version_environments as environments
import version_results

FRAMEWORKS: Final = ("transformers", "accelerate", "lightning", "trl", "datasets")
SHOWN: Final = ("torch", "deepspeed", "transformers", "accelerate", "lightning", "mpi4py", "numpy", "pandas", "plotly")
SUITES: Final = {
    "default tests": ("--numprocesses", "2", "--dist", "loadfile"),
    "frameworks": ("-m", "external", "tests/external/test_frameworks.py", "-k", "not Megatron and not torchtitan"),
}


def main(folder: Path) -> int:
    """Install, run, and write the results. Returns the status."""
    python = environments.newest(folder, FRAMEWORKS)
    suites = {name: run(python, folder / f"{name.split()[0]}.xml", arguments) for name, arguments in SUITES.items()}
    search = [str(path) for path in (folder / "lib").glob("python*/site-packages")]
    found = {item.name.lower(): item.version for item in metadata.distributions(path=search)}
    versions = {"python": ".".join(map(str, sys.version_info[:3])), **{name: found[name] for name in SHOWN}}
    result = {"date": datetime.date.today().isoformat(), "versions": versions, "suites": suites}
    version_results.NEWEST.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(suite["failed"] for suite in suites.values()) else 0


def run(python: Path, report: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return numbers of passed and skipped tests, and the names of those that failed."""
    report.unlink(missing_ok=True)
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *arguments,
    ]
    done = subprocess.run(command, cwd=environments.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode} and wrote no report")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [
        case.get("name", "") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
