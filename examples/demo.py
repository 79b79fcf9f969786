"""Train the same small GPT-NeoX model under DDP and ZeRO 0 to 3, traced by setting COMMTRACE: `make demo`.

Writes two pages at the end: ZeRO-1, and all runs side by side. Prints each command before it runs it.
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
SECONDS = 300  # timeout of one command


def main(argv: list[str] | None = None) -> int:
    """Train and report each run, then write the pages; return the status of the first command that failed, or 0."""
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
    status = max(run(["commtrace", "report", *shown, "--html", str(logs / page)]) for page, shown in pages.items())
    if not status:
        print("\nOpen in a browser:", *((logs / page).resolve().as_uri() for page in pages), sep="\n  ")
    return status


def run(command: list[str], **variables: str) -> int:
    """Print and run a command with additional environment variables, and return its status."""
    print("\n$", *(f"{name}={value}" for name, value in variables.items()), shlex.join(command), flush=True)
    # Find the programs of this environment even if it is not activated.
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
