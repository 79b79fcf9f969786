"""Time that the native recorder adds to a training step of two gloo ranks, to within a few thousandths.

On a small machine, step times fluctuate by 10 % in waves of any length, so blocks of steps differ as much as single
steps do. This benchmark therefore removes and installs the recorder between steps, within one recording, and compares
neighbouring steps thousands of times. The drain thread, which writes the log, runs during all of these steps. Its share
of a core is reported in a separate row, and is part of the cost of tracing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import groups
import results
import sides
import step_time
import torch
import torch.distributed as dist
from measuring import Round, Row, compared, in_turn

from commtrace.hooks.torch import hook as torch_hook
from commtrace.run import Run

NAME = "commtrace, native, with call sites"  # the default
THREAD = f"{NAME}: drain thread"


def main() -> None:
    """Run the benchmark on both programs, and write its results."""
    parser = results.parser(__doc__, pairs=1500)
    options = results.parsed(parser)
    if "native" not in sides.recorders():
        parser.error("the native recorder is not built; run `commtrace build`")
    with cores_awake():
        rows = groups.run(programs, options, backend="gloo")
    results.write("native_step", rows, options)


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep all cores awake: the wake-up time of a virtual core, at each message, is long and varies.

    The processes that do so run only on cores that are otherwise idle (SCHED_IDLE). Steps then vary by a quarter less.
    """
    program = "import os\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", program]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def programs(options: argparse.Namespace) -> list[Row]:
    """Return the rows of the programs of step_time."""
    steps = {step_time.DDP: step_time.ddp_step(), step_time.BY_HAND: step_time.hand_written_step(dist)}
    return [row for case, step in steps.items() if options.only in case for row in measure(case, step, options.pairs)]


def measure(case: str, step: Callable[[], object], rounds: int) -> list[Row]:
    """Return the time of a step, and the drain thread's share of a core in percent."""
    for _ in range(3):
        step()  # the first steps allocate memory, and DDP rebuilds its buckets
    shares: list[float] = []

    def read(run: Run, _: Path) -> None:
        cost = run.table("tracing_cost").iloc[0]
        # The calls and the barrier of each traced step, and the first barrier: none of a bare step.
        assert cost["calls"] == rounds * (step_time.CALLS + 1) + 1, cost
        shares.append(cost["drain_ns"] / cost["span_ns"] * 100)

    with sides.traced("native", read=read):
        dist.barrier()  # creates the log
        seconds = in_turn(lambda: once(step, traced=False), lambda: once(step, traced=True), rounds)
        switch_off()
    slowest = torch.tensor([time_ for times in seconds for time_ in times] + shares, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = (slowest[:-1] * 1e3).view(-1, 3).tolist()
    return [
        groups.shown(compared(case, NAME, "ms", [Round(*triple) for triple in times])),
        groups.shown(Row(case, THREAD, "% of a core", side=slowest[-1].item())),
    ]


def once(step: Callable[[], object], *, traced: bool) -> float:
    """Return the seconds of one step. The recorder is reinstalled before every step, since this affects times, too."""
    switch_off()
    torch_hook.install()
    if not traced:
        switch_off()
    dist.barrier()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def switch_off() -> None:
    """Remove commtrace's hooks from calls and steps; its recording continues."""
    torch_hook.uninstall()
    torch_hook.remove_kernels()


if __name__ == "__main__":
    main()
