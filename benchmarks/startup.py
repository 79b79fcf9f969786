"""What commtrace costs a Python process that never communicates: at interpreter start, off and on.

    python benchmarks/startup.py [PAIRS] [PYTHON]

PYTHON (unsaid: this one) has commtrace installed; give one with a plain install, because an editable one has a start-up
file of its own that costs more than everything measured here. Each round starts the interpreter once in each way, in an
order that changes from round to round; what is compared are the differences to the bare start of the same round, as
their median with a 95 % interval of it. `control` is a second bare start: what this machine cannot tell apart.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping


def start(python: str, environ: Mapping[str, str], cwd: str, *options: str) -> float:
    """Milliseconds of one start."""
    begin = time.perf_counter()
    subprocess.run([python, *options, "-c", "pass"], env=dict(environ), cwd=cwd, check=True)
    return (time.perf_counter() - begin) * 1e3


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and its 95 % interval by order statistics."""
    ordered = sorted(values)
    half = 0.98 * len(ordered) ** 0.5
    low, high = (max(0, min(len(ordered) - 1, round(len(ordered) / 2 + sign * half))) for sign in (-1, 1))
    return statistics.median(ordered), ordered[low], ordered[high]


def without_line(python: str, folder: str) -> str:
    """A program that is the interpreter without commtrace's start-up file: its site-packages, but for that."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    bare = os.path.join(folder, "bare")
    subprocess.run([python, "-m", "venv", "--without-pip", bare], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    interpreter = os.path.join(bare, "bin", "python")
    target = subprocess.run([interpreter, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    for name in os.listdir(site):
        if name not in ("commtrace.pth", "commtrace.start"):
            os.symlink(os.path.join(site, name), os.path.join(target, name))
    return interpreter


def main() -> None:
    """Measure and print."""
    pairs = int(sys.argv[1]) if sys.argv[1:] else 200
    python = sys.argv[2] if sys.argv[2:] else sys.executable
    off = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE")}
    with tempfile.TemporaryDirectory() as folder:
        bare = without_line(python, folder)
        ways = {
            "bare": lambda: start(bare, off, folder),
            "control": lambda: start(bare, off, folder),
            "off": lambda: start(python, off, folder),
            "on": lambda: start(python, {**off, "COMMTRACE": os.path.join(folder, "log")}, folder),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(pairs + 3):
            for way in random.sample([*ways], len(ways)):
                took = ways[way]()
                if round_ >= 3:  # the first ones fill caches
                    times[way].append(took)
        assert not os.path.exists(os.path.join(folder, "log"))
    print(f"bare start: median {statistics.median(times['bare']):.2f} ms, {pairs} rounds")
    for way in ("control", "off", "on"):
        median, low, high = interval([one - base for one, base in zip(times[way], times["bare"], strict=True)])
        print(f"{way:8} {median:+6.2f} ms  [{low:+.2f}, {high:+.2f}]")


if __name__ == "__main__":
    main()
