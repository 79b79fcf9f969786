"""Time and memory of a command with two versions of commtrace, by turns: what else the machine does affects both.

    python benchmarks/versions_by_turns.py --pairs 3 OLD/.venv/bin/python NEW/.venv/bin/python report --json DIR

prints for each version the median processor time, the median wall time and the peak memory, and the ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import commands
import numpy as np


def main() -> None:
    """Run the command with both versions, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs=2, metavar="PYTHON", help="Python of the old and of the new version")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each version (%(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command of commtrace, with its arguments")
    options = parser.parse_args()
    runs: dict[str, list[commands.Taken]] = {python: [] for python in options.pythons}
    for _ in range(options.pairs):
        for python in options.pythons:
            # Not `python -m`, which imports what is in the current folder, whichever Python it is.
            command = str(Path(python).with_name("commtrace"))
            runs[python].append(commands.measured([command, *options.command]))
    medians = []
    for python, own in runs.items():
        processor, seconds = (
            float(np.median([getattr(run, name) for run in own])) for name in ("processor", "seconds")
        )
        medians.append((processor, seconds, max(run.mebibytes for run in own)))
        print(f"{python}: processor {processor:.2f} s, wall {seconds:.2f} s, memory {medians[-1][2]:.0f} MiB")
    ratios = (new / old for old, new in zip(*medians, strict=True))
    print("new / old: processor {:.2f}, wall {:.2f}, memory {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
