"""Start-up time in ms that commtrace adds to a Python process that never communicates, with tracing off and on.

Give --python an interpreter with a plain install, because an editable install has its own start-up file, which costs
more than everything measured here. Bare is the same environment without commtrace's start-up line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial

import results
from measuring import Round, compared, in_turn


def main() -> None:
    """Run the benchmark and write its results."""
    parser = results.parser(__doc__, pairs=60)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has commtrace (%(default)s)")
    options = results.parsed(parser)
    off = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE")}
    python = os.path.abspath(options.python)
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        bare = partial(start, without_line(python, folder), off, folder)
        starts = {
            "tracing off": partial(start, python, off, folder),
            "tracing on": partial(start, python, {**off, "COMMTRACE": log}, folder),
        }
        rows = []
        for name, start_python in starts.items():
            if options.only in name:
                in_turn(bare, start_python, 1)  # fills caches
                rounds = [Round(*times) for times in in_turn(bare, start_python, options.pairs)]
                rows.append(compared("start of the interpreter", name, "ms", rounds))
                results.show(rows[-1])
        assert not os.path.exists(log)
    results.write("startup", rows, options)


def start(python: str, environ: Mapping[str, str], cwd: str) -> float:
    """Return the milliseconds of one start."""
    begin = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=dict(environ), cwd=cwd, check=True)
    return (time.perf_counter() - begin) * 1e3


def without_line(python: str, folder: str) -> str:
    """Make an environment with the same packages but without commtrace's start-up files; return its interpreter."""
    site = site_packages(python)
    bare = os.path.join(folder, "bare")
    subprocess.run([python, "-m", "venv", "--without-pip", bare], check=True)
    interpreter = os.path.join(bare, "bin", "python")
    target = site_packages(interpreter)
    for name in os.listdir(site):
        if name not in ("commtrace.pth", "commtrace.start"):
            os.symlink(os.path.join(site, name), os.path.join(target, name))
    return interpreter


def site_packages(python: str) -> str:
    """Return the site-packages directory of an interpreter."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
