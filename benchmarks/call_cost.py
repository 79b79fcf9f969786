"""What recording adds to a call: the same loop over a process group that sends nothing, untraced and traced in turn.

    python benchmarks/call_cost.py

No network and no second process, so what is left is the way into `torch.distributed` and the recording. Both sides run
in one process, in pairs whose order alternates; the control pairs untraced with untraced and shows the noise.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import commtrace
from commtrace.hooks.native import library
from commtrace.hooks.native import recorder as native


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
    sides: dict[str, Callable[[], float]] = {
        "control: untraced again": calls,
    }
    for recorder in recorders():
        for sites, words in ((False, "without"), (True, "with")):
            name = f"{recorder} recorder, {words} call sites"
            sides[name] = functools.partial(traced, calls, recorder=recorder, sites=sites)
    for name, side in sides.items():
        print_row(name, [pair(calls, side, i) for i in range(options.pairs)])


def recorders() -> list[str]:
    """The recorders that there are."""
    if library.path().exists():
        return ["python", "native"]
    print("The native recorder is not built; `commtrace build` builds it.\n")
    return ["python"]


def traced(calls: Callable[[], float], *, recorder: str, sites: bool) -> float:
    """Microseconds per call while recording; starting and stopping are not counted."""
    os.environ["COMMTRACE_SITES"] = str(int(sites))
    os.environ["COMMTRACE_RECORDER"] = recorder
    with tempfile.TemporaryDirectory() as directory:
        commtrace.start(directory)
        try:
            dist.all_reduce(torch.ones(1))  # the first call begins the recording
            time.sleep(0.05)  # and has the drain thread calibrate itself
            return calls()
        finally:
            commtrace.stop()
            native.take_out()


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
