"""What the native recorder adds to a training step of two gloo ranks, to within a few thousandths.

On a small machine a step takes 10 % more or less than the one before, in waves of any length, so blocks of steps differ
as much as single ones do. Here the recorder is therefore taken out and put in again from step to step, within one
recording, and steps beside each other are compared, thousands of times. The recording's thread, which writes the log,
runs beside all of them alike: what it takes of a core stands in a row of its own, and belongs to what tracing costs.
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

NAME = "commtrace, native, with call sites"  # as it is unless something else is set
THREAD = f"{NAME}: drain thread"


def main() -> None:
    """Measure both programs."""
    parser = results.parser(__doc__, pairs=1500)
    options = results.parsed(parser)
    if "native" not in sides.recorders():
        parser.error("there is no native recorder here: `commtrace build` makes it")
    with cores_awake():
        rows = groups.run(programs, options, backend="gloo")
    results.write("native_step", rows, options)


@contextmanager
def cores_awake() -> Iterator[None]:
    """No core falls asleep: those of a virtual machine take long to wake up, now more, now less, at each message.

    What keeps them awake runs only where nothing else wants to (SCHED_IDLE). Steps then differ by a quarter less.
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
    """Those of step_time."""
    steps = {step_time.DDP: step_time.ddp_step(), step_time.BY_HAND: step_time.hand_written_step(dist)}
    return [row for case, step in steps.items() if options.only in case for row in measure(case, step, options.pairs)]


def measure(case: str, step: Callable[[], object], rounds: int) -> list[Row]:
    """What a step takes, and what the recording's thread takes of a core, in percent."""
    for _ in range(3):
        step()  # the first ones allocate, and DDP arranges its buckets
    shares: list[float] = []

    def read(run: Run, _: Path) -> None:
        cost = run.table("tracing_cost").iloc[0]
        # Calls of traced steps with their barriers, and the first one: what is called bare is bare.
        assert cost["calls"] == rounds * (step_time.CALLS + 1) + 1, cost
        shares.append(cost["drain_ns"] / cost["span_ns"] * 100)

    with sides.traced("native", read=read):
        dist.barrier()  # makes the log
        seconds = in_turn(lambda: once(step, traced=False), lambda: once(step, traced=True), rounds)
        switch_off()
    slowest = torch.tensor([one for some in seconds for one in some] + shares, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times = (slowest[:-1] * 1e3).view(-1, 3).tolist()
    return [
        groups.shown(compared(case, NAME, "ms", [Round(*one) for one in times])),
        groups.shown(Row(case, THREAD, "% of a core", side=slowest[-1].item())),
    ]


def once(step: Callable[[], object], *, traced: bool) -> float:
    """Seconds of one step. Before any, the recorder is taken out and put in, as that leaves its traces, too."""
    switch_off()
    torch_hook.install()
    if not traced:
        switch_off()
    dist.barrier()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def switch_off() -> None:
    """Nothing of commtrace's is on the way of a call or of a step any more; its recording stays."""
    torch_hook.uninstall()
    torch_hook.remove_kernels()


if __name__ == "__main__":
    main()
