"""`make demo`: the same small GPT-NeoX model under DDP and ZeRO 0 to 3, each traced by nothing but a variable.

Ends with two pages: the run whose volume surprises most, and all of them side by side. Prints the commands that it
runs, so that they can be typed as well.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

RUNS = {
    "ddp": ["--engine", "ddp"],
    "zero0": ["--zero-stage", "0"],
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ["--zero-stage", "3"],
}
TRAIN = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "examples.gpt_neox.train", "demo.yml"]
SECONDS = 300  # of one command: a hang shows as an error, not as a wait


def main(argv: list[str] | None = None) -> int:
    """Train and report each run, then write the pages; the status of the first command that failed, else 0."""
    logs = Path((sys.argv[1:] if argv is None else argv)[0])
    if logs.exists():
        print(f"{logs} exists; remove it or name another directory", file=sys.stderr)
        return 1
    for name, options in RUNS.items():
        status = run([*TRAIN, *options], COMMTRACE=str(logs / name)) or run(["commtrace", "report", str(logs / name)])
        if status:
            return status
    runs = [str(logs / name) for name in RUNS]
    pages = {"zero1.html": [str(logs / "zero1")], "side-by-side.html": runs}
    status = max(run(["commtrace", "report", *of, "--html", str(logs / page)]) for page, of in pages.items())
    if not status:
        print("\nOpen in a browser:", *((logs / page).resolve().as_uri() for page in pages), sep="\n  ")
    return status


def run(command: list[str], **variables: str) -> int:
    """Show a command, run it with these variables beside the environment's, and return its status."""
    print("\n$", *(f"{name}={value}" for name, value in variables.items()), shlex.join(command), flush=True)
    # The programs of this environment, whether it is activated or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    begin = time.monotonic()
    try:
        status = subprocess.run(command, env={**os.environ, "PATH": path, **variables}, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        print(f"not finished after {SECONDS} s", file=sys.stderr)
        return 124
    print(f"({time.monotonic() - begin:.0f} s)", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
