"""What recording adds to a call: the same loop over a process group that sends nothing, untraced and traced in turn.

    python benchmarks/call_cost.py

No network and no second process, so what is left is the way into `torch.distributed` and the recording. Both sides run
in one process, in pairs whose order alternates; the control pairs untraced with untraced and shows the noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import commtrace


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--calls", type=int, default=2000, help="calls of one measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    tensor = torch.ones(1024)

    def calls() -> float:
        begin = time.perf_counter()
        for _ in range(options.calls):
            dist.all_reduce(tensor)
        return (time.perf_counter() - begin) / int(options.calls) * 1e6

    calls()
    print("| all_reduce on a fake process group | bare | measured | added | ratio |")
    print("| --- | --- | --- | --- | --- |")
    sides = {
        "control: untraced again": calls,
        "Python recorder, without call sites": lambda: traced(calls, sites=False),
        "Python recorder, with call sites": lambda: traced(calls, sites=True),
    }
    for name, side in sides.items():
        print_row(name, [pair(calls, side, i) for i in range(options.pairs)])


def traced(calls: Callable[[], float], *, sites: bool) -> float:
    """Microseconds per call while recording; starting and stopping are not counted."""
    os.environ["COMMTRACE_SITES"] = str(int(sites))
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(directory)
        try:
            dist.all_reduce(torch.ones(1))  # the first call begins the recording
            time.sleep(0.05)  # and has the drain thread calibrate itself
            return calls()
        finally:
            commtrace.stop()


def pair(bare: Callable[[], float], other: Callable[[], float], i: int) -> tuple[float, float]:
    """One measurement of each, whichever first."""
    if i % 2:
        second, first = other(), bare()
        return first, second
    return bare(), other()


def print_row(name: str, pairs: list[tuple[float, float]]) -> None:
    """Medians over the pairs, in microseconds a call."""
    bare = statistics.median(first for first, _ in pairs)
    added = statistics.median(second - first for first, second in pairs)
    ratio = statistics.median(second / first for first, second in pairs)
    measured = statistics.median(second for _, second in pairs)
    print(f"| {name} | {bare:.2f} us | {measured:.2f} us | {added:+.2f} us | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
