"""What recording adds to a training step: one job that records the steps of one turn in three.

A turn is a few steps, of which the first is not timed. Before it, all ranks switch the recorder on or off, each time
both ways (`switching`). In a round, three turns follow each other in an order that changes: not recorded, not recorded
again as a control, and recorded. A turn's time is the slowest rank's, its processor time the sum
over all threads of all ranks. The thread that writes the log runs in all turns: its share of a core has its own row.

Turns of one process are compared, because processes of one program differ by up to 3 % on a small machine: where memory
lies makes one faster or slower. The recorded turn of a round is compared with the mean of the two others, and one of
these with the other one; the trimmed means over all rounds are shown, of several starts of the job.

Any training whose optimizers are torch's can be measured, for instance of 4 ranks:

    python benchmarks/step_cost.py --ranks 4 --results out.json --script train.py --config small.yml

Steps are also compared in those pieces only where a recorder runs (`operators`), which vary less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import groups
import in_turns
import numpy as np
import numpy.typing as npt
import operators
import results
import training_steps
from measuring import A_CALL, PIECES, PROCESSOR, Interval, Row, interval_of, rotated
from sides import recorders

import commtrace

SETTLED_S: Final = 9.0
"""A recorder reads the set-up of its process again until 7 s after its start."""
LIMIT_S: Final = 120
SIDES: Final = ("bare", "again", "side")
BLOCK: Final = 6
"""Rounds of which medians of pieces are taken: these have every order once."""
LOOKED_AT: Final = 3
"""Steps in which functions of commtrace are looked for."""


def main() -> None:
    """Measure all trainings, or a script, and write the results."""
    parser = results.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how often the job is started (%(default)s)")
    parser.add_argument("--rounds", type=int, default=120, help="recorded turns of a job (%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a turn (%(default)s)")
    parser.add_argument("--ranks", type=int, action="append", help="ranks of a job (2); may be repeated")
    parser.add_argument("--script", nargs=argparse.REMAINDER, help="a program and its arguments, in place of ours")
    options = results.parsed(parser, jobs=1, rounds=2, seconds=0.0)
    if "native" not in recorders():
        parser.error("the native recorder is not built; run `commtrace build`")
    programs = [f"{size} {scheme}" for size in in_turns.SIZES for scheme in training_steps.SCHEMES]
    if options.script:
        programs = [Path(options.script[0]).stem]
    operators.native()  # before several processes of a job build it
    rows = []
    for ranks in options.ranks or [2]:
        for program in programs:
            if options.only in program:
                rows += measured(program, ranks, options)
    results.write("step_cost", rows, options)


def measured(program: str, ranks: int, options: argparse.Namespace) -> list[Row]:
    """Return the rows of a training: its step's time and processor time, and what the report states."""
    starts = []
    for number in range(options.jobs):
        starts.append(Start.measure(program, ranks, number, options))
        print(f"{program}, {number}: {starts[-1].summary()}", file=sys.stderr, flush=True)
    case, name = f"{program}, {ranks} ranks", "commtrace, native, with call sites"
    calls = statistics.mean(start.calls for start in starts)
    reported_us = statistics.median(start.reported_us for start in starts)
    step_ms = statistics.median(value for start in starts for value in start.wall["bare"])
    rows = [
        row_of(case, name, "ms", [start.wall for start in starts]),
        row_of(f"{case}{PROCESSOR}", name, "ms", [start.processor for start in starts]),
        Row(case, f"{name}: calls", "a step", calls),
        Row(case, f"{name}: as reported", "us a call", reported_us),
        Row(case, f"{name}: writing", "% of a core", statistics.median(start.writing for start in starts)),
        row_of(f"{case}{PIECES}", name, "ms", [start.pieces for start in starts]),
        Row(f"{case}{PIECES}", f"{name}: the step", "ms", step_ms),
        Row(f"{case}{PIECES}", f"{name}: calls", "a step", calls),
        row_of(f"{case}{A_CALL}", name, "us", [start.call for start in starts]),
        Row(f"{case}{A_CALL}", f"{name}: as reported", "us a call", reported_us),
    ]
    for row in rows:
        results.show(row)
    return rows


def row_of(case: str, name: str, unit: str, starts: Sequence[Mapping[str, Sequence[float]]]) -> Row:
    """Return the row of all starts of a training; `starts` has the values of each one's turns, by side."""
    turns = {side: [value for of in starts for value in of[side]] for side in starts[0]}
    ratio, control = (ratio_of(turns, side) for side in ("side", "again"))
    bare = statistics.median(turns["bare"])
    return Row(
        case, name, unit, side=statistics.median(turns["side"]), bare=bare, difference=(ratio.mean - 1) * bare,
        ratio=ratio.mean, control=control.mean, control_difference=(control.mean - 1) * bare, pairs=len(turns["side"]),
        ratio_interval=ratio.bounds, control_interval=control.bounds,
    )  # fmt: skip


def ratio_of(turns: Mapping[str, Sequence[float]], side: str) -> Interval:
    """Return the ratio of recorded turns to the two others of their rounds, or of the second of these to the first.

    Means are of logarithms: that of ratios is above 1 when nothing differs, by the variance of a turn.
    """
    logs = {name: [math.log(value) for value in values] for name, values in turns.items()}
    bare = logs["bare"]
    if side != "again":
        bare = [(one + other) / 2 for one, other in zip(bare, logs["again"], strict=True)]
    mean, bounds = interval_of([value - of for value, of in zip(logs[side], bare, strict=True)])
    return Interval(math.exp(mean), (math.exp(bounds[0]), math.exp(bounds[1])))


class Start(NamedTuple):
    """What the turns of one job took, a step in ms, by side."""

    wall: Mapping[str, list[float]]
    processor: Mapping[str, list[float]]
    pieces: Mapping[str, list[float]]
    """Processor time of the training thread in pieces where a recorder runs, ms, by blocks of turns."""
    call: Mapping[str, list[float]]
    """That of an operator which communicates, us: until it has returned, not until it has ended."""
    calls: float
    """Of a recorded step and rank."""
    reported_us: float
    """Cost of a call that the report states, us, of those that are not the first of a call site."""
    writing: float
    """Share of a core that the thread of a rank takes which writes the log, %."""

    @classmethod
    def measure(cls, program: str, ranks: int, number: int, options: argparse.Namespace) -> Start:
        """Start the job, let it train in turns, and end it."""
        order = [side for number_of in range(options.rounds) for side in rotated(SIDES, number_of + number)]
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            files = [Path(folder) / f"pieces-{rank}" for rank in range(ranks)]
            with running(program, files, log, options) as job:
                steps = warmed_up(job, options.seconds)
                job.turn(LOOKED_AT, recorded=True, looks=True)
                turns = [job.turn(steps, recorded=side == "side") for side in order]
                job.end()
            pieces = [operators.read(file) for file in files]
            return cls.of(order, turns, steps, pieces, recorded(log, ranks))

    @classmethod
    def of(
        cls, order: Sequence[str], turns: Sequence[Turn], steps: int, pieces: Sequence[operators.Turns],
        stated: tuple[float, float, float],
    ) -> Start:  # fmt: skip
        """Return what these turns of so many steps took.

        Args:
            order: The side of each turn.
            turns: Their times.
            steps: Steps of a turn.
            pieces: Those of each rank, of these turns and one before them, in which functions were looked for.
            stated: What `recorded` has returned.
        """
        numbers = {side: [number for number, of in enumerate(order) if of == side] for side in SIDES}
        selected = [operators.Selected.of(of[-len(order) - 1]) for of in pieces]
        calls = statistics.mean(int(of.calls.sum()) for of in selected)
        blocks = {side: np.array_split(of, max(2, len(of) // BLOCK)) for side, of in numbers.items()}

        def times(block: npt.NDArray[Any]) -> npt.NDArray[Any]:
            """Return the ms of `operators.Selected.times` in the steps of these turns, mean of the ranks."""
            steps = ([step for number in block for step in of[number - len(order)]] for of in pieces)
            of_ranks = np.array([one.times(of) for one, of in zip(selected, steps, strict=True)])
            mean: npt.NDArray[Any] = of_ranks.mean(axis=0)
            return mean

        ms = {side: [times(block) for block in of_side] for side, of_side in blocks.items()}
        return cls(
            {side: [1e3 * turns[number].wall / steps for number in of] for side, of in numbers.items()},
            {side: [1e3 * turns[number].processor / steps for number in of] for side, of in numbers.items()},
            {side: [float(of.sum()) for of in blocks] for side, blocks in ms.items()},
            {side: [1e3 * float(of[0]) / calls for of in blocks] for side, blocks in ms.items()},
            *stated,
        )

    def summary(self) -> str:
        """Return the ratios in a line."""
        parts = []
        measured = {
            "wall, ms": self.wall, "processor, ms": self.processor, "pieces, ms": self.pieces,
            "a call, us": self.call,
        }  # fmt: skip
        for name, turns in measured.items():
            ratio, control = (ratio_of(turns, side) for side in ("side", "again"))
            half = (ratio.bounds[1] - ratio.bounds[0]) / 2
            bare = statistics.median(turns["bare"])
            parts.append(f"{name}: {bare:.4g}, {ratio.mean:.4f} +-{half:.4f} (control {control.mean:.4f})")
        stated = f"{self.calls:.4g} calls a step, {self.reported_us:.3g} us as reported, writing {self.writing:.2g} %"
        return f"{'; '.join(parts)}; {stated}"


def warmed_up(job: Job, seconds: float) -> int:
    """Let the job train until it is settled, and return the steps of a turn of about this length."""
    began = time.monotonic()
    while True:
        turn = job.turn(3, recorded=True)
        if seconds == 0 or time.monotonic() - began > SETTLED_S:
            return max(1, round(3 * seconds / turn.wall))


def recorded(log: Path, ranks: int) -> tuple[float, float, float]:
    """Return `calls`, `reported_us` and `writing` of a `Start`. Raise if something is missing in the log."""
    run = commtrace.open(log)
    assert len(run.processes) == ranks, run.processes
    for process in run.processes:
        stats: dict[str, Any] = process.tables.stats or {}
        assert process.tables.process.get("recorder") == "native", process.tables.process
        assert not stats["dropped"], stats
        assert not stats["hook_errors"], stats["first_error"]
    steps = run.events()["step"]
    calls = steps[steps > steps.max() // 2].value_counts() / ranks
    cost = run.table("tracing_cost")
    writing = 100 * (cost["drain_ns"] / cost["span_ns"]).mean()
    return float(calls.median()), float(cost["steady_mean_ns"].mean()) / 1e3, float(writing)


# ---- jobs ------------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What some steps took, s."""

    wall: float
    """Of the slowest rank."""
    processor: float
    """Of all threads of all ranks."""


class Job:
    """The processes of a job, each behind a socket, which train only in its turns."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], sockets: Sequence[socket.socket]) -> None:
        self._processes = processes
        self._files = [one.makefile("rw") for one in sockets]
        for file in self._files:
            self._read(file)  # the first step of each rank

    def turn(self, steps: int, *, recorded: bool, looks: bool = False) -> Turn:
        """Let the job train for some steps, after one that is not timed. May look for functions of commtrace."""
        self._grant(steps, recorded=recorded, looks=looks)
        times = [self._read(file) for file in self._files]
        return Turn(
            wall=max(time.wall for time in times),
            processor=sum(time.processor for time in times),
        )

    def end(self) -> None:
        """End the job, and its log."""
        self._grant(0, recorded=True, looks=False)
        for process in self._processes:
            assert process.wait(LIMIT_S) == 0, process.args

    def _grant(self, steps: int, *, recorded: bool, looks: bool) -> None:
        for file in self._files:
            file.write(f"{json.dumps([steps, recorded, looks])}\n")
            file.flush()

    def _read(self, file: Any) -> in_turns.Times:
        line = file.readline()
        if not line:
            raise RuntimeError(f"a rank has ended: {[process.poll() for process in self._processes]}")
        return in_turns.Times(*json.loads(line))


@contextmanager
def running(program: str, files: Sequence[Path], log: Path, options: argparse.Namespace) -> Iterator[Job]:
    """Start the ranks of a job as torchrun does, each with its file for pieces, and end what is left of them."""
    port, processes, sockets = groups.free_port(), [], []
    ranks = len(files)
    try:
        for rank in range(ranks):
            ours, theirs = socket.socketpair()
            ours.settimeout(LIMIT_S)
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu",
                "PYTHONWARNINGS": "ignore", "COMMTRACE": log, "COMMTRACE_RECORDER": "native",
            }  # fmt: skip
            arguments = [str(theirs.fileno()), str(files[rank]), *(options.script or [program])]
            processes.append(
                subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("in_turns.py"), *arguments],
                    env={**os.environ, **{name: str(value) for name, value in environment.items()}},
                    pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL,
                )
            )  # fmt: skip
            theirs.close()
            sockets.append(ours)
        yield Job(processes, sockets)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
