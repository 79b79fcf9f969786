"""Instructions that recording adds to a training step, counted by valgrind: also on a busy machine, unlike times.

A training of a tiny model on a fake process group of eight ranks, where nothing is sent (DDP: on gloo with one rank),
runs under callgrind with and without the recorder. Counted are the instructions of the thread that trains, in each of
several steps after the first ones, without garbage collections, and in several processes a side: where memory lies
decides which keys of a hash table collide, so processes of the same program differ, too. Each has an environment of
another size, which moves its memory. That is no time: what recording costs beyond its instructions, as caches that it
displaces, shows in `step_cost` only.

Needs valgrind with its headers, a C compiler and, for ZeRO, DeepSpeed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import results
import sides
from measuring import Round, Row, compared
from training_steps import SCHEMES, TINY

from commtrace.schema import Purpose

REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_ZERO_STATS; CALLGRIND_START_INSTRUMENTATION; }
void end(const char* name) { CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS_AT(name); }
"""
RANKS, WARM = 8, 10
SIDES = ("bare", "again", "native", "python")
UNMARKED = ("native, unmarked", "native, unmarked again")
"""The native recorder, whose calls have no purposes; twice."""
ALL_SIDES = (*SIDES, *UNMARKED)
WITHOUT_MARKS = {("DDP", side) for side in UNMARKED}
"""The calls of DDP's reducer have their purpose without a mark."""


def main() -> None:
    """Count the instructions of all programs, and write the results."""
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted in a process")
    parser.add_argument("--processes", type=int, default=4, help="processes of each side")
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "SIDE"), help=argparse.SUPPRESS)
    parser.add_argument("--requests", help=argparse.SUPPRESS)
    options = results.parsed(parser, steps=results.QUICK_PAIRS, processes=1)
    if options.child:
        program, side = options.child
        train(program, side, options.steps, options.requests)
        return
    programs = [name for name in SCHEMES if options.only in name]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        requests = compiled(Path(folder))
        cases = [case for case in product(programs, ALL_SIDES) if case not in WITHOUT_MARKS]
        processes = [(case, number) for number in range(options.processes) for case in cases]
        counts: dict[tuple[str, str], list[Counted]] = {case: [] for case in cases}
        run = partial(counted, steps=options.steps, requests=requests, folder=Path(folder))
        for (case, _), result in zip(processes, pool.map(lambda process: run(*process), processes), strict=True):
            counts[case].append(result)
    rows = [row for program in programs for row in rows_of(program, counts)]
    for row in rows:
        results.show(row)
    results.write("step_instructions", rows, options)


def compiled(folder: Path) -> Path:
    """Compile valgrind's requests, which a program under valgrind makes, and return the library."""
    source, library = folder / "requests.c", folder / "requests.so"
    source.write_text(REQUESTS)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return library


class Counted(NamedTuple):
    """What one process counts."""

    steps: list[int]
    """Instructions of the training thread in each step."""
    calls: int
    """Calls of a step; 0 without recorder."""


def counted(case: tuple[str, str], number: int, *, steps: int, requests: Path, folder: Path) -> Counted:
    """Run a process of a side."""
    program, side = case
    out = folder / re.sub(r"\W+", "-", f"{program}-{side}-{number}")
    child = ["--child", program, side, "--steps", str(steps), "--requests", str(requests)]
    result = subprocess.run(
        [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes",
            f"--callgrind-out-file={out}", sys.executable, __file__, *child,
        ],
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "DS_ACCELERATOR": "cpu",
            "MOVES_MEMORY": "." * 512 * (number * len(ALL_SIDES) + ALL_SIDES.index(side)),
        },
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    if result.returncode:
        raise RuntimeError(f"{program}, {side}: status {result.returncode}\n{result.stdout}\n{result.stderr[-4000:]}")
    calls = re.search(r"^calls (\d+)$", result.stdout, re.MULTILINE)
    return Counted([instructions(out, step) for step in range(steps)], int(calls[1]) if calls else 0)


def instructions(out: Path, step: int) -> int:
    """Return the instructions of the first thread in a step, from callgrind's dump."""
    for path in out.parent.glob(f"{out.name}.*-01"):
        text = path.read_text()
        if f"Client Request: step{step}\n" in text:
            total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
            if total:
                return int(total[1])
    raise RuntimeError(f"{out}: no count of step {step}")


def rows_of(program: str, counts: Mapping[tuple[str, str], Sequence[Counted]]) -> list[Row]:
    """Return a row for each recorder, in thousands of instructions. The control is other processes without recorder.

    The last row is the share of purposes: the native recorder beside itself without them.
    """
    rows = []
    for side, baselines, name in (
        *((side, SIDES[:2], f"commtrace, {side}, with call sites") for side in SIDES[2:]),
        ("native", UNMARKED, "of it: purposes, native"),
    ):
        if (program, baselines[0]) in WITHOUT_MARKS:
            continue
        of_sides = [counts[program, which] for which in (*baselines, side)]
        steps = ([number / 1000 for process in processes for number in process.steps] for processes in of_sides)
        rounds = [Round(*triple) for triple in zip(*steps, strict=True)]
        calls = of_sides[-1][0].calls
        rows.append(compared(f"step of {program}, {calls} calls", name, "thousand instructions", rounds))
    return rows


# ---- the training ----------------------------------------------------------------------------------------------------


def train(program: str, side: str, steps: int, requests: str) -> None:
    """Train a few steps, and count the instructions of each of the last ones."""
    import torch
    import torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import commtrace

    dist: Any = torch.distributed  # its stubs are incomplete
    valgrind, log = ctypes.CDLL(requests), tempfile.mkdtemp()
    recorder = side.partition(",")[0]
    if side in UNMARKED:
        sides.without_purposes()
    if recorder in sides.recorders():
        os.environ["COMMTRACE_RECORDER"] = recorder
        commtrace.start(log)
    torch.manual_seed(0)
    if program == "DDP":  # which needs results
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    step = SCHEMES[program](TINY)
    for _ in range(WARM):
        step()
    gc.collect()
    gc.disable()  # a collection, of as many instructions as recording 100 calls, would be in any step
    for number in range(steps):
        valgrind.begin()
        step()
        valgrind.end(f"step{number}".encode())
    if recorder in sides.recorders():
        commtrace.stop()
        run = commtrace.open(log)
        sides.check(run, recorder)
        has_purposes = bool((run.events()["purpose"] == Purpose.GRADIENTS.value).any())
        assert has_purposes == (side not in UNMARKED), "purposes are recorded where they should be"
        print("calls", int((run.events()["step"] == WARM).sum()))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still run


if __name__ == "__main__":
    main()
